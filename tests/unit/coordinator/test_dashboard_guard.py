# SPDX-License-Identifier: Apache-2.0
"""Which Host and Origin headers pass."""

import pytest

from shoal.coordinator.dashboard.guard import host_is_allowed, origin_is_allowed


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1:1", "127.9.9.9", "[::1]:80", "LOCALHOST."]
)
def test_loopback_always_passes(host: str) -> None:
    assert host_is_allowed(host, set())


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.7",
     "[::1", "evil@localhost:x:y", "0177.0.0.1.example", "2130706433"],
)  # fmt: skip
def test_other_hosts_do_not_pass(host: str) -> None:
    assert not host_is_allowed(host, set())


def test_bound_host_passes_and_a_wildcard_takes_addresses_but_no_names() -> None:
    assert host_is_allowed("gpu-box.lan:80", {"gpu-box.lan"})
    assert host_is_allowed("192.168.1.7:80", {"0.0.0.0"})
    assert not host_is_allowed("evil.example", {"0.0.0.0"})


@pytest.mark.parametrize(
    ("origin", "passes"),
    [
        (None, True),
        ("http://127.0.0.1:80", True),
        ("https://127.0.0.1:80", True),
        ("http://127.0.0.1:81", False),
        ("http://evil.example", False),
        ("null", False),
        ("file://127.0.0.1:80", False),
        ("http://[", False),
    ],
)
def test_only_the_own_origin_passes(origin: str | None, passes: bool) -> None:
    assert origin_is_allowed(origin, "127.0.0.1:80") is passes
