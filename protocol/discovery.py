# SPDX-License-Identifier: Apache-2.0
"""Who is where: signed, expiring peer records, and the interface through which they are found.

A record on the wire is a 64-byte Ed25519 signature followed by canonical JSON (sorted keys, no
spaces), at most `MAX_RECORD_BYTES` together. Discovery only *finds*: a node's record proves that
its peer id wrote it, nothing more. A coordinator's record is signed by the run's authority and
carries the authority's certificate, so whoever holds the run's fingerprint (from a join link) can
trust it.
"""

import base64
import binascii
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.protocol.authority import verify_with_certificate
from shoal.protocol.errors import (
    MalformedFrameError,
    OversizedStreamError,
    ProtocolError,
    RecordError,
)
from shoal.protocol.identity import peer_id_of_key, verify
from shoal.protocol.ids import PeerId, RunId, Stage

MAX_RECORD_BYTES = 4096
MAX_LIFETIME_S = 3600.0
CLOCK_SKEW_S = 60.0
"""How far in the future a record may have been issued, since home clocks differ."""

SESSION_CAPABILITY = "session"
"""Where a coordinator's record names its mutual-TLS port; `address` is the admission port."""

DISCOVERY_CAPABILITY = "discovery"
"""Where a node's record names the multiaddr of its own discovery peer."""

_SIGNATURE_BYTES = 64
_SIGNING_CONTEXT = b"shoal peer record v1\0"

Role = Literal["coordinator", "node"]


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """One peer's address in one run, from `issued_s` until `expires_s` (Unix seconds).

    `address` is the gRPC host:port; `public_key` the 32 raw bytes of the Ed25519 key that `peer_id`
    is derived from: a node's identity, or for the coordinator the run's authority, whose X.509
    certificate is then `authority_der`.
    """

    run_id: RunId
    peer_id: PeerId
    role: Role
    address: str
    stage: Stage | None
    protocol_version: int
    issued_s: float
    expires_s: float
    public_key: bytes
    capabilities: Mapping[str, str] = field(default_factory=dict)
    authority_der: bytes | None = None


class _WireRecord(BaseModel):
    """The JSON of a record: bounds on everything that a stranger writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    peer_id: Annotated[str, Field(pattern=r"^[a-z2-7]{26}$")]
    role: Role
    address: Annotated[
        str,
        Field(max_length=262, pattern=r"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}$"),
    ]
    stage: Annotated[int, Field(ge=0, lt=4096)] | None
    protocol_version: Annotated[int, Field(ge=0, lt=2**31)]
    issued_s: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
    expires_s: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    capabilities: Annotated[
        dict[
            Annotated[str, Field(min_length=1, max_length=32)],
            Annotated[str, Field(max_length=256)],
        ],
        Field(max_length=16),
    ]
    authority_der: Annotated[str, Field(max_length=3072)] | None


def sign_record(record: PeerRecord, sign: Callable[[bytes], bytes]) -> bytes:
    """Encode a record. `sign` is `Authority.sign` for a coordinator's, `NodeIdentity.sign` for a
    node's.

    Raises a `ProtocolError` if nobody would accept the result, so mistakes show at their source.
    """
    payload = _canonical(record)
    data = sign(_SIGNING_CONTEXT + payload) + payload
    verify_record(data)
    return data


def open_record(data: bytes, now_s: float, *, fingerprint: bytes | None = None) -> PeerRecord:
    """Decode and check a record from the wire at Unix time `now_s`.

    With `fingerprint` (32 bytes), a coordinator's certificate must have that SHA-256. Without it, a
    coordinator's record proves only that it is consistent: never believe it then.
    """
    record = verify_record(data)
    if record.expires_s <= now_s:
        raise RecordError(
            f"record of {record.peer_id} expired {now_s - record.expires_s:.0f} s ago; "
            "look for a newer one, or compare the clocks"
        )
    if record.issued_s > now_s + CLOCK_SKEW_S:
        raise RecordError(
            f"record of {record.peer_id} is dated {record.issued_s - now_s:.0f} s in the future; "
            "compare the clocks of the two machines"
        )
    if fingerprint is not None and record.role == "coordinator":
        found = fingerprint_of(record)
        if found != fingerprint:
            raise RecordError(
                f"coordinator record with certificate fingerprint {found.hex()[:16]}…, but the "
                f"join link names {fingerprint.hex()[:16]}…; it is ignored as an impostor's"
            )
    return record


@functools.lru_cache(maxsize=1024)
def verify_record(data: bytes) -> PeerRecord:
    """Everything that `open_record` checks and that needs no clock. Cached, as lookups repeat."""
    if len(data) > MAX_RECORD_BYTES:
        raise OversizedStreamError(f"record of {len(data)} bytes; at most {MAX_RECORD_BYTES}")
    signature, payload = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    record = _parse(payload)
    if _canonical(record) != payload:
        raise MalformedFrameError(f"record of {record.peer_id} is not in canonical form")
    if not _is_signed(record, signature, _SIGNING_CONTEXT + payload):
        raise RecordError(f"record of {record.peer_id}: the signature is forged")
    if record.peer_id != peer_id_of_key(record.public_key):
        raise RecordError(f"record of {record.peer_id} is signed by another peer's key")
    if not 0 < record.expires_s - record.issued_s <= MAX_LIFETIME_S:
        raise RecordError(
            f"record of {record.peer_id} lives {record.expires_s - record.issued_s:.0f} s; "
            f"allowed: more than 0, at most {MAX_LIFETIME_S:.0f}"
        )
    _check_authority(record)
    return record


def _is_signed(record: PeerRecord, signature: bytes, data: bytes) -> bool:
    """A coordinator signs as the run's authority (`Authority.sign`), a node with its identity."""
    if record.authority_der is not None:
        return verify_with_certificate(record.authority_der, signature, data)
    return verify(record.public_key, signature, data)


