# SPDX-License-Identifier: Apache-2.0
"""The coordinator's gRPC service: admission, sessions, and the two stores.

One servicer answers on two ports. On the admission port nobody has a certificate, so only `Join`
works there; everything else asks for the peer id that mutual TLS has verified.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from shoal.coordinator import sessions
from shoal.coordinator.conductor import Conductor
from shoal.coordinator.data.shards import ShardStore
from shoal.coordinator.follow import FollowDesk
from shoal.protocol import state_chunks
from shoal.protocol.atomic_file import storage_error
from shoal.protocol.authority import LEAF_LIFETIME_S, Authority
from shoal.protocol.errors import (
    AdmissionError,
    CapacityError,
    CoordinatorDiskError,
    MalformedFrameError,
    ShoalError,
    StorageError,
    UnknownPeerError,
    UnreachableError,
)
from shoal.protocol.identity import verify_join_request
from shoal.protocol.ids import PeerId, display_name
from shoal.protocol.proto import coordinator_pb2, coordinator_pb2_grpc, peer_pb2
from shoal.protocol.rpc import DEADLINE_S, abort_with, peer_id_from_context
from shoal.protocol.state_file import chunks

log = logging.getLogger(__name__)

MAX_SESSIONS = 4096
KNOCK_S = 10.0
"""How long a node waits here for enough others to come, before it looks elsewhere."""

UPLOAD_SILENT_S = 60.0
"""A snapshot's upload that brings no chunk for so long is given up."""

