# SPDX-License-Identifier: Apache-2.0
"""Peer records: what is believed and what is refused; and the in-memory discovery."""

import dataclasses
import datetime
import hashlib

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from shoal.protocol.authority import Authority
from shoal.protocol.discovery import (
    MAX_RECORD_BYTES,
    Discovery,
    InMemoryDiscovery,
    PeerRecord,
    coordinator_record,
    node_record,
    open_record,
    sign_record,
)
from shoal.protocol.errors import (
    MalformedFrameError,
    OversizedStreamError,
    ProtocolError,
    RecordError,
)
from shoal.protocol.identity import peer_id_of_key
from shoal.protocol.ids import RunId, Stage

RUN = RunId("tiny-0a1b2c3d")
NOW_S = 1_800_000_000.0


def key_of(seed: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def public_of(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def certificate_of(key: Ed25519PrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "run authority")])
    start = datetime.datetime.fromtimestamp(NOW_S, datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=365))
        .sign(key, None)
        .public_bytes(Encoding.DER)
    )


def node_of(key: Ed25519PrivateKey, *, now_s: float = NOW_S, lifetime_s: float = 600) -> PeerRecord:
    return node_record(
        run_id=RUN,
        public_key=public_of(key),
        address="203.0.113.7:4711",
        stage=Stage(2),
        protocol_version=1,
        now_s=now_s,
        capabilities={"dtype": "bf16"},
        lifetime_s=lifetime_s,
    )


def coordinator_of(
    key: Ed25519PrivateKey, *, now_s: float = NOW_S, address: str = "[2001:db8::1]:443"
) -> PeerRecord:
    return coordinator_record(
        run_id=RUN,
        authority_der=certificate_of(key),
        address=address,
        protocol_version=1,
        now_s=now_s,
    )


def authority_of(key: Ed25519PrivateKey) -> Authority:
    return Authority(key, x509.load_der_x509_certificate(certificate_of(key)))


def fingerprint_by(key: Ed25519PrivateKey) -> bytes:
    return hashlib.sha256(certificate_of(key)).digest()


def test_peer_id_is_26_lower_case_base32_characters_of_the_keys_digest() -> None:
    # RFC 8032's first test key; the value was computed with coreutils' sha256sum and base32.
    key = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    assert peer_id_of_key(key) == "eh7ddx5bksrgcytl7bkai36se4"


def test_node_record_survives_the_wire() -> None:
    record = node_of(key_of(1))
    assert open_record(sign_record(record, key_of(1).sign), NOW_S) == record


def test_coordinator_record_is_believed_with_the_right_fingerprint() -> None:
    record = coordinator_of(key_of(2))
    data = sign_record(record, authority_of(key_of(2)).sign)
    assert open_record(data, NOW_S, fingerprint=fingerprint_by(key_of(2))) == record
    assert len(data) < MAX_RECORD_BYTES / 2


def test_coordinator_record_of_another_authority_is_refused() -> None:
    data = sign_record(coordinator_of(key_of(3)), authority_of(key_of(3)).sign)
    with pytest.raises(RecordError, match="impostor"):
        open_record(data, NOW_S, fingerprint=fingerprint_by(key_of(2)))


def test_somebody_elses_certificate_does_not_help_an_impostor() -> None:
    # The right certificate, hence the right fingerprint, but signed with the impostor's key.
    impostor = authority_of(key_of(3))
    with pytest.raises(RecordError, match="forged"):
        sign_record(coordinator_of(key_of(2)), impostor.sign)


def test_certificate_of_another_key_than_the_records_is_refused() -> None:
    # Even the authority's own signature doesn't let a record speak for a second key.
    other = public_of(key_of(3))
    record = dataclasses.replace(
        coordinator_of(key_of(2)), public_key=other, peer_id=peer_id_of_key(other)
    )
    with pytest.raises(RecordError, match="not signed by the authority"):
        sign_record(record, authority_of(key_of(2)).sign)


def test_authoritys_signature_counts_only_as_a_statement() -> None:
    # The bare key also signs certificates and tokens: none of those may pass for a record.
    with pytest.raises(RecordError, match="forged"):
        sign_record(coordinator_of(key_of(2)), key_of(2).sign)


def test_record_signed_with_another_key_is_refused() -> None:
    with pytest.raises(RecordError, match="forged"):
        sign_record(node_of(key_of(1)), key_of(2).sign)


def test_record_under_a_strangers_peer_id_is_refused() -> None:
    record = dataclasses.replace(node_of(key_of(1)), peer_id=peer_id_of_key(public_of(key_of(2))))
    with pytest.raises(RecordError, match="another peer's key"):
        sign_record(record, key_of(1).sign)


@pytest.mark.parametrize("position", range(0, 400, 7))
def test_any_flipped_bit_is_refused(position: int) -> None:
    data = bytearray(sign_record(node_of(key_of(1)), key_of(1).sign))
    data[position % len(data)] ^= 1
    with pytest.raises(ProtocolError):
        open_record(bytes(data), NOW_S)


