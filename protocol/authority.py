# SPDX-License-Identifier: Apache-2.0
"""The run's certificate authority: it admits nodes, and everybody in the run trusts it alone.

One self-signed Ed25519 certificate per run. It signs short-lived P-256 leaves, one per peer, and
the expiring token of a join link. A joiner knows only the certificate's SHA-256, from its link;
`fetch_authority` gets the certificate itself over a connection that proves nothing but that.
"""

import base64
import datetime
import hashlib
import re
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.protocol.errors import AdmissionError, StorageError, UnreachableError
from shoal.protocol.identity import (
    MAX_TOKEN_CHARS,
    load_or_create_secret,
    parse_ed25519_pem,
    parse_tls_key,
    private_pem,
)
from shoal.protocol.ids import PeerId, RunId

AUTHORITY_FILE: Final = "authority.pem"
LEAF_LIFETIME_S: Final = 24 * 3600
BACKDATE_S: Final = 300
"""Leaves are valid from this long before their issue, for peers whose clock is behind."""

PEER_URI_PREFIX: Final = "shoal:peer:"
PEER_DNS_SUFFIX: Final = ".peer.shoal"

_AUTHORITY_LIFETIME_S: Final = 20 * 365 * 86400
_AUTHORITY_OID: Final = x509.ObjectIdentifier("2.25.23472626631493440492730404199270860640")
"""Extension of the coordinator's leaf: the DER of the authority. A UUID's OID needs no registry."""
_MAX_AUTHORITY_BYTES: Final = 4096
_STATEMENT_DOMAIN: Final = b"shoal authority statement v1\0"
_TOKEN_DOMAINS: Final = {
    "join": b"shoal admission token v1\0",
    "standby": b"shoal standby token v1\0",
}
_TOKEN_VERSION: Final = b"\x01"
_SIGNATURE_BYTES: Final = 64
TokenRole = Literal["join", "standby"]
"""What a token is good for: one role's never passes as another's."""

_PEER_ID: Final = re.compile(r"[a-z2-7]{26}")
_NEW_LINK: Final = "ask whoever launched the run for a new link (`shoal launch` prints one)"


def peer_host(peer_id: PeerId) -> str:
    """The DNS name in a peer's leaf. It is never resolved; clients pin it."""
    return f"{peer_id}{PEER_DNS_SUFFIX}"


def peer_id_from_uri(uri: str) -> PeerId | None:
    """The peer id in a leaf's SAN URI, or None for any other URI."""
    peer_id = uri.removeprefix(PEER_URI_PREFIX)
    if uri == peer_id or _PEER_ID.fullmatch(peer_id) is None:
        return None
    return PeerId(peer_id)


# ---- the coordinator's side --------------------------------------------------------------


class Authority:
    """The run's Ed25519 key and its certificate."""

    def __init__(self, key: ed25519.Ed25519PrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.certificate_pem: Final = certificate.public_bytes(serialization.Encoding.PEM)
        self.certificate_der: Final = certificate.public_bytes(serialization.Encoding.DER)
        self.fingerprint: Final = hashlib.sha256(self.certificate_der).hexdigest()

    @classmethod
    def load_or_create(cls, folder: Path) -> Self:
        """The authority kept in `folder`: key and certificate in one private file, so that they
        always belong together. Raises `StorageError` (see `load_or_create_secret`).
        """
        path = folder / AUTHORITY_FILE
        pem = load_or_create_secret(path, lambda: _create_authority(time.time()))
        key = parse_ed25519_pem(pem, path)
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            matches = certificate.public_key() == key.public_key()
        except ValueError as error:
            raise StorageError(
                f"the certificate in {path} is damaged ({error}); restore the file from a backup"
            ) from error
        if not matches:
            raise StorageError(
                f"key and certificate in {path} don't belong together; restore the file from a "
                "backup, or delete it and give out new join links"
            )
        return cls(key, certificate)

    def issue_leaf(
        self,
        spki_der: bytes,
        peer_id: PeerId,
        lifetime_s: float,
        now_s: float,
        embed_authority: bool = False,
    ) -> tuple[bytes, int]:
        """A leaf for a P-256 key, as (PEM, Unix time at which it expires).

        Only the coordinator's own leaf embeds the authority: joiners take that as the mark of
        the run's coordinator. `AdmissionError` for a key that isn't P-256.
        """
        key = parse_tls_key(spki_der)
        expires_s = int(now_s + lifetime_s)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, peer_id)]))
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_utc(now_s - BACKDATE_S))
            .not_valid_after(_utc(expires_s))
            .add_extension(
                x509.SubjectAlternativeName(
                    [
                        x509.DNSName(peer_host(peer_id)),
                        x509.UniformResourceIdentifier(f"{PEER_URI_PREFIX}{peer_id}"),
                    ]
                ),
                critical=False,
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
        )
        if embed_authority:
            builder = builder.add_extension(
                x509.UnrecognizedExtension(_AUTHORITY_OID, self.certificate_der), critical=False
            )
        leaf = builder.sign(self._key, algorithm=None)
        return leaf.public_bytes(serialization.Encoding.PEM), expires_s

    def sign(self, data: bytes) -> bytes:
        """A 64-byte signature, for `verify_with_certificate`.

        What is signed is never also a certificate or a token, whatever `data` is.
        """
        return self._key.sign(_STATEMENT_DOMAIN + data)

    def issue_token(self, run_id: RunId, expires_s: int, role: TokenRole = "join") -> str:
        """A token for any number of joiners, or standbys, until `expires_s` (Unix time)."""
        payload = _TOKEN_VERSION + expires_s.to_bytes(8, "big") + run_id.encode()
        signature = self._key.sign(_TOKEN_DOMAINS[role] + payload)
        return base64.urlsafe_b64encode(payload + signature).decode().rstrip("=")

    def check_token(
        self, token: str, run_id: RunId, now_s: float, role: TokenRole = "join"
    ) -> None:
        """Returns if the token admits to this run now; otherwise raises `AdmissionError`."""
        try:
            if len(token) > MAX_TOKEN_CHARS:
                raise ValueError(f"{len(token)} characters")
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            payload, signature = raw[:-_SIGNATURE_BYTES], raw[-_SIGNATURE_BYTES:]
            self._key.public_key().verify(signature, _TOKEN_DOMAINS[role] + payload)
            if payload[:1] != _TOKEN_VERSION:
                raise ValueError("another token version")
            expires_s, token_run_id = int.from_bytes(payload[1:9], "big"), payload[9:].decode()
        except (ValueError, InvalidSignature) as error:
            raise AdmissionError(
                "the join link's token was altered or comes from another coordinator; copy the "
                f"whole link again, or {_NEW_LINK}"
            ) from error
        if token_run_id != run_id:
            raise AdmissionError(
                f"the join link is for run {token_run_id}, this coordinator's run is {run_id}; "
                f"{_NEW_LINK}"
            )
        if now_s >= expires_s:
            raise AdmissionError(expired_message(expires_s, now_s))

    def __repr__(self) -> str:
        return f"Authority({self.fingerprint[:16]})"


