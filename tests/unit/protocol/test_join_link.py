# SPDX-License-Identifier: Apache-2.0
"""Join links as text, and addresses in them."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import AdmissionError
from shoal.protocol.ids import RunId
from shoal.protocol.join_link import MAX_LINK_CHARS, JoinLink, join_address, split_address

LINK = JoinLink(
    addresses=("example.org:4100",),
    run_id=RunId("tiny-run-0123abcd"),
    fingerprint="0a" * 32,
    token="AQAA-_token",
    expires_s=1_800_000_000,
)
TEXT = str(LINK)


@pytest.mark.parametrize(
    "link",
    [
        LINK,
        replace(LINK, addresses=("[2001:db8::1]:4100",)),
        replace(LINK, addresses=("10.0.0.1:1", "[::1]:65535", "a-b.c_d.example:2")),
        replace(
            LINK,
            discovery=(
                "/ip4/10.0.0.1/tcp/5000/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
                "/ip6/::1/udp/1/quic&a=b#c?d+e%20",
            ),
        ),
    ],
)
def test_link_survives_the_round_trip(link: JoinLink) -> None:
    assert JoinLink.parse(str(link)) == link
    assert JoinLink.parse(f"  {link}\n") == link


def test_link_reads_as_documented() -> None:
    assert (
        "shoal://example.org:4100/tiny-run-0123abcd"
        f"?fp={'0a' * 32}&token=AQAA-_token&expires=1800000000"
    ) == TEXT


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "begins with"),
        (TEXT.replace("shoal://", "https://"), "begins with"),
        (TEXT.replace(":4100", ""), "no port"),
        (TEXT.replace(":4100", ":0"), "1 to 65535"),
        (TEXT.replace(":4100", ":65536"), "1 to 65535"),
        (TEXT.replace("example.org", "exa mple"), "no host name"),
        (TEXT.replace("example.org", "user@example.org"), "no host name"),
        (TEXT.replace("example.org", "::1"), "brackets"),
        (TEXT.replace("example.org", "[::g]"), "malformed"),
        (TEXT.replace("example.org", "[fe80::1%eth0]"), "malformed"),
        (TEXT.replace("tiny-run-0123abcd", ""), "valid run"),
        (TEXT.replace("tiny-run-0123abcd", "tiny/../run-0123abcd"), "valid run"),
        (TEXT.replace("fp=0a", "fp="), "valid fp"),
        (TEXT.replace("fp=", "pf="), "fp= 0 times"),
        (TEXT.replace("AQAA-_token", ""), "valid token"),
        (TEXT.replace("AQAA-_token", "a%00b"), "valid token"),
        (TEXT.replace("AQAA-_token", "a" * 2000), "valid token"),
        (TEXT + "&token=b", "token= 2 times"),
        (TEXT.replace("1800000000", "-1"), "valid expires"),
        (TEXT.replace("1800000000", "9" * 400), "valid expires"),
        (TEXT.partition("&token")[0], "token= 0 times"),
        (TEXT + "&colour=red", "unknown part 'colour'"),
        (TEXT + "&also=x", "no port"),
        (TEXT + "&also=a:1" * 8, "9 addresses"),
        (TEXT + "&dht=/a" * 17, "17 dht"),
        (TEXT + "&dht=/a" * 100, "malformed"),
        (TEXT + "&dht=nonsense", "valid dht"),
        (TEXT + "&dht", "malformed"),
        (TEXT + "#frag", "ends in"),
        (TEXT + "&dht=/" + "a" * MAX_LINK_CHARS, "characters"),
    ],
)
def test_malformed_link_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        JoinLink.parse(text)
    assert reason in str(caught.value)
    assert "copy the whole line" in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_is_a_link_or_an_admission_error(text: str) -> None:
    for candidate in (text, f"shoal://{text}", TEXT + text, f"shoal://h:1/{text}?{text}"):
        with contextlib.suppress(AdmissionError):
            JoinLink.parse(candidate)


def test_expired_link_is_refused_with_remedy() -> None:
    LINK.require_fresh(1_799_999_999.0)
    with pytest.raises(AdmissionError, match=r"expired at 2027-01-15 08:00 UTC.*new link"):
        LINK.require_fresh(1_800_000_000.0)
    with pytest.raises(AdmissionError, match="expired"):
        replace(LINK, expires_s=0).require_fresh(1e18)


def test_token_is_not_in_the_repr() -> None:
    assert LINK.token not in repr(LINK)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:1", ("localhost", 1)),
        ("[2001:DB8::1]:80", ("2001:db8::1", 80)),
        ("example.org.:443", ("example.org.", 443)),
    ],
)
def test_address_splits_into_host_and_port(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize(
    "address",
    ["", ":1", "host", "host:", "host:x", "host:١", "dns:///host:1", "unix:/run/x.sock", "a..b:1",
     "[]:1", "[1.2.3.4]:1", "h\n:1", "a" * 300 + ":1", "[::1%lo]:1"],
)  # fmt: skip
def test_anything_else_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match=r"port|host name|IPv6"):
        split_address(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "node.example.org"])
def test_joined_addresses_split_again(host: str) -> None:
    assert split_address(join_address(host, 7600)) == (host, 7600)