def fingerprint_of(record: PeerRecord) -> bytes:
    """SHA-256 of the authority's certificate: who a coordinator's record speaks for."""
    return hashlib.sha256(record.authority_der or b"").digest()


def node_record(
    *,
    run_id: RunId,
    public_key: bytes,
    address: str,
    stage: Stage | None,
    protocol_version: int,
    now_s: float,
    capabilities: Mapping[str, str] | None = None,
    lifetime_s: float = 600.0,
) -> PeerRecord:
    """A node's record. Publish a new one every third of its lifetime."""
    return PeerRecord(
        run_id=run_id,
        peer_id=peer_id_of_key(public_key),
        role="node",
        address=address,
        stage=stage,
        protocol_version=protocol_version,
        issued_s=float(now_s),
        expires_s=float(now_s + lifetime_s),
        public_key=public_key,
        capabilities=dict(capabilities or {}),
    )


def coordinator_record(
    *,
    run_id: RunId,
    authority_der: bytes,
    address: str,
    protocol_version: int,
    now_s: float,
    capabilities: Mapping[str, str] | None = None,
    lifetime_s: float = 600.0,
) -> PeerRecord:
    """The coordinator's record, to be signed with the run authority's key.

    A coordinator that moved publishes again; keep `lifetime_s` the same for all records of a run,
    since a distributed table replaces a record only by one that expires later.
    """
    public_key = _certificate_key(authority_der)
    return PeerRecord(
        run_id=run_id,
        peer_id=peer_id_of_key(public_key),
        role="coordinator",
        address=address,
        stage=None,
        protocol_version=protocol_version,
        issued_s=float(now_s),
        expires_s=float(now_s + lifetime_s),
        public_key=public_key,
        capabilities=dict(capabilities or {}),
        authority_der=authority_der,
    )


def newest(records: Iterable[PeerRecord]) -> PeerRecord | None:
    """The record issued last; among equals the one that expires last."""
    return max(records, key=lambda record: (record.issued_s, record.expires_s), default=None)


class Discovery(Protocol):
    """How peers of a run are found. Calls raise `UnreachableError` when nobody answers in time."""

    async def publish(self, record_bytes: bytes, record: PeerRecord) -> None:
        """Make an own record findable until it expires. Repeat well before that."""

    async def records(self, run_id: RunId) -> list[PeerRecord]:
        """The valid node records of a run, one per peer, in order of peer id."""

    async def coordinator(self, run_id: RunId, fingerprint: bytes) -> PeerRecord | None:
        """The newest valid coordinator record of the authority with this fingerprint."""

    def addresses(self) -> list[str]:
        """Multiaddrs under which others can join the discovery through this peer."""

    async def close(self) -> None:
        """Leave. May be called twice; published records stay until they expire."""


