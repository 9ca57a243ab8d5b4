# SPDX-License-Identifier: Apache-2.0
"""Credentials, channels and servers, over real loopback gRPC.

The servicer below answers `Renew` with the peer id that it sees, and `Join` with a fixed reply.
"""

import asyncio
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from shoal.protocol import errors, rpc
from shoal.protocol.authority import Authority, AuthorityProof, fetch_authority
from shoal.protocol.errors import (
    AdmissionError,
    CapacityError,
    OversizedStreamError,
    ShoalError,
    UnknownPeerError,
    UnreachableError,
    VersionError,
)
from shoal.protocol.identity import TlsKey, peer_id_of_key
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2, coordinator_pb2_grpc
from shoal.protocol.rpc import Credentials, admission_channel

COORDINATOR = peer_id_of_key(b"coordinator")
NODE = peer_id_of_key(b"node")


def credentials(
    authority: Authority, peer_id: PeerId, *, embed: bool = False, lifetime_s: float = 3600
) -> Credentials:
    key = TlsKey.generate()
    leaf, _ = authority.issue_leaf(key.spki_der, peer_id, lifetime_s, time.time(), embed)
    return Credentials(
        private_key_pem=key.private_pem, leaf_pem=leaf, authority_pem=authority.certificate_pem
    )


def der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


class Servicer(coordinator_pb2_grpc.CoordinatorServicer):
    failure: ShoalError | None = None

    async def Join(self, request: Any, context: Any) -> coordinator_pb2.JoinReply:
        return coordinator_pb2.JoinReply(session_address="here:1")

    async def Renew(self, request: Any, context: Any) -> coordinator_pb2.RenewReply:
        try:
            if self.failure is not None:
                raise self.failure
            caller = rpc.peer_id_from_context(context)
        except ShoalError as error:
            await rpc.abort_with(context, error)
        return coordinator_pb2.RenewReply(certificate=caller.encode())

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            yield coordinator_pb2.Command()


