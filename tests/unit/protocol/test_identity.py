# SPDX-License-Identifier: Apache-2.0
"""Identities on disk, and the proof that ties a TLS key to them."""

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.protocol import identity as identity_module
from shoal.protocol.errors import AdmissionError, StorageError, VersionError
from shoal.protocol.identity import (
    IDENTITY_FILE,
    MAX_CLOCK_SKEW_S,
    NodeIdentity,
    TlsKey,
    make_join_request,
    peer_id_of_key,
    verify,
    verify_join_request,
)
from shoal.protocol.ids import RunId
from shoal.protocol.proto import coordinator_pb2
from shoal.version import PROTOCOL_VERSION, __version__

NOW_S = 1_800_000_000.25


@pytest.fixture
def identity(tmp_path: Path) -> NodeIdentity:
    return NodeIdentity.load_or_create(tmp_path / "node")


@pytest.fixture
def request_(identity: NodeIdentity) -> coordinator_pb2.JoinRequest:
    return make_join_request(identity, TlsKey.generate(), "token", RunId("run-0123abcd"), NOW_S)


def test_identity_is_the_same_after_a_restart(tmp_path: Path) -> None:
    first = NodeIdentity.load_or_create(tmp_path / "node")
    second = NodeIdentity.load_or_create(tmp_path / "node")
    assert first.peer_id == second.peer_id
    assert verify(second.public_bytes, first.sign(b"x"), b"x")


def test_key_file_is_private_and_leaves_no_temporary(tmp_path: Path) -> None:
    NodeIdentity.load_or_create(tmp_path / "node")
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "node" / IDENTITY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "node").iterdir()] == [IDENTITY_FILE]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_key_file_open_to_others_is_refused_with_remedy(tmp_path: Path, mode: int) -> None:
    NodeIdentity.load_or_create(tmp_path)
    (tmp_path / IDENTITY_FILE).chmod(mode)
    with pytest.raises(StorageError, match="chmod 600"):
        NodeIdentity.load_or_create(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"nonsense", "half"])
def test_damaged_key_file_is_refused_and_kept(tmp_path: Path, damage: bytes | str) -> None:
    NodeIdentity.load_or_create(tmp_path)
    path = tmp_path / IDENTITY_FILE
    whole = path.read_bytes()
    path.write_bytes(damage if isinstance(damage, bytes) else whole[: len(whole) // 2])
    before = path.read_bytes()
    with pytest.raises(StorageError, match="damaged"):
        NodeIdentity.load_or_create(tmp_path)
    assert path.read_bytes() == before


def test_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    NodeIdentity.load_or_create(tmp_path)
    (tmp_path / IDENTITY_FILE).write_bytes(TlsKey.generate().private_pem)
    with pytest.raises(StorageError, match="Ed25519"):
        NodeIdentity.load_or_create(tmp_path)


def test_unwritable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="can't read or create"):
        NodeIdentity.load_or_create(tmp_path / "file" / "node")


def test_slower_creator_takes_the_faster_ones_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = NodeIdentity.load_or_create(tmp_path / "faster")
    generate = identity_module.private_pem

    def overtaken(key: ec.EllipticCurvePrivateKey) -> bytes:
        (tmp_path / "faster" / IDENTITY_FILE).rename(tmp_path / IDENTITY_FILE)
        return generate(key)

    monkeypatch.setattr(identity_module, "private_pem", overtaken)
    assert NodeIdentity.load_or_create(tmp_path).peer_id == faster.peer_id


def test_peer_id_is_26_base32_characters_of_the_key(identity: NodeIdentity) -> None:
    assert len(identity.peer_id) == 26
    assert set(identity.peer_id) <= set("abcdefghijklmnopqrstuvwxyz234567")
    assert identity.peer_id == peer_id_of_key(identity.public_bytes)
    assert peer_id_of_key(bytes(32)) == "mzuhvlpymk6xo3epygfy5h4oea"


def test_verify_is_false_for_malformed_keys_and_signatures(identity: NodeIdentity) -> None:
    assert not verify(b"short", identity.sign(b"x"), b"x")
    assert not verify(identity.public_bytes, b"short", b"x")
    assert not verify(identity.public_bytes, identity.sign(b"x"), b"y")


def test_nothing_prints_a_private_key(identity: NodeIdentity) -> None:
    tls_key = TlsKey.generate()
    assert "PRIVATE" not in repr(identity) + repr(tls_key)
    assert identity.peer_id in repr(identity)


def test_join_request_proves_its_identity(
    identity: NodeIdentity, request_: coordinator_pb2.JoinRequest
) -> None:
    assert verify_join_request(request_, NOW_S) == identity.peer_id


def test_tampered_join_request_is_refused(request_: coordinator_pb2.JoinRequest) -> None:
    changes = {
        "run_id": "run-ffffffff",
        "token": "tokem",
        "identity_key": bytes(32),
        "tls_key": TlsKey.generate().spki_der,
        "time_s": request_.time_s + 1,
        "proof": bytes(64),
    }
    for name, value in changes.items():
        altered = coordinator_pb2.JoinRequest()
        altered.CopyFrom(request_)
        setattr(altered, name, value)
        with pytest.raises(AdmissionError, match="proof"):
            verify_join_request(altered, NOW_S)


def test_moving_bytes_between_fields_breaks_the_proof(
    request_: coordinator_pb2.JoinRequest,
) -> None:
    request_.run_id, request_.token = request_.run_id + "t", request_.token[1:]
    with pytest.raises(AdmissionError, match="proof"):
        verify_join_request(request_, NOW_S)


def test_another_protocol_version_names_both_and_the_remedy(
    request_: coordinator_pb2.JoinRequest,
) -> None:
    request_.protocol_version = PROTOCOL_VERSION + 6
    request_.release = "7.7.7"
    with pytest.raises(VersionError) as caught:
        verify_join_request(request_, NOW_S)
    message = str(caught.value)
    assert f"version {PROTOCOL_VERSION} " in message
    assert f"version {PROTOCOL_VERSION + 6} " in message
    assert "7.7.7" in message
    assert f"pip install 'shoal=={__version__}'" in message


@pytest.mark.parametrize("sign", [1, -1])
def test_clock_skew_is_accepted_up_to_the_limit(
    request_: coordinator_pb2.JoinRequest, sign: int
) -> None:
    verify_join_request(request_, NOW_S + sign * MAX_CLOCK_SKEW_S)
    with pytest.raises(AdmissionError, match="clock"):
        verify_join_request(request_, NOW_S + sign * (MAX_CLOCK_SKEW_S + 1))


def test_oversized_fields_are_refused_before_anything_is_verified(
    request_: coordinator_pb2.JoinRequest,
) -> None:
    request_.token = "t" * 100_000
    with pytest.raises(AdmissionError, match="too long"):
        verify_join_request(request_, NOW_S)
    request_.token = "t"
    request_.tls_key = bytes(100_000)
    with pytest.raises(AdmissionError, match="TLS key has 100000 bytes"):
        verify_join_request(request_, NOW_S)


def test_tls_key_on_another_curve_is_refused(request_: coordinator_pb2.JoinRequest) -> None:
    request_.tls_key = (
        ec.generate_private_key(ec.SECP384R1())
        .public_key()
        .public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(AdmissionError, match="P-256"):
        verify_join_request(request_, NOW_S)
