# SPDX-License-Identifier: Apache-2.0
"""The gRPC service that a node offers to other nodes. Checks who speaks; the inboxes check what."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import grpc

from shoal.node.inbox import BoundaryInbox
from shoal.node.links import INCARNATION_METADATA
from shoal.node.logged_boundaries import LoggedBoundaries
from shoal.node.pace import Pace
from shoal.node.reduce_inbox import ReduceInbox
from shoal.node.shares import ShareDesk, SharedOut
from shoal.node.state_pins import PinnedState
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import (
    CapacityError,
    FencedError,
    ImpossibleLeaseError,
    ImpossibleStepError,
    ProtocolError,
    ShoalError,
    WrongLeaseError,
    WrongRunError,
    WrongStepError,
)
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.ids import Incarnation, PeerId
from shoal.protocol.proto import peer_pb2, peer_pb2_grpc, types_pb2
from shoal.protocol.rpc import abort_with, peer_id_from_context
from shoal.protocol.state_chunks import read_chunks
from shoal.protocol.wire import ReceivedTensor, RefusedTensor, receive_tensors

log = logging.getLogger(__name__)

PLAN_LAG_S = 10.0
"""How long a peer may know of a newer plan than this node before it counts as unknown."""

_MAX_LOG_READS = 8
"""Of one peer. A replay reads two directions of two steps at a time."""

_MAX_SHARE_READS = 8
"""Of one peer, which asks one at a time, of two boundaries in a replay; a request that it has given
up may wait here for a while."""

_DECODE_INLINE_BYTES = 256 * 1024

_MAX_STREAMS = 8
"""Of one peer. Two are in use; after broken connections some more may look open for a while."""

_MAX_DONATIONS = 6
"""Requests for state under way, of one peer: it may fetch weights and moments at once, and a broken
connection may look open for a while."""

_NO_STAGE = "this node holds no stage at the moment"

_NOT_A_FAULT = (WrongStepError, WrongLeaseError, FencedError)
"""What honest nodes do when a command reaches them late."""

_IMPOSSIBLE = (ImpossibleStepError, ImpossibleLeaseError)
"""What no delay explains."""


class Inboxes(Protocol):
    """What the service needs of the daemon; None while no stage is assigned."""

    @property
    def boundary_inbox(self) -> BoundaryInbox | None: ...
    @property
    def reduce_inbox(self) -> ReduceInbox | None: ...
    async def pinned(
        self, stage: int, step: int, part: types_pb2.StatePart.ValueType
    ) -> PinnedState: ...
    def share_desk(self, stage: int) -> ShareDesk | None: ...
    @property
    def committed_step(self) -> int: ...


Context = grpc.aio.ServicerContext[Any, Any]
OnBadPeer = Callable[[PeerId, ProtocolError, types_pb2.TensorKey | None], None]
"""Hears who sent what no honest node sends, and in which tensor, if in one."""


class _BoundaryStream:
    """What one `Push` stream brings; each tensor goes to the inbox that admitted it."""

    def __init__(self, inboxes: Inboxes, sender: PeerId) -> None:
        self._inboxes = inboxes
        self._sender = sender
        self._inbox: BoundaryInbox | None = None

    def admit(self, header: types_pb2.TensorHeader) -> int:
        self._inbox = self._inboxes.boundary_inbox
        if self._inbox is None:
            raise WrongLeaseError(_NO_STAGE)
        return self._inbox.admit(header, self._sender)

    async def take(self, received: ReceivedTensor) -> bool:
        inbox = self._inbox
        assert inbox is not None, "it admitted the tensor"
        if len(received.payload) <= _DECODE_INLINE_BYTES:
            tensor = inbox.decode(received)
        else:
            tensor = await asyncio.to_thread(inbox.decode, received)
        if inbox is not self._inboxes.boundary_inbox:
            raise WrongLeaseError("this node changed its stage meanwhile")
        return inbox.accept(tensor)


class _ReduceStream:
    """What one `Reduce` stream brings."""

    def __init__(self, inboxes: Inboxes, swarm: SwarmView, sender: PeerId) -> None:
        self._inboxes = inboxes
        self._swarm = swarm
        self._sender = sender
        self._inbox: ReduceInbox | None = None

    def admit(self, header: types_pb2.TensorHeader) -> int:
        self._inbox = self._inboxes.reduce_inbox
        if self._inbox is None:
            raise WrongLeaseError(_NO_STAGE)
        member = self._swarm.check(Incarnation(header.key.incarnation), self._sender)
        return self._inbox.admit(header, member)

    async def take(self, received: ReceivedTensor) -> bool:
        assert self._inbox is not None, "it admitted the slice"
        return await self._inbox.take(received)


class PeerService(peer_pb2_grpc.PeerServicer):
    def __init__(
        self,
        run_id: str,
        swarm: SwarmView,
        inboxes: Inboxes,
        on_bad: OnBadPeer,
        faults: Faults = NO_FAULTS,
        *,
        pace: Pace | None = None,
        logged: LoggedBoundaries | None = None,
        shared: SharedOut | None = None,
    ) -> None:
        """`on_bad` hears of what no honest node sends, not of what merely came late. `pace` bounds
        what is given to joiners for which nobody waits. Without `logged` the node has no boundary
        log to answer from; without `shared` it has no shares either."""
        self._pace = pace or Pace(0)
        self._run_id = run_id
        self._swarm = swarm
        self._inboxes = inboxes
        self._on_bad = on_bad
        self._faults = faults
        self._open_streams: Counter[PeerId] = Counter()
        self._donations: Counter[PeerId] = Counter()
        self._logged = logged
        self._shared = shared
        self._share_reads: Counter[PeerId] = Counter()
        self._log_reads: Counter[PeerId] = Counter()
        self.bytes_received = 0

    # Push and Reduce get serialized frames (protocol/wire.py), hence the type.
    async def Push(  # type: ignore[override]
        self, request_iterator: AsyncIterable[bytes], context: Context
    ) -> AsyncIterator[peer_pb2.PushAck]:
        serving = self._serve(
            request_iterator, context, lambda sender: _BoundaryStream(self._inboxes, sender)
        )
        async with aclosing(serving) as acks:
            async for ack in acks:
                yield ack

    async def Reduce(  # type: ignore[override]
        self, request_iterator: AsyncIterable[bytes], context: Context
    ) -> AsyncIterator[peer_pb2.PushAck]:
        serving = self._serve(
            request_iterator,
            context,
            lambda sender: _ReduceStream(self._inboxes, self._swarm, sender),
        )
        async with aclosing(serving) as acks:
            async for ack in acks:
                yield ack

    async def _serve(
        self,
        messages: AsyncIterable[bytes],
        context: Context,
        open_stream: Callable[[PeerId], "_BoundaryStream | _ReduceStream"],
    ) -> AsyncGenerator[peer_pb2.PushAck, None]:
        try:
            sender = peer_id_from_context(context)
            self._faults.check_link(sender)
            with _counted(self._open_streams, sender, _MAX_STREAMS, "tensor streams"):
                await self._wait_for_plan(context)
                receiving = self._receive(messages, open_stream(sender), sender)
                async with aclosing(receiving) as acks:
                    async for ack in acks:
                        yield ack
        except ShoalError as error:  # the rest of the stream can't be read
            await abort_with(context, error)

    async def _receive(
        self,
        messages: AsyncIterable[bytes],
        stream: "_BoundaryStream | _ReduceStream",
        sender: PeerId,
    ) -> AsyncGenerator[peer_pb2.PushAck, None]:
        try:
            async for received in receive_tensors(messages, stream.admit):
                self._faults.check_link(sender)
                if isinstance(received, RefusedTensor):
                    yield self._refuse(received.header, received.error, sender)
                    continue
                self.bytes_received += len(received.payload)
                sequence = received.header.sequence
                try:
                    fresh = await stream.take(received)
                except ProtocolError as error:
                    yield self._refuse(received.header, error, sender)
                    continue
                del received  # while the stream idles, its last tensor belongs to the inbox alone
                yield peer_pb2.PushAck(
                    sequence=sequence,
                    status=peer_pb2.PUSH_STATUS_ACCEPTED
                    if fresh
                    else peer_pb2.PUSH_STATUS_DUPLICATE,
                )
        except ProtocolError as error:
            self._blame(sender, error)
            raise

    async def _wait_for_plan(self, context: Context) -> None:
        """Until the plan names who opened the stream, or the wait for that is over."""
        metadata = dict(context.invocation_metadata() or ())
        claimed = str(metadata.get(INCARNATION_METADATA, ""))
        if claimed.isdecimal() and len(claimed) < 20:
            await self._swarm.known(Incarnation(int(claimed)), timeout_s=PLAN_LAG_S)

    def _refuse(
        self, header: types_pb2.TensorHeader, error: ProtocolError, sender: PeerId
    ) -> peer_pb2.PushAck:
        self._blame(sender, error, header.key)
        return peer_pb2.PushAck(
            sequence=header.sequence,
            status=peer_pb2.PUSH_STATUS_REFUSED,
            error=type(error).__name__,
            detail=str(error),
        )

    def _blame(
        self, sender: PeerId, error: ProtocolError, key: types_pb2.TensorKey | None = None
    ) -> None:
        log.info("refused a tensor of %s: %s: %s", sender, type(error).__name__, error)
        if isinstance(error, _IMPOSSIBLE) or not isinstance(error, _NOT_A_FAULT):
            self._on_bad(sender, error, key)

    # ---- state and liveness --------------------------------------------------------------

    async def DescribeState(
        self, request: peer_pb2.StateRequest, context: Context
    ) -> peer_pb2.StateDescription:
        try:
            with self._donating(request, context):
                pinned = await self._inboxes.pinned(request.stage, request.step, request.part)
                return pinned.description
        except ShoalError as error:
            await abort_with(context, error)

    async def FetchState(
        self, request: peer_pb2.StateRequest, context: Context
    ) -> AsyncIterator[peer_pb2.StateChunk]:
        try:
            with self._donating(request, context):
                pinned = await self._inboxes.pinned(request.stage, request.step, request.part)
                reading = read_chunks(
                    pinned.path, request.chunks, chunk_bytes=pinned.description.chunk_bytes
                )
                while (chunk := await asyncio.to_thread(next, reading, None)) is not None:
                    if not pinned.urgent:
                        await self._pace.spend(len(chunk.data))
                    yield chunk
        except ShoalError as error:
            await abort_with(context, error)

    @contextmanager
    def _donating(self, request: peer_pb2.StateRequest, context: Context) -> Iterator[None]:
        """Raises `WrongRunError`, or `CapacityError`: every request takes the disk's time."""
        sender = peer_id_from_context(context)
        if request.run_id != self._run_id:
            raise WrongRunError(f"state of run {request.run_id[:64]!r}; this is {self._run_id!r}")
        with _counted(self._donations, sender, _MAX_DONATIONS, "requests for state"):
            yield

    async def FetchBoundary(  # type: ignore[override]
        self, request: peer_pb2.BoundaryRequest, context: Context
    ) -> AsyncIterator[bytes]:
        # Like FetchState for every admitted peer: whoever replays is in the plan only afterwards.
        try:
            sender = peer_id_from_context(context)
            if self._logged is None:
                return
            with _counted(self._log_reads, sender, _MAX_LOG_READS, "reads of the boundary log"):
                async for frame in self._logged.frames(request):
                    yield frame
        except ShoalError as error:
            await abort_with(context, error)

    async def FetchShare(  # type: ignore[override]
        self, request: peer_pb2.ShareRequest, context: Context
    ) -> AsyncIterator[bytes]:
        # As FetchBoundary for every admitted peer.
        try:
            sender = peer_id_from_context(context)
            self._faults.check_link(sender)
            if self._shared is None:
                return
            with _counted(self._share_reads, sender, _MAX_SHARE_READS, "requests for shares"):
                desk = self._inboxes.share_desk(request.stage)
                async for frame in self._shared.frames(request, desk):
                    yield frame
        except ShoalError as error:
            await abort_with(context, error)

    async def Ping(self, request: peer_pb2.PingRequest, context: Context) -> peer_pb2.PingReply:
        return peer_pb2.PingReply(nonce=request.nonce[:64], step=self._inboxes.committed_step)


@contextmanager
def _counted(counts: Counter[PeerId], peer: PeerId, limit: int, what: str) -> Iterator[None]:
    """Raises `CapacityError` when the peer has `limit` of these already."""
    if counts[peer] >= limit:
        raise CapacityError(f"{peer} has {limit} {what} open already; close one first")
    counts[peer] += 1
    try:
        yield
    finally:
        counts[peer] -= 1
        if not counts[peer]:
            del counts[peer]