def expired_message(expires_s: int, now_s: float) -> str:
    """Tells when a join link expired and how to get another."""
    try:
        when = f"{_utc(expires_s):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError, OSError):
        when = f"Unix time {expires_s}"
    minutes = max(0, int(now_s - expires_s)) // 60
    return f"the join link expired at {when} ({minutes} min ago); {_NEW_LINK}"


def _create_authority(now_s: float) -> bytes:
    key = ed25519.Ed25519PrivateKey.generate()
    public = key.public_key()
    tag = hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"shoal authority {tag}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_utc(now_s - 86400))
        .not_valid_after(_utc(now_s + _AUTHORITY_LIFETIME_S))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .sign(key, algorithm=None)
    )
    return private_pem(key) + certificate.public_bytes(serialization.Encoding.PEM)


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _utc(time_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(time_s), datetime.UTC)


# ---- the joiner's side -------------------------------------------------------------------


def verify_with_certificate(certificate_der: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `Authority.sign(data)` gave this signature. False for any malformed input."""
    try:
        key = x509.load_der_x509_certificate(certificate_der).public_key()
        if not isinstance(key, ed25519.Ed25519PublicKey):
            return False
        key.verify(signature, _STATEMENT_DOMAIN + data)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class AuthorityProof:
    """What a join link's fingerprint vouches for."""

    authority_pem: bytes
    server_peer_id: PeerId
    """The coordinator's peer id; pin it from now on."""


def fetch_authority(host: str, port: int, fingerprint: str, timeout_s: float) -> AuthorityProof:
    """The run's authority, from the leaf that the admission port presents.

    Blocks up to `timeout_s`: run it in a thread. Raises `UnreachableError` when nobody answers
    with TLS in time, and `AdmissionError` when whoever answers isn't this run's coordinator.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint vouches, and nothing is sent
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as raw:
            raw.settimeout(max(0.001, deadline - time.monotonic()))
            with context.wrap_socket(raw) as connection:
                leaf_der = connection.getpeercert(binary_form=True)
    except (OSError, UnicodeError) as error:
        raise UnreachableError(
            f"no coordinator answers at {host}:{port} within {timeout_s:g} s ({error}); check the "
            "link's address, the network, and that the run is still up"
        ) from error
    return check_authority(leaf_der or b"", fingerprint, now_s=time.time())


def check_authority(leaf_der: bytes, fingerprint: str, *, now_s: float) -> AuthorityProof:
    """Decides whether a presented leaf is the coordinator's of the run with this fingerprint."""
    try:
        leaf = x509.load_der_x509_certificate(leaf_der)
        embedded = leaf.extensions.get_extension_for_oid(_AUTHORITY_OID).value
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise AdmissionError(
            f"whoever answers isn't a Shoal coordinator ({error}); check the link's address"
        ) from error
    authority_der = embedded.value if isinstance(embedded, x509.UnrecognizedExtension) else b""
    found = hashlib.sha256(authority_der).hexdigest()
    if len(authority_der) > _MAX_AUTHORITY_BYTES or found != fingerprint.lower():
        raise AdmissionError(
            f"the coordinator's authority has fingerprint {found[:16]}…, the join link says "
            f"{fingerprint[:16]}…: it runs another run now, or somebody is in between; {_NEW_LINK}"
        )
    try:
        authority = x509.load_der_x509_certificate(authority_der)
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise AdmissionError(
            "the certificate at the link's address is not signed by the run's authority: "
            f"somebody is in between; do not use this network, or {_NEW_LINK}"
        ) from error
    if not leaf.not_valid_before_utc <= _utc(now_s) <= leaf.not_valid_after_utc:
        raise AdmissionError(
            f"the coordinator's certificate is valid from {leaf.not_valid_before_utc} to "
            f"{leaf.not_valid_after_utc}, but it is {_utc(now_s)} here; check this machine's clock"
        )
    peer_id = peer_id_from_uri(uris[0]) if len(uris) == 1 else None
    if peer_id is None:
        raise AdmissionError("the coordinator's certificate names no peer id; update both sides")
    return AuthorityProof(authority.public_bytes(serialization.Encoding.PEM), peer_id)
