# SPDX-License-Identifier: Apache-2.0
"""The run's authority: leaves, tokens, statements, and what a joiner believes of a leaf."""

import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.protocol.authority import (
    AUTHORITY_FILE,
    BACKDATE_S,
    Authority,
    check_authority,
    fetch_authority,
    peer_host,
    verify_with_certificate,
)
from shoal.protocol.errors import AdmissionError, StorageError, UnreachableError
from shoal.protocol.identity import NodeIdentity, TlsKey
from shoal.protocol.ids import PeerId, RunId

NOW_S = 1_800_000_000.0
RUN = RunId("run-0123abcd")
PEER = PeerId("abcdefghijklmnopqrstuvwx23")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.load_or_create(tmp_path / "authority")


def leaf_der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def coordinator_leaf(authority: Authority, *, now_s: float = NOW_S) -> bytes:
    pem, _ = authority.issue_leaf(TlsKey.generate().spki_der, PEER, 3600, now_s, True)
    return leaf_der(pem)


def test_authority_is_the_same_after_a_restart(authority: Authority, tmp_path: Path) -> None:
    again = Authority.load_or_create(tmp_path / "authority")
    assert again.fingerprint == authority.fingerprint
    assert again.certificate_der == authority.certificate_der
    assert (tmp_path / "authority" / AUTHORITY_FILE).stat().st_mode & 0o777 == 0o600


def test_authority_file_with_a_foreign_certificate_is_refused(tmp_path: Path) -> None:
    Authority.load_or_create(tmp_path / "a")
    other = Authority.load_or_create(tmp_path / "b")
    path = tmp_path / "a" / AUTHORITY_FILE
    key_pem = path.read_bytes().split(b"-----BEGIN CERTIFICATE")[0]
    path.write_bytes(key_pem + other.certificate_pem)
    with pytest.raises(StorageError, match="belong together"):
        Authority.load_or_create(tmp_path / "a")
    path.write_bytes(key_pem)
    with pytest.raises(StorageError, match="damaged"):
        Authority.load_or_create(tmp_path / "a")