class Swarm:
    """A coordinator's two ports on loopback, and who calls them."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.servicer = Servicer()
        self.coordinator = credentials(authority, COORDINATOR, embed=True)
        self.node = credentials(authority, NODE)
        self.server = rpc.create_server()
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self.servicer, self.server)
        self.session_port = rpc.serve_secure(
            self.server, "127.0.0.1:0", self.coordinator.server_credentials()
        )
        self.admission_port = rpc.serve_secure(
            self.server, "127.0.0.1:0", self.coordinator.admission_server_credentials()
        )

    @property
    def session(self) -> str:
        return f"127.0.0.1:{self.session_port}"

    @property
    def admission(self) -> str:
        return f"127.0.0.1:{self.admission_port}"

    async def fetch(self) -> AuthorityProof:
        return await asyncio.to_thread(
            fetch_authority, "127.0.0.1", self.admission_port, self.authority.fingerprint, 10
        )


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    swarm = Swarm(Authority.load_or_create(tmp_path / "authority"))
    await swarm.server.start()
    yield swarm
    await swarm.server.stop(None)


async def renew(channel: grpc.aio.Channel) -> PeerId:
    """Who the server thinks is calling; a failed call as its `ShoalError`."""
    async with channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        try:
            reply = await stub.Renew(coordinator_pb2.RenewRequest(), timeout=rpc.DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        return PeerId(reply.certificate.decode())


async def join(channel: grpc.aio.Channel) -> str:
    async with channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        try:
            reply = await stub.Join(coordinator_pb2.JoinRequest(), timeout=rpc.DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        return str(reply.session_address)


# ---- who gets in -------------------------------------------------------------------------


async def test_server_learns_the_callers_peer_id(swarm: Swarm) -> None:
    assert await renew(swarm.node.channel(swarm.session, COORDINATOR)) == NODE


async def test_client_refuses_a_server_other_than_the_pinned_peer(swarm: Swarm) -> None:
    with pytest.raises(UnreachableError):
        await renew(swarm.node.channel(swarm.session, peer_id_of_key(b"someone else")))


async def test_leaf_of_another_authority_is_refused_by_both_sides(
    swarm: Swarm, tmp_path: Path
) -> None:
    other = credentials(Authority.load_or_create(tmp_path / "other"), NODE)
    with pytest.raises(UnreachableError):
        await renew(other.channel(swarm.session, COORDINATOR))
    # The same leaf in the hands of a client that trusts the server: now the server must refuse.
    key = TlsKey.generate()
    leaf, _ = Authority.load_or_create(tmp_path / "other").issue_leaf(
        key.spki_der, NODE, 3600, time.time()
    )
    forger = Credentials(
        private_key_pem=key.private_pem,
        leaf_pem=leaf,
        authority_pem=swarm.authority.certificate_pem,
    )
    with pytest.raises(UnreachableError):
        await renew(forger.channel(swarm.session, COORDINATOR))


async def test_expired_leaf_is_refused(swarm: Swarm) -> None:
    expired = credentials(swarm.authority, NODE, lifetime_s=-60)
    with pytest.raises(UnreachableError):
        await renew(expired.channel(swarm.session, COORDINATOR))


async def test_unadmitted_client_reaches_only_the_admission_port(swarm: Swarm) -> None:
    proof = await swarm.fetch()
    assert proof.server_peer_id == COORDINATOR
    assert proof.authority_pem == swarm.authority.certificate_pem
    assert await join(admission_channel(swarm.admission, proof)) == "here:1"
    with pytest.raises(UnreachableError):
        await join(admission_channel(swarm.session, proof))


async def test_caller_without_certificate_has_no_peer_id(swarm: Swarm) -> None:
    with pytest.raises(UnknownPeerError, match="join the run first"):
        await renew(admission_channel(swarm.admission, await swarm.fetch()))


async def test_authority_of_another_run_is_not_fetched(swarm: Swarm) -> None:
    with pytest.raises(AdmissionError, match="fingerprint"):
        await asyncio.to_thread(fetch_authority, "127.0.0.1", swarm.admission_port, "0" * 64, 10)


async def test_node_that_poses_as_the_coordinator_is_found_out(swarm: Swarm) -> None:
    server = rpc.create_server()
    port = rpc.serve_secure(server, "127.0.0.1:0", swarm.node.admission_server_credentials())
    await server.start()
    try:
        with pytest.raises(AdmissionError, match="isn't a Shoal coordinator"):
            await asyncio.to_thread(
                fetch_authority, "127.0.0.1", port, swarm.authority.fingerprint, 10
            )
    finally:
        await server.stop(None)


# ---- renewal -----------------------------------------------------------------------------


async def test_renewed_leaf_is_served_on_both_ports_without_restart(swarm: Swarm) -> None:
    def served(port: int) -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
            with context.wrap_socket(raw) as connection:
                return connection.getpeercert(binary_form=True) or b""

    ports = (swarm.session_port, swarm.admission_port)
    old = der(swarm.coordinator.leaf_pem)
    assert [await asyncio.to_thread(served, port) for port in ports] == [old, old]
    key = TlsKey.generate()
    leaf, _ = swarm.authority.issue_leaf(key.spki_der, COORDINATOR, 7200, time.time(), True)
    swarm.coordinator.replace(leaf_pem=leaf, private_key_pem=key.private_pem)
    assert [await asyncio.to_thread(served, port) for port in ports] == [der(leaf), der(leaf)]
    assert await renew(swarm.node.channel(swarm.session, COORDINATOR)) == NODE


async def test_channel_opened_after_renewal_shows_the_new_leaf(swarm: Swarm) -> None:
    node = credentials(swarm.authority, NODE, lifetime_s=-60)
    key = TlsKey.generate()
    leaf, _ = swarm.authority.issue_leaf(key.spki_der, NODE, 3600, time.time())
    node.replace(leaf_pem=leaf, private_key_pem=key.private_pem)
    assert await renew(node.channel(swarm.session, COORDINATOR)) == NODE


async def test_credentials_print_no_private_key(swarm: Swarm) -> None:
    assert "PRIVATE" not in repr(swarm.node) + repr(swarm.node._current)


# ---- the network -------------------------------------------------------------------------


async def test_proxy_variables_do_not_capture_traffic(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_tcp_port}")
        monkeypatch.setenv(name.upper(), f"http://127.0.0.1:{unused_tcp_port}")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert await renew(swarm.node.channel(swarm.session, COORDINATOR)) == NODE
    assert await join(admission_channel(swarm.admission, await swarm.fetch())) == "here:1"


async def test_taken_port_is_a_capacity_error_with_remedy(swarm: Swarm) -> None:
    for host in ("127.0.0.1", "0.0.0.0", "[::]"):
        server = rpc.create_server()
        with pytest.raises(CapacityError, match="choose another port"):
            rpc.serve_secure(
                server,
                f"{host}:{swarm.session_port}",
                swarm.coordinator.server_credentials(),
            )
        await server.stop(None)


@pytest.mark.parametrize("address", ["unix:1", "unix:///run/x.sock", "dns://8.8.8.8/a:1", "host"])
async def test_address_that_is_not_host_and_port_is_never_dialled(
    swarm: Swarm, address: str
) -> None:
    if address == "unix:1":  # a well-formed host:port: looked up as a host named "unix"
        with pytest.raises(UnreachableError, match=r"DNS|resolution|lookup|Domain"):
            await renew(swarm.node.channel(address, COORDINATOR))
        return
    with pytest.raises(UnreachableError, match="can't call peer"):
        swarm.node.channel(address, COORDINATOR)


async def test_peer_that_hangs_is_noticed_during_a_silent_stream(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay goes on accepting bytes and forwards none. The options are Shoal's, only faster."""
    faster = {"grpc.keepalive_time_ms": 100, "grpc.http2.ping_timeout_ms": 200}
    options = tuple((name, faster.get(name, value)) for name, value in rpc.CHANNEL_OPTIONS)
    monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", options)
    dropping = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not dropping.is_set():
                writer.write(data)
                await writer.drain()

    tasks: list[asyncio.Task[None]] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(
            "127.0.0.1", swarm.session_port
        )
        tasks.append(asyncio.create_task(pump(reader, upstream_writer)))
        tasks.append(asyncio.create_task(pump(upstream_reader, writer)))

    relay_server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = relay_server.sockets[0].getsockname()[1]
    async with swarm.node.channel(f"127.0.0.1:{port}", COORDINATOR) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        session = stub.Session()
        await session.write(coordinator_pb2.NodeEvent())
        assert isinstance(await session.read(), coordinator_pb2.Command)
        dropping.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(20):
                await session.read()
    assert isinstance(rpc.error_from_rpc(caught.value), UnreachableError)
    relay_server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("careless_sender", [False, True])
