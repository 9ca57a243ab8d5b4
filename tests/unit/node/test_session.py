# SPDX-License-Identifier: Apache-2.0
"""A node's session against a real gRPC server: refusals, breaks, farewells, renewal."""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from cryptography import x509

from shoal.node import certificate, session
from shoal.node.admission import Membership
from shoal.node.certificate import keep_renewed, renewal_wait_s
from shoal.node.hardware import Device
from shoal.node.promises import Promises
from shoal.node.session import NodeSession
from shoal.node.swarm_view import SwarmView
from shoal.protocol.authority import Authority
from shoal.protocol.errors import VersionError
from shoal.protocol.identity import NodeIdentity, TlsKey
from shoal.protocol.ids import PeerId, RunId
from shoal.protocol.proto import coordinator_pb2, coordinator_pb2_grpc
from shoal.protocol.rpc import (
    Credentials,
    abort_with,
    create_server,
    peer_id_from_context,
    serve_secure,
)

DEVICE = Device(torch.device("cpu"), "test", 1, 1.0, "fp32", 1)
Events = AsyncIterable[coordinator_pb2.NodeEvent]
Script = Callable[[Events, Any], AsyncIterator[coordinator_pb2.Command]]


def lead(term: int = 1) -> coordinator_pb2.Command:
    return coordinator_pb2.Command(lead=coordinator_pb2.Lead(term=term, coordinator_id="log"))


def dismiss(reason: str) -> coordinator_pb2.Command:
    return coordinator_pb2.Command(dismiss=coordinator_pb2.Dismiss(reason=reason))


class Holder:
    """Stands for the stage holder."""

    member = None
    microbatches_per_s = 0.0

    def __init__(self) -> None:
        self.detached = self.released = 0
        self.holds = True

    def held(self) -> coordinator_pb2.HeldState | None:
        kept = self.holds and self.detached
        return coordinator_pb2.HeldState(stage=1, step=7) if kept else None

    def progress(self) -> coordinator_pb2.Progress | None:
        return None

    def release(self) -> None:
        self.released += 1

    async def detach(self) -> None:
        self.detached += 1