def test_leaf_names_its_peer_and_lives_from_five_minutes_ago(authority: Authority) -> None:
    pem, expires_s = authority.issue_leaf(TlsKey.generate().spki_der, PEER, 3600, NOW_S)
    leaf = x509.load_pem_x509_certificate(pem)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [f"{PEER}.peer.shoal"] == [peer_host(PEER)]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"shoal:peer:{PEER}"]
    assert expires_s == NOW_S + 3600
    issued = datetime.datetime.fromtimestamp(NOW_S, datetime.UTC)
    assert leaf.not_valid_after_utc == issued + datetime.timedelta(seconds=3600)
    assert leaf.not_valid_before_utc == issued - datetime.timedelta(seconds=BACKDATE_S)
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_leaf_for_an_ed25519_key_is_refused(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(AdmissionError, match="TLS key"):
        authority.issue_leaf(NodeIdentity.load_or_create(tmp_path).public_bytes, PEER, 60, NOW_S)


def test_statements_verify_with_the_certificate_only_if_unaltered(authority: Authority) -> None:
    signature = authority.sign(b"plan")
    assert verify_with_certificate(authority.certificate_der, signature, b"plan")
    assert not verify_with_certificate(authority.certificate_der, signature, b"plam")
    assert not verify_with_certificate(b"nonsense", signature, b"plan")
    assert not verify_with_certificate(coordinator_leaf(authority), signature, b"plan")


def test_statement_is_never_a_certificate(authority: Authority) -> None:
    leaf = x509.load_der_x509_certificate(coordinator_leaf(authority))
    assert authority.sign(leaf.tbs_certificate_bytes) != leaf.signature


# ---- tokens ------------------------------------------------------------------------------


def test_token_admits_until_it_expires(authority: Authority) -> None:
    token = authority.issue_token(RUN, 1_800_000_060)
    authority.check_token(token, RUN, NOW_S + 59.9)
    with pytest.raises(AdmissionError) as caught:
        authority.check_token(token, RUN, NOW_S + 180)
    assert "expired at 2027-01-15 08:01 UTC (2 min ago)" in str(caught.value)
    assert "new link" in str(caught.value)


def test_token_of_another_run_names_both(authority: Authority) -> None:
    token = authority.issue_token(RunId("other-00000000"), 1_800_000_060)
    with pytest.raises(AdmissionError, match=f"other-00000000.*{RUN}"):
        authority.check_token(token, RUN, NOW_S)


def test_altered_or_foreign_token_is_refused(authority: Authority, tmp_path: Path) -> None:
    token = authority.issue_token(RUN, 1_800_000_060)
    foreign = Authority.load_or_create(tmp_path / "foreign").issue_token(RUN, 1_800_000_060)
    flipped = [
        token[:i] + ("A" if token[i] != "A" else "B") + token[i + 1 :]
        for i in range(0, len(token) - 1, 7)
    ]
    for bad in ["", "AQ", "ä" * 40, "A" * 100_000, token[:-3], token + "AAAA", foreign, *flipped]:
        with pytest.raises(AdmissionError, match="altered"):
            authority.check_token(bad, RUN, NOW_S)


# ---- the joiner's side -------------------------------------------------------------------


def test_coordinators_leaf_proves_the_authority(authority: Authority) -> None:
    proof = check_authority(coordinator_leaf(authority), authority.fingerprint, now_s=NOW_S)
    assert proof.authority_pem == authority.certificate_pem
    assert proof.server_peer_id == PEER


def test_leaf_of_an_ordinary_node_does_not_pass_for_the_coordinators(authority: Authority) -> None:
    pem, _ = authority.issue_leaf(TlsKey.generate().spki_der, PEER, 3600, NOW_S)
    with pytest.raises(AdmissionError, match="isn't a Shoal coordinator"):
        check_authority(leaf_der(pem), authority.fingerprint, now_s=NOW_S)


def test_another_runs_authority_does_not_match_the_fingerprint(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority.load_or_create(tmp_path / "other")
    with pytest.raises(AdmissionError, match="fingerprint"):
        check_authority(coordinator_leaf(other), authority.fingerprint, now_s=NOW_S)


def test_self_signed_leaf_around_the_right_authority_is_refused(authority: Authority) -> None:
    genuine = x509.load_der_x509_certificate(coordinator_leaf(authority))
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(genuine.subject)
        .issuer_name(genuine.issuer)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(genuine.not_valid_before_utc)
        .not_valid_after(genuine.not_valid_after_utc)
    )
    for extension in genuine.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    forged = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    with pytest.raises(AdmissionError, match="not signed"):
        check_authority(forged, authority.fingerprint, now_s=NOW_S)


def test_expired_leaf_points_at_the_clock(authority: Authority) -> None:
    with pytest.raises(AdmissionError, match="clock"):
        check_authority(coordinator_leaf(authority), authority.fingerprint, now_s=NOW_S + 3601)


def test_garbage_instead_of_a_leaf_is_refused(authority: Authority) -> None:
    for garbage in [b"", b"\x30\x82", bytes(1000)]:
        with pytest.raises(AdmissionError, match="isn't a Shoal coordinator"):
            check_authority(garbage, authority.fingerprint, now_s=NOW_S)


@contextmanager
def listening(handle: bool, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A loopback listener: silent, or one that makes TLS handshakes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                if context is not None:
                    context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=accept, daemon=True)
        if handle:
            thread.start()
        yield server.getsockname()[1]
        if handle:
            thread.join(timeout=10)


def test_silent_server_is_unreachable_within_the_deadline() -> None:
    with listening(handle=False) as port:  # the kernel accepts, nobody speaks
        with pytest.raises(UnreachableError, match=r"within 0\.2 s"):
            fetch_authority("127.0.0.1", port, "0" * 64, timeout_s=0.2)


def test_server_without_tls_and_closed_port_are_unreachable() -> None:
    with listening(handle=True) as port:
        with pytest.raises(UnreachableError):
            fetch_authority("127.0.0.1", port, "0" * 64, timeout_s=5)
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{port}"):
        fetch_authority("127.0.0.1", port, "0" * 64, timeout_s=5)
