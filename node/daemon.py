# SPDX-License-Identifier: Apache-2.0
"""The node daemon: joins a run, keeps a session with the coordinator, and serves a stage.

The session may break and come back (the coordinator restarts, moves, or the network blinks); the
stage's state stays in memory meanwhile and is offered at the next session.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import IO

import grpc
import psutil

from shoal.compression.registry import Boundary, parse_boundary
from shoal.node.admission import Membership, join
from shoal.node.config import NodeConfig
from shoal.node.data import ShardCache, TokenSource
from shoal.node.finder import Finder
from shoal.node.hardware import Device, probe
from shoal.node.inbox import BoundaryInbox
from shoal.node.peer_service import PeerService
from shoal.node.reduce import ReduceInbox
from shoal.node.stage_member import Prepared, StageMember
from shoal.node.stage_worker import StageWorker
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import (
    CapacityError,
    ProtocolError,
    ShoalError,
    StorageError,
    VersionError,
    WrongLeaseError,
)
from shoal.protocol.identity import NodeIdentity
from shoal.protocol.ids import Incarnation, PeerId, display_name
from shoal.protocol.join_link import JoinLink
from shoal.protocol.proto import coordinator_pb2, coordinator_pb2_grpc, peer_pb2, peer_pb2_grpc
from shoal.protocol.rpc import DEADLINE_S, backoff, create_server, error_from_rpc, serve_secure
from shoal.protocol.state_file import StateExpectation, StateReceiver, chunks
from shoal.protocol.wire import add_peer_servicer
from shoal.version import PROTOCOL_VERSION, __version__

log = logging.getLogger(__name__)

STATE_DEADLINE_S = 600.0
"""For a stage's state to arrive; a donor that sends nothing for 30 s is given up before."""

Report = Callable[[str], None]
"""Tells the owner, in one line, what the node does."""

Stub = coordinator_pb2_grpc.CoordinatorStub


class _Dismissed(Exception):
    """The coordinator let this node go; `args[0]` says why."""


