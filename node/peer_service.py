# SPDX-License-Identifier: Apache-2.0
"""The gRPC service that a node offers to other nodes. Checks who speaks; the inboxes check what."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc

from shoal.node.inbox import BoundaryInbox
from shoal.node.links import INCARNATION_METADATA
from shoal.node.reduce import ReduceInbox
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import (
    FencedError,
    ProtocolError,
    ShoalError,
    WrongLeaseError,
    WrongStepError,
)
from shoal.protocol.ids import Incarnation, PeerId, Stage
from shoal.protocol.proto import peer_pb2, peer_pb2_grpc, types_pb2
from shoal.protocol.rpc import abort_with, peer_id_from_context
from shoal.protocol.state_file import chunks
from shoal.protocol.wire import ReceivedTensor, RefusedTensor, receive_tensors

log = logging.getLogger(__name__)

PLAN_LAG_S = 10.0
"""How long a peer may know of a newer plan than this node before it counts as unknown."""

_DECODE_INLINE_BYTES = 256 * 1024

_NOT_A_FAULT = (WrongStepError, WrongLeaseError, FencedError)
"""What honest nodes do when a command reaches them late."""


class Inboxes(Protocol):
    """What the service needs of the daemon; None while no stage is assigned."""

    @property
    def boundary_inbox(self) -> BoundaryInbox | None: ...
    @property
    def reduce_inbox(self) -> ReduceInbox | None: ...
    async def state_at(self, stage: int, step: int) -> Path: ...
    @property
    def committed_step(self) -> int: ...


Context = grpc.aio.ServicerContext[Any, Any]
OnBadPeer = Callable[[PeerId, ProtocolError], None]


class PeerService(peer_pb2_grpc.PeerServicer):
    def __init__(self, run_id: str, swarm: SwarmView, inboxes: Inboxes, on_bad: OnBadPeer) -> None:
        self._run_id = run_id
        self._swarm = swarm
        self._inboxes = inboxes
        self._on_bad = on_bad
        self.bytes_received = 0

    # Push and Reduce get serialized frames (protocol/wire.py), hence the type.
    async def Push(  # type: ignore[override]
        self, request_iterator: AsyncIterable[bytes], context: Context
    ) -> AsyncIterator[peer_pb2.PushAck]:
        async for ack in self._receive(
            request_iterator, context, self._admit_boundary, self._take_boundary
        ):
            yield ack

    async def Reduce(  # type: ignore[override]
        self, request_iterator: AsyncIterable[bytes], context: Context
    ) -> AsyncIterator[peer_pb2.PushAck]:
        async for ack in self._receive(
            request_iterator, context, self._admit_slice, self._take_slice
        ):
            yield ack

    async def _receive(
        self,
        messages: AsyncIterable[bytes],
        context: Context,
        admit: Callable[[types_pb2.TensorHeader, PeerId], int],
        take: Callable[[ReceivedTensor], Awaitable[bool]],
    ) -> AsyncIterator[peer_pb2.PushAck]:
        sender = await self._sender(context)
        try:
            async for received in receive_tensors(messages, lambda h: admit(h, sender)):
                if isinstance(received, RefusedTensor):
                    yield self._refuse(received.header, received.error, sender)
                    continue
                self.bytes_received += len(received.payload)
                try:
                    fresh = await take(received)
                except ProtocolError as error:
                    yield self._refuse(received.header, error, sender)
                    continue
                yield peer_pb2.PushAck(
                    sequence=received.header.sequence,
                    status=peer_pb2.PUSH_STATUS_ACCEPTED
                    if fresh
                    else peer_pb2.PUSH_STATUS_DUPLICATE,
                )
        except ProtocolError as error:  # the rest of the stream can't be read
            self._blame(sender, error)
            await abort_with(context, error)

    async def _sender(self, context: Context) -> PeerId:
        """Who opened the stream, once the plan names it (or the wait for that is over)."""
        sender = peer_id_from_context(context)
        metadata = dict(context.invocation_metadata() or ())
        claimed = str(metadata.get(INCARNATION_METADATA, ""))
        if claimed.isdecimal() and len(claimed) < 20:
            await self._swarm.known(Incarnation(int(claimed)), timeout_s=PLAN_LAG_S)
        return sender

    def _refuse(
        self, header: types_pb2.TensorHeader, error: ProtocolError, sender: PeerId
    ) -> peer_pb2.PushAck:
        self._blame(sender, error)
        return peer_pb2.PushAck(
            sequence=header.sequence,
            status=peer_pb2.PUSH_STATUS_REFUSED,
            error=type(error).__name__,
            detail=str(error),
        )

    def _blame(self, sender: PeerId, error: ProtocolError) -> None:
        log.info("refused a tensor of %s: %s: %s", sender, type(error).__name__, error)
        if not isinstance(error, _NOT_A_FAULT):
            self._on_bad(sender, error)

    # ---- boundary tensors ----------------------------------------------------------------

    def _admit_boundary(self, header: types_pb2.TensorHeader, sender: PeerId) -> int:
        inbox = self._inboxes.boundary_inbox
        if inbox is None:
            raise WrongLeaseError("this node holds no stage at the moment")
        return inbox.admit(header, sender)

    async def _take_boundary(self, received: ReceivedTensor) -> bool:
        inbox = self._inboxes.boundary_inbox
        if inbox is None:
            raise WrongLeaseError("this node holds no stage at the moment")
        if len(received.payload) <= _DECODE_INLINE_BYTES:
            tensor = inbox.decode(received)
        else:
            tensor = await asyncio.to_thread(inbox.decode, received)
        return inbox.accept(tensor)

    # ---- slices --------------------------------------------------------------------------

    def _admit_slice(self, header: types_pb2.TensorHeader, sender: PeerId) -> int:
        inbox = self._inboxes.reduce_inbox
        if inbox is None:
            raise WrongLeaseError("this node holds no stage at the moment")
        member = self._swarm.check(Incarnation(header.key.incarnation), sender)
        return inbox.admit(header, member, self._swarm.replicas(Stage(inbox.stage)))

    async def _take_slice(self, received: ReceivedTensor) -> bool:
        inbox = self._inboxes.reduce_inbox
        if inbox is None:
            raise WrongLeaseError("this node holds no stage at the moment")
        return inbox.accept(received)

    # ---- state and liveness --------------------------------------------------------------

    async def FetchState(
        self, request: peer_pb2.StateRequest, context: Context
    ) -> AsyncIterator[peer_pb2.StateChunk]:
        peer_id_from_context(context)
        try:
            if request.run_id != self._run_id:
                raise FencedError(f"state of run {request.run_id!r}; this is {self._run_id!r}")
            path = await self._inboxes.state_at(request.stage, request.step)
        except ShoalError as error:
            await abort_with(context, error)
            return
        try:
            for chunk in await asyncio.to_thread(chunks, path):
                yield chunk
        finally:
            path.unlink(missing_ok=True)

    async def Ping(
        self, request: peer_pb2.PingRequest, context: Context
    ) -> peer_pb2.PingReply:
        return peer_pb2.PingReply(nonce=request.nonce[:64], step=self._inboxes.committed_step)
