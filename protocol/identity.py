# SPDX-License-Identifier: Apache-2.0
"""Who a node is: its Ed25519 identity, its short-lived P-256 TLS key, and the proof that ties them.

gRPC accepts no Ed25519 leaf certificate, so a node presents a P-256 leaf on the wire. The run's
authority issues that leaf (protocol/authority.py) to whoever proves, with a `JoinRequest`, that
it holds the identity key.
"""

import base64
import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from shoal.protocol.atomic_file import fsync_folder
from shoal.protocol.errors import AdmissionError, StorageError, VersionError
from shoal.protocol.ids import PeerId, RunId
from shoal.protocol.proto import coordinator_pb2
from shoal.version import PROTOCOL_VERSION, __version__

IDENTITY_FILE: Final = "identity.pem"
MAX_CLOCK_SKEW_S: Final = 300
MAX_TLS_KEY_BYTES: Final = 256
MAX_TOKEN_CHARS: Final = 1024
MAX_RUN_ID_CHARS: Final = 128

_JOIN_PROOF_DOMAIN: Final = b"shoal join proof v1"
_MAX_SECRET_BYTES: Final = 64 * 1024


# ---- secrets on disk ---------------------------------------------------------------------


def load_or_create_secret(path: Path, create: Callable[[], bytes]) -> bytes:
    """The content of a private file; written once, mode 0600 in a folder of mode 0700, if missing.

    Of two processes that create it at once, one wins and both return its content. Raises
    `StorageError` for a file that group or others may touch, and for whatever the disk refuses.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            return _read_secret(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_secret(path, create())
        return _read_secret(path)
    except OSError as error:
        raise StorageError(
            f"can't read or create the key file {path}: {error}; check the folder's owner, "
            "permissions and free space"
        ) from error


def _read_secret(path: Path) -> bytes:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if os.name == "posix" and mode & 0o077:
            raise StorageError(
                f"the key file {path} has permissions {mode:04o}: others on this machine may use "
                f"it; run `chmod 600 {path}`, or delete it to get a new key"
            )
        return file.read(_MAX_SECRET_BYTES)


def _write_secret(path: Path, content: bytes) -> None:
    """Publishes the whole file or nothing, and never over an existing one."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike rename, fails if another process was faster
        except FileExistsError:
            return
        except OSError:  # a filesystem without hard links
            os.rename(temporary, path)
        fsync_folder(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def parse_ed25519_pem(pem: bytes, path: Path) -> ed25519.Ed25519PrivateKey:
    """The Ed25519 private key in a PEM file. `StorageError` when it is damaged."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StorageError(_damaged(path, str(error))) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise StorageError(_damaged(path, f"holds a {type(key).__name__}, not an Ed25519 key"))
    return key


def _damaged(path: Path, reason: str) -> str:
    return (
        f"the key file {path} is damaged ({reason}); restore it from a backup, or delete it to "
        "get a new identity"
    )


def private_pem(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    """Unencrypted PKCS #8, PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


# ---- identity ----------------------------------------------------------------------------


def peer_id_of_key(public_bytes: bytes) -> PeerId:
    """The peer id of a raw 32-byte Ed25519 public key."""
    digest = hashlib.sha256(public_bytes).digest()[:16]
    return PeerId(base64.b32encode(digest).decode().rstrip("=").lower())


def verify(public_bytes: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` over `data` is by this raw Ed25519 key. False for any malformed input."""
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public_bytes).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class NodeIdentity:
    """A node's long-lived Ed25519 key. The key never leaves the object or its file."""

    def __init__(self, key: ed25519.Ed25519PrivateKey) -> None:
        self._key = key
        self.public_bytes: Final = key.public_key().public_bytes_raw()
        self.peer_id: Final = peer_id_of_key(self.public_bytes)

    @classmethod
    def load_or_create(cls, folder: Path) -> Self:
        """The identity kept in `folder`. Raises `StorageError` (see `load_or_create_secret`)."""
        path = folder / IDENTITY_FILE
        pem = load_or_create_secret(path, lambda: private_pem(ed25519.Ed25519PrivateKey.generate()))
        return cls(parse_ed25519_pem(pem, path))

    def sign(self, data: bytes) -> bytes:
        """A 64-byte signature. `data` begins with a tag that no other purpose of this key uses."""
        return self._key.sign(data)

    def __repr__(self) -> str:
        return f"NodeIdentity({self.peer_id})"


class TlsKey:
    """A P-256 key for one process's TLS leaf. Lives in memory only."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self.private_pem: Final = private_pem(key)
        self.spki_der: Final = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @classmethod
    def generate(cls) -> Self:
        return cls(ec.generate_private_key(ec.SECP256R1()))

    def __repr__(self) -> str:
        return f"TlsKey({hashlib.sha256(self.spki_der).hexdigest()[:16]})"


def parse_tls_key(spki_der: bytes) -> ec.EllipticCurvePublicKey:
    """A peer's P-256 public key. `AdmissionError` for any other kind of key or bytes."""
    if len(spki_der) > MAX_TLS_KEY_BYTES:
        raise AdmissionError(
            f"the TLS key has {len(spki_der)} bytes, at most {MAX_TLS_KEY_BYTES} are accepted; "
            "send a P-256 key as DER SubjectPublicKeyInfo"
        )
    try:
        key = serialization.load_der_public_key(spki_der)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AdmissionError(
            f"the TLS key can't be parsed ({error}); send P-256 as DER SubjectPublicKeyInfo"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise AdmissionError(f"the TLS key is a {type(key).__name__}, not P-256; send a P-256 key")
    return key


# ---- the proof in a JoinRequest ----------------------------------------------------------


def join_proof(
    *, run_id: RunId, token: str, identity_key: bytes, tls_key: bytes, time_s: int
) -> bytes:
    """The canonical bytes that `JoinRequest.proof` signs.

    Every field is preceded by its length (4 bytes, big-endian), so no two requests share them.
    """
    fields = (
        _JOIN_PROOF_DOMAIN,
        run_id.encode(),
        token.encode(),
        identity_key,
        tls_key,
        time_s.to_bytes(8, "big"),
    )
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def make_join_request(
    identity: NodeIdentity, tls_key: TlsKey, link_token: str, run_id: RunId, now_s: float
) -> coordinator_pb2.JoinRequest:
    """A request for admission. `now_s` is Unix time."""
    time_s = int(now_s)
    proof = join_proof(
        run_id=run_id,
        token=link_token,
        identity_key=identity.public_bytes,
        tls_key=tls_key.spki_der,
        time_s=time_s,
    )
    return coordinator_pb2.JoinRequest(
        protocol_version=PROTOCOL_VERSION,
        release=__version__,
        run_id=run_id,
        token=link_token,
        identity_key=identity.public_bytes,
        tls_key=tls_key.spki_der,
        time_s=time_s,
        proof=identity.sign(proof),
    )


def require_protocol(version: int, release: str) -> None:
    """For the coordinator, of a node: releases may differ, protocols may not.

    Raises `VersionError`.
    """
    if version != PROTOCOL_VERSION:
        raise VersionError(
            f"the coordinator speaks protocol version {PROTOCOL_VERSION} (shoal {__version__}), "
            f"the node version {version} (shoal {release[:32]!r}); "
            f"install the coordinator's release on the node: pip install 'shoal=={__version__}'"
        )


def verify_join_request(request: coordinator_pb2.JoinRequest, now_s: float) -> PeerId:
    """The peer id that the request proves. The caller checks run id and token (`Authority`).

    Raises `VersionError` when the protocol versions differ, else `AdmissionError`.
    """
    require_protocol(request.protocol_version, request.release)
    if len(request.token) > MAX_TOKEN_CHARS or len(request.run_id) > MAX_RUN_ID_CHARS:
        raise AdmissionError(
            f"the join request's token ({len(request.token)} characters) or run id "
            f"({len(request.run_id)}) is too long; copy the join link again"
        )
    skew_s = request.time_s - int(now_s)
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        raise AdmissionError(
            f"the node's clock is {abs(skew_s)} s {'ahead of' if skew_s > 0 else 'behind'} the "
            f"coordinator's, at most {MAX_CLOCK_SKEW_S} s are accepted; turn on time "
            "synchronisation on both machines and join again"
        )
    parse_tls_key(request.tls_key)
    proof = join_proof(
        run_id=RunId(request.run_id),
        token=request.token,
        identity_key=request.identity_key,
        tls_key=request.tls_key,
        time_s=request.time_s,
    )
    if not verify(request.identity_key, request.proof, proof):
        raise AdmissionError(
            "the join request's proof doesn't match its identity key: it was altered on the way "
            "or made with another key; join again from the machine that holds the identity"
        )
    return peer_id_of_key(request.identity_key)