class NodeDaemon:
    """`run` returns when the run is over or the owner leaves."""

    def __init__(self, config: NodeConfig, link: JoinLink, report: Report) -> None:
        self._config = config
        self._link = link
        self._report = report
        self._identity = NodeIdentity.load_or_create(config.folder)
        self._swarm = SwarmView()
        self._outbox: asyncio.Queue[coordinator_pb2.NodeEvent] = asyncio.Queue()
        self._worker: StageWorker | None = None
        self._member: StageMember | None = None
        self._weights_digest = 0
        self._leaving = asyncio.Event()
        self._held_sums: Prepared | None = None  # of a session that broke before their commit
        self._tasks: set[asyncio.Task[None]] = set()
        # Set once joined.
        self._membership: Membership
        self._device: Device
        self._boundary: Boundary
        self._finder: Finder
        self._stub: Stub
        self._service: PeerService
        self._tokens: TokenSource
        self._address = ""

    @property
    def name(self) -> str:
        return display_name(self._identity.peer_id)

    # ---- what the peer service asks ------------------------------------------------------

    @property
    def boundary_inbox(self) -> BoundaryInbox | None:
        return self._member.boundary_inbox if self._member else None

    @property
    def reduce_inbox(self) -> ReduceInbox | None:
        return self._member.reduce_inbox if self._member else None

    @property
    def committed_step(self) -> int:
        return self._worker.runtime.step if self._worker else 0

    async def state_at(self, stage: int, step: int) -> Path:
        member = self._member
        if member is None or member.worker.spec.stage != stage:
            raise WrongLeaseError(f"this node doesn't hold stage {stage}")
        return await member.state_file(self._scratch, step)

    # ---- life ----------------------------------------------------------------------------

    def leave(self) -> None:
        """Finish what is held, hand it over, and end. Called by a signal handler."""
        self._report("leaving: finishing this step first; press Ctrl-C again to quit at once")
        self._leaving.set()

    async def run(self) -> None:
        """Raises `ShoalError` when the node can't take part."""
        with (
            _one_daemon(self._config.folder),
            tempfile.TemporaryDirectory(prefix="state-", dir=self._config.folder) as scratch,
        ):
            self._scratch = Path(scratch)
            config = self._config
            probing = asyncio.create_task(
                asyncio.to_thread(
                    probe,
                    config.device,
                    num_threads=config.threads,
                    max_memory_bytes=int(config.max_memory_gb * 1e9),
                )
            )
            self._finder = Finder(
                self._identity, self._link, folder=config.folder, host=config.host,
                enabled=config.discovery,
            )  # fmt: skip
            try:
                self._membership = await join(
                    self._link, self._identity, self._finder.admission_addresses
                )
                self._device = await probing
                await self._serve()
            finally:
                probing.cancel()
                await self._close()

    async def _serve(self) -> None:
        membership = self._membership
        run = membership.run
        self._boundary = parse_boundary(run.spec.pipeline.boundary)
        shards = ShardCache(self._config.folder / "shards", self._fetch_shard)
        self._tokens = TokenSource(run, shards)
        self._service = PeerService(run.run_id, self._swarm, self, self._on_bad_peer)
        server = create_server()
        add_peer_servicer(self._service, server)
        host = self._config.host
        port = serve_secure(
            server,
            f"{_bracketed(host)}:{self._config.port}",
            membership.credentials.server_credentials(),
        )
        self._address = f"{_bracketed(self._config.advertise or host)}:{port}"
        await server.start()
        self._report(
            f"{self.name} joined run {run.run_id}, listening on {self._address}, "
            f"{self._device.name}"
        )
        # Discovery imports a heavy library: off the way to the first microbatch.
        self._spawn(self._finder.announce(run.run_id, self._address, membership.discovery_peers))
        self._spawn(self._renew_certificate())
        try:
            await self._keep_session()
        finally:
            await server.stop(grace=0.2)
            await shards.aclose()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._member is not None:
            await self._member.close()
        if self._worker is not None:
            self._worker.close()
        await self._finder.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- session -------------------------------------------------------------------------

    async def _keep_session(self) -> None:
        """Attach, and attach again whenever the session breaks, until dismissed."""
        address, failures = self._membership.session_address, 0
        rng = random.Random()
        while True:
            try:
                await self._attend(address)
                reason = "the coordinator ended the session"
            except _Dismissed as dismissed:
                self._report(f"done: {dismissed}")
                return
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if isinstance(error, VersionError):
                    raise error from None
                reason = str(error)
            failures = 0 if self._swarm.epoch else failures + 1
            if self._leaving.is_set():
                self._report("left while the coordinator was away; it fences this node by itself")
                return
            if failures in (0, 1):
                self._report(f"waiting for the coordinator: {reason}; trying again")
            await asyncio.sleep(backoff(failures, rng, limit_s=3.0))
            for candidate in await self._finder.session_addresses():
                address = candidate

    async def _attend(self, address: str) -> None:
        """One session, from Hello to its end."""
        membership = self._membership
        self._swarm.epoch = 0
        while not self._outbox.empty():
            self._outbox.get_nowait()
        async with membership.credentials.channel(address, membership.coordinator) as channel:
            self._stub = Stub(channel)
            call = self._stub.Session()
            await call.write(self._hello())
            helpers = [
                asyncio.create_task(self._send_events(call)),
                asyncio.create_task(self._heartbeat()),
                asyncio.create_task(self._say_farewell()),
            ]
            try:
                async for command in call:
                    await self._obey(command)
            finally:
                for task in helpers:
                    task.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
                if self._member is not None:  # a session's end is its incarnation's end
                    await self._detach()

    def _hello(self) -> coordinator_pb2.NodeEvent:
        hello = coordinator_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            release=__version__,
            address=self._address,
            hardware=self._device.to_proto(),
            pid=os.getpid(),
            discovery_addresses=self._finder.addresses(),
        )
        if self._worker is not None:
            hello.held.stage = self._worker.spec.stage
            hello.held.step = self._worker.runtime.step
            hello.held.weights_digest = self._weights_digest
            if self._held_sums is not None:
                hello.held.has_prepared = True
                hello.held.prepared_digest = self._held_sums.digest
        return coordinator_pb2.NodeEvent(hello=hello)

    async def _detach(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            self._held_sums = member.prepared
            await member.close()

    async def _send_events(
        self, call: "grpc.aio.StreamStreamCall[coordinator_pb2.NodeEvent, coordinator_pb2.Command]"
    ) -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _heartbeat(self) -> None:
        interval = self._membership.run.spec.fault.heartbeat_s
        while True:
            await asyncio.sleep(interval)
            member = self._member
            self._outbox.put_nowait(
                coordinator_pb2.NodeEvent(
                    heartbeat=coordinator_pb2.Heartbeat(
                        queue_depth=member.queue_depth() if member else 0,
                        memory_bytes=_resident_bytes(),
                        bytes_sent=member.links.bytes_sent if member else 0,
                        bytes_received=self._service.bytes_received,
                        waiting_for=member.waiting_for() if member else "an assignment",
                        discovered_peers=self._finder.num_discovered,
                    )
                )
            )

    async def _say_farewell(self) -> None:
        await self._leaving.wait()
        self._outbox.put_nowait(
            coordinator_pb2.NodeEvent(
                farewell=coordinator_pb2.Farewell(reason="its owner stopped it")
            )
        )
        await asyncio.sleep(self._config.grace_s)
        self._report(f"nobody took over within {self._config.grace_s:g} s; leaving now")
        os.kill(os.getpid(), 2)  # the second Ctrl-C, as the owner would

    def _on_bad_peer(self, peer_id: PeerId, error: ProtocolError) -> None:
        self._outbox.put_nowait(
            coordinator_pb2.NodeEvent(
                trouble=coordinator_pb2.Trouble(
                    kind=coordinator_pb2.TROUBLE_KIND_BAD_PEER,
                    incarnation=self._member.incarnation if self._member else 0,
                    peer_id=peer_id,
                    error=type(error).__name__,
                    detail=str(error)[:500],
                )
            )
        )

    # ---- commands ------------------------------------------------------------------------

    async def _obey(self, command: coordinator_pb2.Command) -> None:
        kind = command.WhichOneof("command")
        member = self._member
        if kind == "plan":
            gone = await self._swarm.update(command.plan)
            if member is not None:
                await member.members_gone(gone)
        elif kind == "assign":
            # Not awaited: a long copy must not hold up the plans that come meanwhile.
            self._spawn(self._take_stage(command.assign))
        elif kind == "dismiss":
            await self._dismissed(command.dismiss)
        elif kind == "wait":
            self._report(command.wait.reason)
        elif kind == "renew":
            log.info("the coordinator asks for a certificate renewal")
        elif member is not None:
            try:
                await self._obey_for_stage(member, command, kind)
            except ShoalError as error:
                self._trouble(member.incarnation, error)

    async def _obey_for_stage(
        self, member: StageMember, command: coordinator_pb2.Command, kind: str | None
    ) -> None:
        if kind == "step_open":
            await member.open_step(command.step_open)
        elif kind == "leases":
            await member.update_leases(command.leases)
        elif kind == "reduce":
            await member.reduce(command.reduce)
        elif kind == "commit":
            await member.commit(command.commit)
        elif kind == "snapshot":
            await self._snapshot(member, command.snapshot.step)

    async def _dismissed(self, dismiss: coordinator_pb2.Dismiss) -> None:
        if not dismiss.come_back:
            raise _Dismissed(dismiss.reason)
        self._report(f"taken out of the swarm: {dismiss.reason}; joining again")
        await self._detach()

    def _trouble(self, incarnation: int, error: Exception) -> None:
        log.warning("%s: %s", type(error).__name__, error)
        self._outbox.put_nowait(
            coordinator_pb2.NodeEvent(
                trouble=coordinator_pb2.Trouble(
                    kind=coordinator_pb2.TROUBLE_KIND_OWN_FAILURE,
                    incarnation=incarnation,
                    error=type(error).__name__,
                    detail=str(error)[:500],
                )
            )
        )

    # ---- a stage -------------------------------------------------------------------------

    async def _take_stage(self, assign: coordinator_pb2.Assign) -> None:
        try:
            await self._load_stage(assign)
        except (ShoalError, MemoryError, RuntimeError, OSError) as error:
            self._trouble(assign.incarnation, error)

    async def _load_stage(self, assign: coordinator_pb2.Assign) -> None:
        held_sums, self._held_sums = self._held_sums, None
        await self._detach()
        source = assign.source
        keep = source == coordinator_pb2.STATE_SOURCE_KEEP
        if not keep or self._worker is None or self._worker.spec.stage != assign.stage:
            if self._worker is not None:
                self._worker.close()
            self._worker = StageWorker(
                self._membership.run,
                assign.stage,
                boundary=self._boundary,
                device=self._device,
                tokens=self._tokens,
            )
            await self._worker.create()
            if source == coordinator_pb2.STATE_SOURCE_INIT:
                await self._worker.initialise()
            elif source == coordinator_pb2.STATE_SOURCE_PEER:
                self._report(f"copying stage {assign.stage} from {assign.donor.name}")
                await self._load_from(self._fetch_from_peer(assign), assign)
            elif source == coordinator_pb2.STATE_SOURCE_SNAPSHOT:
                self._report(f"fetching the snapshot of stage {assign.stage}, step {assign.step}")
                await self._load_from(self._fetch_from_store(assign), assign)
            else:
                raise WrongLeaseError(f"stage {assign.stage} is to be kept, but isn't held")
        worker = self._worker
        digest = await worker.weights_digest()
        self._weights_digest = digest
        member = StageMember(
            worker,
            incarnation=Incarnation(assign.incarnation),
            boundary=self._boundary,
            swarm=self._swarm,
            credentials=self._membership.credentials,
            device=self._device.torch_device,
            send=self._send,
        )
        if keep and held_sums is not None and held_sums.step == worker.runtime.step + 1:
            member.prepared = held_sums
        self._member = member
        self._report(f"holding stage {assign.stage} at step {worker.runtime.step}")
        self._send(
            coordinator_pb2.NodeEvent(
                ready=coordinator_pb2.Ready(
                    incarnation=assign.incarnation,
                    step=worker.runtime.step,
                    weights_digest=digest,
                )
            )
        )

    def _send(self, event: coordinator_pb2.NodeEvent) -> None:
        if event.HasField("applied"):
            self._weights_digest = event.applied.weights_digest
        self._outbox.put_nowait(event)

    async def _load_from(
        self, stream: AsyncIterator[peer_pb2.StateChunk], assign: coordinator_pb2.Assign
    ) -> None:
        assert self._worker is not None
        run = self._membership.run
        expect = StateExpectation.of(run, assign.stage, assign.step)
        path = self._scratch / f"incoming-{assign.incarnation}.safetensors"
        try:
            with StateReceiver(path, expect.max_bytes) as receiver:
                async for chunk in stream:
                    await asyncio.to_thread(receiver.feed, chunk)
                await asyncio.to_thread(receiver.finish)
            await self._worker.load(path, assign.step)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            path.unlink(missing_ok=True)

    async def _fetch_from_peer(
        self, assign: coordinator_pb2.Assign
    ) -> AsyncIterator[peer_pb2.StateChunk]:
        donor = assign.donor
        request = self._state_request(assign)
        credentials = self._membership.credentials
        async with credentials.channel(donor.address, PeerId(donor.peer_id)) as channel:
            stub = peer_pb2_grpc.PeerStub(channel)
            async for chunk in stub.FetchState(request, timeout=STATE_DEADLINE_S):
                yield chunk

    async def _fetch_from_store(
        self, assign: coordinator_pb2.Assign
    ) -> AsyncIterator[peer_pb2.StateChunk]:
        request = self._state_request(assign)
        async for chunk in self._stub.FetchSnapshot(request, timeout=STATE_DEADLINE_S):
            yield chunk

    def _state_request(self, assign: coordinator_pb2.Assign) -> peer_pb2.StateRequest:
        return peer_pb2.StateRequest(
            run_id=self._membership.run.run_id, stage=assign.stage, step=assign.step
        )

    async def _fetch_shard(self, sha256: str) -> AsyncIterator[bytes]:
        request = coordinator_pb2.ShardRequest(sha256=bytes.fromhex(sha256))
        try:
            async for chunk in self._stub.FetchShard(request, timeout=STATE_DEADLINE_S):
                yield chunk.data
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    async def _snapshot(self, member: StageMember, step: int) -> None:
        """Copy the state now, store it while training goes on."""
        path = await member.state_file(self._scratch, step)
        self._spawn(self._store_snapshot(member, path, step))

    async def _store_snapshot(self, member: StageMember, path: Path, step: int) -> None:
        run_id, stage = self._membership.run.run_id, member.worker.spec.stage

        async def upload() -> AsyncIterator[coordinator_pb2.SnapshotChunk]:
            request = peer_pb2.StateRequest(run_id=run_id, stage=stage, step=step)
            yield coordinator_pb2.SnapshotChunk(snapshot=request)
            for chunk in chunks(path):
                yield coordinator_pb2.SnapshotChunk(chunk=chunk)

        try:
            await self._stub.StoreSnapshot(upload(), timeout=STATE_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            self._trouble(member.incarnation, error_from_rpc(error))
        except ShoalError as error:
            self._trouble(member.incarnation, error)
        finally:
            path.unlink(missing_ok=True)

    async def _renew_certificate(self) -> None:
        """A fresh leaf, well before the old one expires."""
        expires_s = self._membership.certificate_expires_s
        while True:
            await asyncio.sleep(max(5.0, (expires_s - time.time()) / 3))
            request = coordinator_pb2.RenewRequest(tls_key=self._membership.tls_key_der)
            try:
                reply = await self._stub.Renew(request, timeout=DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                log.info("certificate not renewed yet: %s", error_from_rpc(error))
                continue
            self._membership.credentials.replace(leaf_pem=reply.certificate)
            expires_s = reply.expires_s


@contextlib.contextmanager
def _one_daemon(folder: Path) -> Iterator[None]:
    """Raises `CapacityError` when another daemon uses the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock: IO[str] = (folder / "daemon.lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}; choose another --folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CapacityError(
                f"{folder} is used by another node daemon; stop it, or give each its own --folder"
            ) from None
        yield


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
