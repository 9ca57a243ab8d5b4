# SPDX-License-Identifier: Apache-2.0
"""Streams to other nodes: ordered pushes with acknowledgements, resumed after a broken connection.

One stream per (peer incarnation, method). A tensor stays pending until it is acknowledged; when
the connection breaks, pending tensors are sent again (the receiver deduplicates). The coordinator
decides when a peer is gone: `drop` ends its streams.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from shoal.protocol.errors import (
    ChecksumError,
    FencedError,
    MalformedFrameError,
    ProtocolError,
    TruncatedStreamError,
    WrongLeaseError,
    WrongStepError,
    error_class,
)
from shoal.protocol.ids import Incarnation, PeerId
from shoal.protocol.proto import peer_pb2, types_pb2
from shoal.protocol.rpc import Credentials, backoff
from shoal.protocol.wire import Payload, checksum, frames, open_tensor_stream

log = logging.getLogger(__name__)

INCARNATION_METADATA = "shoal-incarnation"
"""Stream metadata: the sender's incarnation, so that a receiver can wait for a plan naming it."""

_RESENDS = 3

_WORTH_RESENDING = (ChecksumError, TruncatedStreamError, MalformedFrameError)
_STALE = (WrongStepError, WrongLeaseError, FencedError)


@dataclass(eq=False, slots=True)
class _Outgoing:
    header: types_pb2.TensorHeader
    payload: Payload
    acknowledged: asyncio.Future[None]
    tries: int = 0


OnRefused = Callable[[types_pb2.Member, ProtocolError], None]
OnUnreachable = Callable[[types_pb2.Member, str], None]


class PeerLinks:
    """All outgoing tensor streams of one assignment."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        incarnation: Incarnation,
        on_refused: OnRefused,
        on_unreachable: OnUnreachable,
    ) -> None:
        self._credentials = credentials
        self._incarnation = incarnation
        self._on_refused = on_refused
        self._on_unreachable = on_unreachable
        self._streams: dict[tuple[Incarnation, str], _TensorStream] = {}
        self.bytes_sent = 0

    def push(
        self, member: types_pb2.Member, header: types_pb2.TensorHeader, payload: Payload
    ) -> asyncio.Future[None]:
        """Queue a tensor; the future ends when the peer has it, or has refused it as stale.

        It is cancelled when the peer is dropped, and holds a `ProtocolError` for a refusal that
        sending again does not cure.
        """
        reduction = header.key.direction in (
            types_pb2.DIRECTION_REDUCE_PARTIAL,
            types_pb2.DIRECTION_REDUCE_TOTAL,
        )
        key = (Incarnation(member.incarnation), "Reduce" if reduction else "Push")
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _TensorStream(
                member,
                method=key[1],
                open_channel=lambda: self._credentials.channel(
                    member.address, PeerId(member.peer_id)
                ),
                incarnation=self._incarnation,
                on_refused=self._on_refused,
                on_unreachable=self._on_unreachable,
            )
        header.checksum = checksum(payload)
        self.bytes_sent += len(payload)
        return stream.put(header, payload)

    async def drop(self, incarnation: Incarnation) -> None:
        """The peer is out of the plan: end its streams, cancel what is pending."""
        for key in [key for key in self._streams if key[0] == incarnation]:
            await self._streams.pop(key).close()

    async def close(self) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.close()


@dataclass(eq=False)
class _TensorStream:
    member: types_pb2.Member
    method: str
    open_channel: Callable[[], grpc.aio.Channel]
    incarnation: Incarnation
    on_refused: OnRefused
    on_unreachable: OnUnreachable
    _queue: asyncio.Queue[_Outgoing] = field(default_factory=asyncio.Queue)
    _pending: dict[int, _Outgoing] = field(default_factory=dict)
    _sequence: int = 0

    def __post_init__(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"push to {self.member.name}")

    def put(self, header: types_pb2.TensorHeader, payload: Payload) -> asyncio.Future[None]:
        outgoing = _Outgoing(header, payload, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(outgoing)
        return outgoing.acknowledged

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for outgoing in self._take_all():
            outgoing.acknowledged.cancel()

    async def _run(self) -> None:
        failures = 0
        rng = random.Random()
        while True:
            try:
                async with self.open_channel() as channel:
                    call = open_tensor_stream(
                        channel,
                        self.method,
                        ((INCARNATION_METADATA, str(self.incarnation)),),
                    )
                    writer = asyncio.create_task(self._write(call))
                    try:
                        async for ack in call:
                            failures = 0
                            self._settle(ack)
                    finally:
                        writer.cancel()
                        await asyncio.gather(writer, return_exceptions=True)
                    reason = f"{self.member.name} ended the stream"
            except grpc.RpcError as error:
                details = error.details() if isinstance(error, grpc.aio.AioRpcError) else ""
                reason = f"{details or error}"
            failures += 1
            for outgoing in self._take_all():
                self._queue.put_nowait(outgoing)
            log.debug("stream to %s broke: %s", self.member.name, reason)
            if failures >= 2:
                self.on_unreachable(self.member, reason)
            await asyncio.sleep(backoff(failures, rng))

    async def _write(self, call: "grpc.aio.StreamStreamCall[bytes, peer_pb2.PushAck]") -> None:
        while True:
            outgoing = await self._queue.get()
            self._sequence += 1
            self._pending[self._sequence] = outgoing
            header = types_pb2.TensorHeader()
            header.CopyFrom(outgoing.header)
            header.sequence = self._sequence
            header.payload_bytes = len(outgoing.payload)
            for frame in frames(header, outgoing.payload):
                await call.write(frame)

    def _settle(self, ack: peer_pb2.PushAck) -> None:
        outgoing = self._pending.pop(ack.sequence, None)
        if outgoing is None or outgoing.acknowledged.done():
            return
        if ack.status != peer_pb2.PUSH_STATUS_REFUSED:
            outgoing.acknowledged.set_result(None)
            return
        kind = error_class(ack.error)
        error = kind(ack.detail) if issubclass(kind, ProtocolError) else ProtocolError(ack.detail)
        if isinstance(error, _WORTH_RESENDING) and outgoing.tries < _RESENDS:
            outgoing.tries += 1
            self._queue.put_nowait(outgoing)
        elif isinstance(error, _STALE):
            log.debug("%s no longer wants a tensor: %s", self.member.name, error)
            outgoing.acknowledged.set_result(None)
        else:
            self.on_refused(self.member, error)
            outgoing.acknowledged.set_exception(error)
            outgoing.acknowledged.exception()  # whoever awaits it still gets it

    def _take_all(self) -> list[_Outgoing]:
        """Everything not acknowledged yet, oldest first; leaves nothing pending or queued."""
        taken = [self._pending[sequence] for sequence in sorted(self._pending)]
        self._pending.clear()
        while not self._queue.empty():
            taken.append(self._queue.get_nowait())
        return taken