async def test_message_over_the_limit_is_refused_by_sender_and_receiver(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, careless_sender: bool
) -> None:
    if careless_sender:
        unlimited = ("grpc.max_send_message_length", -1)
        monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", (*rpc.CHANNEL_OPTIONS[1:], unlimited))
    async with swarm.node.channel(swarm.session, COORDINATOR) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        request = coordinator_pb2.RenewRequest(tls_key=bytes(rpc.MAX_MESSAGE_BYTES))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Renew(request, timeout=rpc.DEADLINE_S)
    assert isinstance(rpc.error_from_rpc(caught.value), OversizedStreamError)


# ---- errors ------------------------------------------------------------------------------


def every_error_class() -> list[type[ShoalError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, ShoalError) and value is not ShoalError
    ]


async def test_every_error_class_survives_the_wire(swarm: Swarm) -> None:
    assert len(every_error_class()) > 20
    for cls in every_error_class():
        swarm.servicer.failure = cls("cause: 5 µs; zweite Zeile\nremedy")
        with pytest.raises(cls) as caught:
            await renew(swarm.node.channel(swarm.session, COORDINATOR))
        assert type(caught.value) is cls
        assert str(caught.value) == "cause: 5 µs; zweite Zeile\nremedy"


async def test_endless_error_message_is_cut(swarm: Swarm) -> None:
    swarm.servicer.failure = AdmissionError("ü" * 1_000_000)
    with pytest.raises(AdmissionError, match=r"^ü{900,1000}$"):
        await renew(swarm.node.channel(swarm.session, COORDINATOR))


def failed(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (failed(grpc.StatusCode.UNAVAILABLE, "failed to connect"), UnreachableError),
        (failed(grpc.StatusCode.DEADLINE_EXCEEDED, None), UnreachableError),
        (failed(grpc.StatusCode.UNKNOWN, "Stream removed"), UnreachableError),
        (failed(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), VersionError),
        (failed(grpc.StatusCode.UNKNOWN, "Unexpected <class 'KeyError'>: 3"), ShoalError),
        (failed(grpc.StatusCode.INTERNAL, "FutureError: from a later release"), ShoalError),
        (failed(grpc.StatusCode.INTERNAL, "OSError: no class of ours"), ShoalError),
    ],
)
def test_failed_call_becomes_the_error_that_it_means(
    error: grpc.aio.AioRpcError, cls: type[ShoalError]
) -> None:
    restored = rpc.error_from_rpc(error)
    assert type(restored) is cls
    assert (error.details() or error.code().name) in str(restored)


def test_control_characters_of_a_peer_do_not_reach_the_terminal() -> None:
    restored = rpc.error_from_rpc(failed(grpc.StatusCode.INTERNAL, "DataError: \x1b[2Jgone"))
    assert str(restored) == "?[2Jgone"


async def test_closed_port_is_unreachable(swarm: Swarm, unused_tcp_port: int) -> None:
    with pytest.raises(UnreachableError, match="UNAVAILABLE"):
        await renew(swarm.node.channel(f"127.0.0.1:{unused_tcp_port}", COORDINATOR))


# ---- backoff -----------------------------------------------------------------------------


def test_backoff_doubles_with_jitter_up_to_a_limit() -> None:
    rng = random.Random(0)
    for attempt, top_s in [(0, 0.25), (1, 0.5), (3, 2.0), (6, 10.0), (10_000, 10.0)]:
        waits = [rpc.backoff(attempt, rng) for _ in range(200)]
        assert top_s / 2 <= min(waits) < top_s * 0.6
        assert top_s * 0.9 < max(waits) <= top_s


def test_backoff_is_a_function_of_its_arguments() -> None:
    first, second = (rpc.backoff(2, random.Random(7)) for _ in range(2))
    assert first == second
