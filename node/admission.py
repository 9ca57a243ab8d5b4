# SPDX-License-Identifier: Apache-2.0
"""From a join link to membership: find the coordinator, prove the identity, get a certificate."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from shoal.protocol.authority import AuthorityProof, fetch_authority
from shoal.protocol.errors import AdmissionError, ShoalError, UnreachableError, VersionError
from shoal.protocol.identity import NodeIdentity, TlsKey, make_join_request
from shoal.protocol.ids import PeerId
from shoal.protocol.join_link import JoinLink, split_address
from shoal.protocol.proto import coordinator_pb2, coordinator_pb2_grpc
from shoal.protocol.rpc import (
    CONNECT_DEADLINE_S,
    DEADLINE_S,
    Credentials,
    admission_channel,
    error_from_rpc,
)
from shoal.protocol.spec import ResolvedRun, parse_spec
from shoal.version import RUN_SPEC_VERSION, __version__

log = logging.getLogger(__name__)

_MAX_RUN_SPEC_BYTES = 4 << 20

FindElsewhere = Callable[[], Awaitable[Sequence[str]]]
"""Admission addresses that discovery knows, asked when the link's don't answer."""


@dataclass(slots=True)
class Membership:
    """What an admitted node holds. The certificate is replaced in place when it is renewed."""

    run: ResolvedRun
    credentials: Credentials
    coordinator: PeerId
    session_address: str
    discovery_peers: tuple[str, ...]
    certificate_expires_s: int
    tls_key: TlsKey

    @property
    def tls_key_der(self) -> bytes:
        return self.tls_key.spki_der

    def renew(self, leaf_pem: bytes, expires_s: int) -> None:
        self.credentials.replace(leaf_pem=leaf_pem)
        self.certificate_expires_s = expires_s

    def take_over(self, newer: "Membership") -> None:
        """Go on with the certificate and addresses of another admission to the same run."""
        self.tls_key = newer.tls_key
        self.credentials.replace(
            leaf_pem=newer.credentials.leaf_pem, private_key_pem=newer.tls_key.private_pem
        )
        self.certificate_expires_s = newer.certificate_expires_s
        self.session_address = newer.session_address
        self.discovery_peers = newer.discovery_peers


async def join(link: JoinLink, identity: NodeIdentity, find: FindElsewhere) -> Membership:
    """Join through the first address that answers; then through those that `find` gives.

    Raises `AdmissionError` or `VersionError` when a coordinator refuses, `UnreachableError` when
    none answers.
    """
    link.require_fresh(time.time())
    failure: ShoalError | None = None
    for source in (_given(link.addresses), find):
        for address in await source():
            try:
                return await _join_at(address, link, identity)
            except (AdmissionError, VersionError):
                raise
            except ShoalError as error:
                log.info("no admission at %s: %s", address, error)
                failure = error
    raise UnreachableError(
        f"nobody of run {link.run_id} answers at {', '.join(link.addresses)} or through discovery "
        f"({failure}). Check that the run is up and reachable from here, or ask for a new link."
    )


def _given(addresses: Sequence[str]) -> FindElsewhere:
    async def give() -> Sequence[str]:
        return addresses

    return give


async def _join_at(address: str, link: JoinLink, identity: NodeIdentity) -> Membership:
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise UnreachableError(f"{address!r} is no address: {error}") from None
    proof = await asyncio.to_thread(
        fetch_authority, host, port, link.fingerprint, CONNECT_DEADLINE_S
    )
    tls_key = TlsKey.generate()
    request = make_join_request(identity, tls_key, link.token, link.run_id, time.time())
    try:
        async with admission_channel(address, proof) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            reply = await stub.Join(request, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return _membership(reply, proof, tls_key, link)


def _membership(
    reply: coordinator_pb2.JoinReply, proof: AuthorityProof, tls_key: TlsKey, link: JoinLink
) -> Membership:
    if len(reply.run_spec) > _MAX_RUN_SPEC_BYTES:
        raise AdmissionError(f"the run spec has {len(reply.run_spec)} bytes; refused")
    raw = _json(reply.run_spec)
    spec = raw.get("spec") if isinstance(raw, dict) else None
    version = spec.get("version") if isinstance(spec, dict) else None
    if version != RUN_SPEC_VERSION:
        raise VersionError(
            f"the run's spec has version {str(version)[:32]}, this release (shoal {__version__}) "
            f"reads {RUN_SPEC_VERSION}; install the coordinator's release on this machine"
        )
    run = parse_spec(ResolvedRun, raw, "the coordinator's run spec")
    if run.run_id != link.run_id:
        raise AdmissionError(f"the coordinator serves run {run.run_id}, the link {link.run_id}")
    return Membership(
        run=run,
        credentials=Credentials(
            private_key_pem=tls_key.private_pem,
            leaf_pem=reply.certificate,
            authority_pem=proof.authority_pem,
        ),
        coordinator=proof.server_peer_id,
        session_address=reply.session_address,
        discovery_peers=tuple(reply.discovery_peers)[:16],
        certificate_expires_s=reply.expires_s,
        tls_key=tls_key,
    )


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError as error:
        raise AdmissionError(f"the coordinator's run spec is no JSON: {error}") from None