class Servicer(coordinator_pb2_grpc.CoordinatorServicer):
    """One script for each session, in turn."""

    def __init__(self, world: "World", *scripts: Script) -> None:
        self._world = world
        self._scripts = list(scripts)
        self.leaves: list[int] = []
        self.renewing = asyncio.Event()
        self.may_renew = asyncio.Event()
        self.may_renew.set()

    async def Session(self, request_iterator: Events, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        pem = context.auth_context()["x509_pem_cert"][0]
        self.leaves.append(x509.load_pem_x509_certificate(pem).serial_number)
        script = self._scripts.pop(0)
        if script.__name__ not in ("refuse", "keep_silent"):
            yield lead()
        async for command in script(request_iterator, context):
            yield command

    async def Renew(self, request: coordinator_pb2.RenewRequest, context: Any) -> Any:
        self.renewing.set()
        await self.may_renew.wait()
        leaf, expires_s = self._world.authority.issue_leaf(
            request.tls_key, peer_id_from_context(context), 3600, time.time()
        )
        return coordinator_pb2.RenewReply(certificate=leaf, expires_s=expires_s)


class World:
    """An authority, a coordinator and a node with certificates."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.load_or_create(folder / "keys")
        self.coordinator = NodeIdentity.load_or_create(folder / "keys")
        self.node = NodeIdentity.load_or_create(folder / "node")
        self.reports: list[str] = []
        self.promises = Promises(folder / "node", RunId("run-00000000"), self.authority.fingerprint)
        self.promises.trust(self.authority.certificate_der)

    def credentials(self, peer_id: PeerId, key: TlsKey, lifetime_s: float) -> Credentials:
        leaf, _ = self.authority.issue_leaf(key.spki_der, peer_id, lifetime_s, time.time())
        return Credentials(
            private_key_pem=key.private_pem,
            leaf_pem=leaf,
            authority_pem=self.authority.certificate_pem,
        )

    async def serve(self, servicer: Servicer) -> tuple[grpc.aio.Server, str]:
        server = create_server()
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(servicer, server)
        credentials = self.credentials(self.coordinator.peer_id, TlsKey.generate(), 3600)
        port = serve_secure(server, "127.0.0.1:0", credentials.server_credentials())
        await server.start()
        return server, f"127.0.0.1:{port}"

    def membership(self, address: str, *, lifetime_s: float = 3600) -> Membership:
        key = TlsKey.generate()
        run: Any = SimpleNamespace(
            run_id="run-00000000", spec=SimpleNamespace(fault=SimpleNamespace(heartbeat_s=60.0))
        )
        return Membership(
            run=run,
            credentials=self.credentials(self.node.peer_id, key, lifetime_s),
            coordinator=self.coordinator.peer_id,
            session_address=address,
            discovery_peers=(),
            certificate_expires_s=int(time.time() + lifetime_s),
            tls_key=key,
        )

    def session(
        self,
        membership: Membership,
        *,
        found: str | None = None,
        grace_s: float = 30.0,
        rejoin: Callable[[], Awaitable[None]] | None = None,
    ) -> NodeSession:
        async def look() -> list[str]:
            return [found] if found else []

        async def not_expired() -> None:
            raise AssertionError("not expired")

        finder: Any = SimpleNamespace(addresses=list, num_discovered=0, session_addresses=look)
        return NodeSession(
            membership, device=DEVICE, address="127.0.0.1:7", swarm=SwarmView(), finder=finder,
            bytes_received=lambda: 0, rejoin=rejoin or not_expired, report=self.reports.append,
            grace_s=grace_s, promises=self.promises,
        )  # fmt: skip


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(session, "RETRY_LIMIT_S", 0.01)
    return World(tmp_path)


async def test_another_protocol_version_at_hello_ends_the_node(world: World) -> None:
    async def refuse(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        await anext(aiter(events))
        await abort_with(context, VersionError("version 2 can't attach to version 1; install 0.2"))
        yield coordinator_pb2.Command()

    server, address = await world.serve(Servicer(world, refuse))
    with pytest.raises(VersionError, match="version 2 can't attach to version 1"):
        await world.session(world.membership(address)).keep(Holder())  # type: ignore[arg-type]
    await server.stop(0)


async def test_a_broken_session_is_attached_again_with_what_is_held(world: World) -> None:
    hellos: list[coordinator_pb2.Hello] = []

    async def vanish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        hellos.append((await anext(aiter(events))).hello)
        yield coordinator_pb2.Command(wait=coordinator_pb2.Wait(reason="waiting: for more"))

    async def finish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        hellos.append((await anext(aiter(events))).hello)
        yield dismiss("run is finished")

    server, address = await world.serve(Servicer(world, vanish, finish))
    node = world.session(world.membership(address))
    assert await node.keep(Holder()) == "run is finished"  # type: ignore[arg-type]
    assert [hello.HasField("held") for hello in hellos] == [False, True]
    assert hellos[1].held.step == 7
    assert world.reports[0] == "waiting: for more"
    assert "waiting for the coordinator" in world.reports[1]
    await server.stop(0)


async def test_a_coordinator_at_another_address_is_found(world: World) -> None:
    async def finish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        yield dismiss("found")

    server, address = await world.serve(Servicer(world, finish))
    node = world.session(world.membership("127.0.0.1:1"), found=address)
    assert await node.keep(Holder()) == "found"  # type: ignore[arg-type]
    await server.stop(0)


async def test_where_a_new_admission_says_that_the_coordinator_is_the_node_asks(
    world: World,
) -> None:
    async def finish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        yield dismiss("found")

    server, address = await world.serve(Servicer(world, finish))
    membership = world.membership("127.0.0.1:1")
    membership.certificate_expires_s = 0

    async def rejoin() -> None:
        membership.take_over(world.membership(address))

    node = world.session(membership, rejoin=rejoin)
    async with asyncio.timeout(20):
        assert await node.keep(Holder()) == "found"  # type: ignore[arg-type]
    await server.stop(0)


async def test_whoever_led_last_is_asked_before_others_that_are_known(world: World) -> None:
    """A stage is lost when its holders don't come back within seconds."""
    elsewhere: list[str] = []

    async def strange(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        elsewhere.append("asked")
        yield dismiss("elsewhere")

    async def vanish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        standby = coordinator_pb2.Standby(admission=other, session=other)
        yield coordinator_pb2.Command(standbys=coordinator_pb2.Standbys(standbys=[standby]))

    async def finish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        yield dismiss("run is finished")

    server, address = await world.serve(Servicer(world, vanish, vanish, finish))
    other_server, other = await world.serve(Servicer(world, strange))
    node = world.session(world.membership(address), found=other)
    assert await node.keep(Holder()) == "run is finished"  # type: ignore[arg-type]
    assert elsewhere == []
    await server.stop(0)
    await other_server.stop(0)


async def test_leaving_says_farewell_and_waits_for_the_dismissal(world: World) -> None:
    async def part(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        async for event in events:
            if event.HasField("farewell"):
                assert 6.0 < event.farewell.grace_s <= 7.0
                yield dismiss(event.farewell.reason)

    server, address = await world.serve(Servicer(world, part))
    node, holder = world.session(world.membership(address)), Holder()
    node.leave(7.0)
    assert await node.keep(holder) == "its owner stopped it"  # type: ignore[arg-type]
    assert holder.released == 1
    assert node.handed_over
    await server.stop(0)


async def test_leaving_ends_after_the_grace_when_nobody_takes_over(world: World) -> None:
    async def ignore(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        async for _ in events:
            pass
        yield dismiss("never")

    server, address = await world.serve(Servicer(world, ignore))
    node = world.session(world.membership(address), grace_s=0.05)
    node.leave()
    assert "left without handing over" in await node.keep(Holder())  # type: ignore[arg-type]
    assert not node.handed_over
    await server.stop(0)


async def test_a_node_without_state_leaves_at_once_while_the_coordinator_is_away(
    world: World,
) -> None:
    node = world.session(world.membership("127.0.0.1:1"))
    node.leave()
    holder = Holder()
    holder.holds = False
    assert "while the coordinator was away" in await node.keep(holder)  # type: ignore[arg-type]
    assert node.handed_over


async def test_a_leaving_node_keeps_its_state_for_a_coordinator_that_comes_back(
    world: World,
) -> None:
    async def finish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        async for event in events:
            if event.HasField("farewell"):
                yield dismiss("stored")

    server, address = await world.serve(Servicer(world, finish))
    node = world.session(world.membership("127.0.0.1:1"), found=address)
    node.leave()
    assert await node.keep(Holder()) == "stored"  # type: ignore[arg-type]
    assert node.handed_over
    await server.stop(0)


async def test_a_leaving_node_does_not_keep_its_state_for_ever(world: World) -> None:
    node = world.session(world.membership("127.0.0.1:1"), grace_s=0.2)
    node.leave()
    assert "while the coordinator was away" in await node.keep(Holder())  # type: ignore[arg-type]
    assert not node.handed_over


async def test_a_leaving_node_says_once_that_it_waits_and_tries_less_and_less_often(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, pauses = 1000.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        pauses.append(seconds)
        now_s += seconds

    async def refused(address: str, holder: Any) -> str:
        return "nobody listens there"

    node = world.session(world.membership("127.0.0.1:1"))
    monkeypatch.setattr(session, "RETRY_LIMIT_S", 3.0)
    monkeypatch.setattr(session.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(session.asyncio, "sleep", sleep)
    monkeypatch.setattr(node, "_attend_once", refused)
    caplog.set_level("INFO")
    node.leave()
    holder = Holder()
    holder.detached = 1
    assert "while the coordinator was away" in await node.keep(holder)  # type: ignore[arg-type]
    assert sum(pauses) == pytest.approx(session.AWAY_LIMIT_S)
    assert len(pauses) <= 8
    assert world.reports == ["waiting for the coordinator: nobody listens there; trying again"]
    assert "still waiting" not in caplog.text
    assert "what this node holds" in node.waiting_for


async def test_a_coordinator_that_says_nothing_does_not_hold_up_a_node_that_leaves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LEAST_LEAD_S", 0.05)
    monkeypatch.setattr(session, "LEAD_S", 3600.0)

    async def keep_silent(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        async for _ in events:
            node.leave()
        yield dismiss("never")

    server, address = await world.serve(Servicer(world, keep_silent))
    node = world.session(world.membership(address))
    holder = Holder()
    holder.holds = False
    async with asyncio.timeout(20):
        assert "while the coordinator was away" in await node.keep(holder)  # type: ignore[arg-type]
    await server.stop(0)


async def test_leaving_twice_does_not_prolong_the_grace(world: World) -> None:
    node = world.session(world.membership("127.0.0.1:1"))
    node.leave(7.0)
    node.leave(70.0)
    assert 0 < node.grace_left_s <= 7.0


def told_of_renewals(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    renewed = asyncio.Event()
    renew = Membership.renew

    def renew_and_tell(self: Membership, leaf_pem: bytes, expires_s: int) -> None:
        renew(self, leaf_pem, expires_s)
        renewed.set()

    monkeypatch.setattr(Membership, "renew", renew_and_tell)
    return renewed


async def test_a_session_opened_after_a_renewal_shows_the_new_certificate(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "renewal_wait_s", lambda expires_s, now_s: 0.05)
    renewed = told_of_renewals(monkeypatch)

    async def until_renewed(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        await renewed.wait()
        yield coordinator_pb2.Command(wait=coordinator_pb2.Wait(reason="still here"))

    async def finish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        yield dismiss("done")

    servicer = Servicer(world, until_renewed, finish)
    server, address = await world.serve(servicer)
    membership = world.membership(address, lifetime_s=60)
    node = world.session(membership)
    renewing = asyncio.create_task(keep_renewed(membership, lambda: node.stub))
    keeping = asyncio.create_task(node.keep(Holder()))  # type: ignore[arg-type]
    assert await keeping == "done"
    renewing.cancel()
    assert "still here" in world.reports, "the old session lives on"
    assert len(set(servicer.leaves)) == 2
    await server.stop(0)


async def test_a_renewal_that_the_sessions_end_cuts_off_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC cancels the call with its channel; that must not end the renewals for good."""
    monkeypatch.setattr(certificate, "renewal_wait_s", lambda expires_s, now_s: 0.01)
    renewed = told_of_renewals(monkeypatch)

    async def vanish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        await servicer.renewing.wait()
        yield coordinator_pb2.Command(wait=coordinator_pb2.Wait(reason="about to break"))

    async def finish(events: Events, context: Any) -> AsyncIterator[coordinator_pb2.Command]:
        servicer.may_renew.set()
        await renewed.wait()
        yield dismiss("renewed")

    servicer = Servicer(world, vanish, finish)
    servicer.may_renew.clear()
    server, address = await world.serve(servicer)
    membership = world.membership(address, lifetime_s=60)
    node = world.session(membership)
    renewing = asyncio.create_task(keep_renewed(membership, lambda: node.stub))
    keeping = asyncio.create_task(node.keep(Holder()))  # type: ignore[arg-type]
    await asyncio.wait({renewing, keeping}, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    assert not renewing.done()
    assert await keeping == "renewed"
    renewing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await renewing
    await server.stop(0)


def test_renewal_leaves_room_for_several_tries() -> None:
    assert renewal_wait_s(90_000, 60_000) == 10_000
    assert renewal_wait_s(0, 60_000) == 1.0