def test_expired_record_is_refused_at_the_second_it_expires() -> None:
    data = sign_record(node_of(key_of(1), lifetime_s=600), key_of(1).sign)
    open_record(data, NOW_S + 599)
    with pytest.raises(RecordError, match="expired"):
        open_record(data, NOW_S + 600)


def test_record_from_the_future_is_refused_beyond_clock_skew() -> None:
    data = sign_record(node_of(key_of(1)), key_of(1).sign)
    open_record(data, NOW_S - 30)
    with pytest.raises(RecordError, match="future"):
        open_record(data, NOW_S - 120)


@pytest.mark.parametrize("lifetime_s", [-1.0, 0.0, 3601.0])
def test_record_that_lives_too_long_or_not_at_all_is_refused(lifetime_s: float) -> None:
    with pytest.raises(RecordError, match="lives"):
        sign_record(node_of(key_of(1), lifetime_s=lifetime_s), key_of(1).sign)


def test_oversized_record_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(OversizedStreamError):
        open_record(b"\0" * (MAX_RECORD_BYTES + 1), NOW_S)


@pytest.mark.parametrize(
    "change",
    [
        {"address": "no-port"},
        {"address": "http://a/b:80"},
        {"run_id": "../etc"},
        {"role": "admin"},
        {"stage": -1},
        {"issued_s": float("nan")},
        {"public_key": b"short"},
        {"capabilities": {f"k{i}": "" for i in range(17)}},
        {"capabilities": {"k": "v" * 257}},
    ],
    ids=str,
)
def test_fields_out_of_bounds_are_refused(change: dict[str, object]) -> None:
    record = dataclasses.replace(node_of(key_of(1)), **change)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(MalformedFrameError):
        sign_record(record, key_of(1).sign)


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"\0" * 64 + b"[]", b"\0" * 64 + b"{" * 900])
def test_garbage_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        open_record(data, NOW_S)


def test_the_same_record_written_differently_is_refused() -> None:
    data = sign_record(node_of(key_of(1)), key_of(1).sign)
    spaced = data[64:].replace(b":", b": ", 1)
    resigned = key_of(1).sign(b"shoal peer record v1\0" + spaced) + spaced
    with pytest.raises(MalformedFrameError, match="canonical"):
        open_record(resigned, NOW_S)


def test_node_may_not_carry_a_certificate_and_a_coordinator_must() -> None:
    node = dataclasses.replace(node_of(key_of(1)), authority_der=certificate_of(key_of(1)))
    coordinator = dataclasses.replace(coordinator_of(key_of(1)), authority_der=None)
    for record, sign in ((node, authority_of(key_of(1)).sign), (coordinator, key_of(1).sign)):
        with pytest.raises(RecordError, match="certificate"):
            sign_record(record, sign)


async def test_in_memory_peers_find_each_other_and_the_coordinator() -> None:
    here: Discovery = InMemoryDiscovery(clock=lambda: NOW_S)
    assert isinstance(here, InMemoryDiscovery)
    there: Discovery = InMemoryDiscovery(here.table, clock=lambda: NOW_S)
    node, coordinator = node_of(key_of(1)), coordinator_of(key_of(2))
    await here.publish(sign_record(node, key_of(1).sign), node)
    await here.publish(sign_record(coordinator, authority_of(key_of(2)).sign), coordinator)
    assert await there.records(RUN) == [node]
    assert await there.records(RunId("other-0a1b2c3d")) == []
    assert await there.coordinator(RUN, fingerprint_by(key_of(2))) == coordinator
    assert await there.coordinator(RUN, fingerprint_by(key_of(3))) is None


async def test_in_memory_coordinator_that_moved_is_found_at_its_new_address() -> None:
    now_s = NOW_S
    discovery = InMemoryDiscovery(clock=lambda: now_s)
    for address in ("198.51.100.1:443", "198.51.100.2:443"):
        now_s += 5
        record = coordinator_of(key_of(2), now_s=now_s, address=address)
        await discovery.publish(sign_record(record, authority_of(key_of(2)).sign), record)
    found = await discovery.coordinator(RUN, fingerprint_by(key_of(2)))
    assert found is not None
    assert found.address == "198.51.100.2:443"
    now_s += 10_000
    assert await discovery.coordinator(RUN, fingerprint_by(key_of(2))) is None


async def test_in_memory_shows_no_record_forced_into_anothers_place() -> None:
    discovery = InMemoryDiscovery(clock=lambda: NOW_S)
    victim, forger = node_of(key_of(1)), node_of(key_of(2))
    discovery.table[(RUN, "node", victim.peer_id)] = sign_record(forger, key_of(2).sign)
    assert await discovery.records(RUN) == []


async def test_bytes_and_record_must_match_to_be_published() -> None:
    discovery = InMemoryDiscovery(clock=lambda: NOW_S)
    with pytest.raises(RecordError, match="another record"):
        await discovery.publish(sign_record(node_of(key_of(1)), key_of(1).sign), node_of(key_of(2)))
    assert not discovery.table