_MAX_EVENT_BYTES = 1 << 20
_JOINS_PER_MINUTE = 600

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M")


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    def __init__(
        self,
        conductor: Conductor,
        authority: Authority,
        *,
        run_folder: Path,
        session_address: Callable[[], str],
        discovery_addresses: Callable[[], list[str]],
        leaf_lifetime_s: float = LEAF_LIFETIME_S,
        follow: FollowDesk | None = None,
    ) -> None:
        self._follow = follow
        self._conductor = conductor
        self._authority = authority
        self._shards = ShardStore(run_folder)
        self._session_address = session_address
        self._discovery_addresses = discovery_addresses
        self._leaf_lifetime_s = leaf_lifetime_s
        self._joins: deque[float] = deque(maxlen=_JOINS_PER_MINUTE)

    # ---- admission -----------------------------------------------------------------------

    async def Join(
        self, request: coordinator_pb2.JoinRequest, context: Context
    ) -> coordinator_pb2.JoinReply:
        try:
            return self._join(request)
        except ShoalError as error:
            log.info("refused to admit: %s", error)
            await abort_with(context, error)

    def _join(self, request: coordinator_pb2.JoinRequest) -> coordinator_pb2.JoinReply:
        now_s = time.time()
        if len(self._joins) == _JOINS_PER_MINUTE and now_s - self._joins[0] < 60:
            raise CapacityError(f"over {_JOINS_PER_MINUTE} nodes asked to join within a minute")
        self._joins.append(now_s)
        run = self._conductor.run
        peer_id = verify_join_request(request, now_s)
        if request.run_id != run.run_id:
            raise AdmissionError(
                f"the link is for run {request.run_id[:64]!r}, this is {run.run_id}; "
                "ask for a link to this run"
            )
        self._authority.check_token(request.token, run.run_id, now_s)
        certificate, expires_s = self._authority.issue_leaf(
            request.tls_key, peer_id, self._leaf_lifetime_s, now_s
        )
        log.info("admitted %s (%s)", display_name(peer_id), peer_id)
        return coordinator_pb2.JoinReply(
            certificate=certificate,
            authority=self._authority.certificate_pem,
            session_address=self._session_address(),
            run_spec=run.to_json(),
            discovery_peers=self._discovery_addresses()[:16],
            expires_s=expires_s,
        )

    async def Renew(
        self, request: coordinator_pb2.RenewRequest, context: Context
    ) -> coordinator_pb2.RenewReply:
        try:
            peer_id = peer_id_from_context(context)
            if peer_id not in self._conductor.sessions:
                raise UnknownPeerError("only attached nodes renew their certificate; attach first")
            certificate, expires_s = self._authority.issue_leaf(
                request.tls_key, peer_id, self._leaf_lifetime_s, time.time()
            )
            return coordinator_pb2.RenewReply(certificate=certificate, expires_s=expires_s)
        except ShoalError as error:
            await abort_with(context, error)

    async def Leader(
        self, request: coordinator_pb2.LeaderRequest, context: Context
    ) -> coordinator_pb2.LeaderReply:
        conductor, terms = self._conductor, self._conductor.terms
        return coordinator_pb2.LeaderReply(
            run_id=conductor.run.run_id,
            term=terms.term,
            coordinator_id=terms.log_id,
            leads=terms.leads and conductor.deposed is None,
            step=conductor.state.step,
            session_address=self._session_address(),
        )

    async def Follow(
        self, request: coordinator_pb2.FollowRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.FollowEvent]:
        try:
            if self._follow is None:
                raise CapacityError("this coordinator has no standbys")
            async for event in self._follow.follow(request):
                yield event
        except ShoalError as error:
            log.warning("a standby is refused: %s", error)
            await abort_with(context, error)

    # ---- sessions ------------------------------------------------------------------------

    # Writes itself instead of yielding: so a session can end while a command waits to be read.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterable[coordinator_pb2.NodeEvent], context: Context
    ) -> None:
        try:
            peer_id = peer_id_from_context(context)
            events = aiter(request_iterator)
            first = await _next(events)
            if first is None or not first.HasField("hello"):
                raise MalformedFrameError("a session begins with Hello")
            if self._conductor.terms.num_here >= MAX_SESSIONS:
                raise CapacityError(f"the run has {MAX_SESSIONS} nodes already")
            self._conductor.greet(peer_id, first.hello)
        except ShoalError as error:
            await abort_with(context, error)
            return
        try:
            await self._attended(peer_id, first.hello, events, context)
        finally:
            self._conductor.terms.went(peer_id)

    async def _attended(
        self,
        peer_id: PeerId,
        hello: coordinator_pb2.Hello,
        events: AsyncIterator[coordinator_pb2.NodeEvent],
        context: Context,
    ) -> None:
        """From Lead to the session's end."""
        terms = self._conductor.terms
        try:
            async with asyncio.timeout(KNOCK_S):
                await terms.is_worth_a_promise.wait()
            async with asyncio.timeout(DEADLINE_S):
                await context.write(coordinator_pb2.Command(lead=terms.lead()))
                promise = await _promise(events)
            session = self._conductor.attach(peer_id, hello, promise)
        except TimeoutError:
            waits = self._conductor.waiting_for or "the node doesn't answer"
            await abort_with(context, UnreachableError(f"no session: {waits}"))
            return
        except ShoalError as error:
            await abort_with(context, error)
            return
        cut = asyncio.Event()
        session.cut = cut.set
        reader = asyncio.create_task(self._read(session, events))
        writer = asyncio.create_task(self._write(session, context))
        cutter = asyncio.create_task(cut.wait())
        try:
            await asyncio.wait({writer, cutter}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer, cutter):
                task.cancel()
            (ended, *_) = await asyncio.gather(writer, reader, return_exceptions=True)
            if ended is not None:
                log.debug("the session of %s broke: %r", session.name, ended)
            self._conductor.detach(session)
        if cut.is_set():
            deaf = CapacityError("this node didn't read its commands; attach again")
            await abort_with(context, deaf)

    async def _write(self, session: sessions.Session, context: Context) -> None:
        while (command := await session.outbox.get()) is not None:
            await self._conductor.can_announce.wait()
            await context.write(command)

    async def _read(
        self, session: sessions.Session, events: AsyncIterator[coordinator_pb2.NodeEvent]
    ) -> None:
        reason = "connection lost"
        try:
            async for event in events:
                if event.ByteSize() > _MAX_EVENT_BYTES:
                    reason = f"sent an event of {event.ByteSize()} bytes"
                    break
                self._conductor.receive(session, event)
        except grpc.RpcError:
            pass
        except Exception:
            log.exception("an event of %s failed", session.name)
            reason = "internal error"
        self._conductor.detach(session, session.farewell or reason)

    # ---- stores --------------------------------------------------------------------------

    async def FetchShard(
        self, request: coordinator_pb2.ShardRequest, context: Context
    ) -> AsyncIterator[peer_pb2.StateChunk]:
        try:
            peer_id_from_context(context)
            path = self._shards.open(request.sha256.hex())
        except ShoalError as error:
            await abort_with(context, error)
            return
        async for chunk in _read_chunks(path):
            yield chunk

    async def DescribeSnapshot(
        self, request: peer_pb2.StateRequest, context: Context
    ) -> peer_pb2.StateDescription:
        try:
            peer_id_from_context(context)
            path = self._conductor.snapshots.path(request.step, request.stage)
            return await asyncio.to_thread(state_chunks.describe, path)
        except ShoalError as error:
            await abort_with(context, error)

    async def FetchSnapshot(
        self, request: peer_pb2.StateRequest, context: Context
    ) -> AsyncIterator[peer_pb2.StateChunk]:
        try:
            peer_id_from_context(context)
            path = self._conductor.snapshots.path(request.step, request.stage)
            size = state_chunks.chunk_bytes_for(path.stat().st_size)
            reading = state_chunks.read_chunks(path, request.chunks, chunk_bytes=size)
            while (chunk := await asyncio.to_thread(next, reading, None)) is not None:
                yield chunk
        except OSError as error:
            await abort_with(context, storage_error(path, error))
        except ShoalError as error:
            await abort_with(context, error)

    async def StoreSnapshot(
        self, request_iterator: AsyncIterable[coordinator_pb2.SnapshotChunk], context: Context
    ) -> coordinator_pb2.SnapshotReceipt:
        try:
            return await self._store_snapshot(request_iterator, context)
        except ShoalError as error:
            log.warning("snapshot refused: %s", error)
            await abort_with(context, error)

    async def _store_snapshot(
        self, messages: AsyncIterable[coordinator_pb2.SnapshotChunk], context: Context
    ) -> coordinator_pb2.SnapshotReceipt:
        peer_id = peer_id_from_context(context)
        incoming = aiter(messages)
        first = await _next(incoming)
        if first is None or not first.HasField("snapshot"):
            raise MalformedFrameError("a snapshot begins with the step and stage that it is of")
        step, stage = first.snapshot.step, first.snapshot.stage
        if not self._conductor.expects_snapshot(peer_id, step, stage):
            raise UnknownPeerError(
                f"nobody asked this node for the snapshot of stage {stage}, step {step}"
            )
        store = self._conductor.snapshots
        digests = self._conductor.state.weights_digests.get(step)
        try:
            with store.receiver(step, stage) as receiver:
                while (message := await _next(incoming, within_s=UPLOAD_SILENT_S)) is not None:
                    await asyncio.to_thread(receiver.feed, message.chunk)
                path = await asyncio.to_thread(receiver.finish)
                complete = await asyncio.to_thread(
                    store.add,
                    step,
                    stage,
                    path,
                    sha256=receiver.sha256,
                    weights_digest=digests[stage] if digests else None,
                )
        except StorageError as error:
            if not isinstance(error.__cause__, OSError):
                raise  # damaged bytes are the node's
            self._conductor.snapshot_refused(step, str(error))
            raise CoordinatorDiskError(f"the coordinator's disk: {error}") from error
        if complete:
            self._conductor.snapshot_stored(step)
        return coordinator_pb2.SnapshotReceipt(step=step, stage=stage)


async def _next(messages: AsyncIterator[M], *, within_s: float = DEADLINE_S) -> M | None:
    """A stream's next message; None when it ends. Raises `MalformedFrameError` when none comes, so
    that nobody holds a call open for nothing."""
    try:
        async with asyncio.timeout(within_s):
            return await anext(messages, None)
    except TimeoutError:
        raise MalformedFrameError(f"the call sent nothing within {within_s:g} s") from None


async def _promise(
    events: AsyncIterator[coordinator_pb2.NodeEvent],
) -> coordinator_pb2.Promise:
    """The answer to Lead. Raises `MalformedFrameError`."""
    async for event in events:
        if event.HasField("promise"):
            return event.promise
        if not event.HasField("heartbeat"):
            break
    raise MalformedFrameError("a session's second event is Promise")


async def _read_chunks(path: Path) -> AsyncIterator[peer_pb2.StateChunk]:
    """The file's chunks, read off the event loop."""
    pieces = chunks(path)
    while (chunk := await asyncio.to_thread(next, pieces, None)) is not None:
        yield chunk