class InMemoryDiscovery:
    """Discovery within a process, for tests. Instances that share `table` find each other.

    Checks as the real one does: what was written into `table` by force but isn't valid, isn't seen.
    """

    def __init__(
        self,
        table: dict[tuple[RunId, Role, PeerId], bytes] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.table: dict[tuple[RunId, Role, PeerId], bytes] = {} if table is None else table
        self._clock = clock

    async def publish(self, record_bytes: bytes, record: PeerRecord) -> None:
        check_published(record_bytes, record, self._clock())
        key = (record.run_id, record.role, record.peer_id)
        known = self.table.get(key)
        if known is None or verify_record(known).expires_s < record.expires_s:
            self.table[key] = record_bytes

    async def records(self, run_id: RunId) -> list[PeerRecord]:
        return sorted(self._valid(run_id, "node"), key=lambda record: record.peer_id)

    async def coordinator(self, run_id: RunId, fingerprint: bytes) -> PeerRecord | None:
        return newest(self._valid(run_id, "coordinator", fingerprint))

    def addresses(self) -> list[str]:
        return []

    async def close(self) -> None:
        return None

    def _valid(
        self, run_id: RunId, role: Role, fingerprint: bytes | None = None
    ) -> list[PeerRecord]:
        found = []
        for key, data in self.table.items():
            try:
                record = open_record(data, self._clock(), fingerprint=fingerprint)
            except ProtocolError:
                continue
            if key == (run_id, role, record.peer_id) and key[:2] == (record.run_id, record.role):
                found.append(record)
        return found


def check_published(record_bytes: bytes, record: PeerRecord, now_s: float) -> None:
    """Refuse to publish bytes that are invalid at `now_s` or that say something else."""
    if open_record(record_bytes, now_s) != record:
        raise RecordError(f"bytes to publish for {record.peer_id} belong to another record")


def _canonical(record: PeerRecord) -> bytes:
    wire = {
        "run_id": record.run_id,
        "peer_id": record.peer_id,
        "role": record.role,
        "address": record.address,
        "stage": record.stage,
        "protocol_version": record.protocol_version,
        "issued_s": float(record.issued_s),
        "expires_s": float(record.expires_s),
        "public_key": record.public_key.hex(),
        "capabilities": dict(record.capabilities),
        "authority_der": None
        if record.authority_der is None
        else base64.b64encode(record.authority_der).decode(),
    }
    return json.dumps(wire, sort_keys=True, separators=(",", ":")).encode()


def _parse(payload: bytes) -> PeerRecord:
    try:
        wire = _WireRecord.model_validate_json(payload)
        authority_der = (
            None
            if wire.authority_der is None
            else base64.b64decode(wire.authority_der, validate=True)
        )
    except (ValidationError, binascii.Error, ValueError) as error:
        raise MalformedFrameError(f"not a peer record: {_first_cause(error)}") from error
    return PeerRecord(
        run_id=RunId(wire.run_id),
        peer_id=PeerId(wire.peer_id),
        role=wire.role,
        address=wire.address,
        stage=None if wire.stage is None else Stage(wire.stage),
        protocol_version=wire.protocol_version,
        issued_s=wire.issued_s,
        expires_s=wire.expires_s,
        public_key=bytes.fromhex(wire.public_key),
        capabilities=wire.capabilities,
        authority_der=authority_der,
    )


def _first_cause(error: Exception) -> str:
    """One line without the stranger's own bytes, which may be long or hostile to a terminal."""
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        return f"{'.'.join(map(str, first['loc']))[:40]!r}: {first['type']}"
    return type(error).__name__


def _check_authority(record: PeerRecord) -> None:
    if record.role == "node":
        if record.authority_der is not None:
            raise RecordError(f"node record of {record.peer_id} carries an authority certificate")
        return
    if record.authority_der is None:
        raise RecordError("coordinator record without the run authority's certificate")
    if _certificate_key(record.authority_der) != record.public_key:
        raise RecordError("coordinator record is not signed by the authority that it names")


def _certificate_key(der: bytes) -> bytes:
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except Exception as error:  # the parser documents no closed set of errors
        raise MalformedFrameError("authority certificate is not X.509 DER") from error
    if not isinstance(key, Ed25519PublicKey):
        raise RecordError("authority certificate does not hold an Ed25519 key")
    return key.public_bytes_raw()
