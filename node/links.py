# SPDX-License-Identifier: Apache-2.0
"""Streams to other nodes: ordered pushes with acknowledgements, resumed after a broken connection.

One stream per (peer incarnation, method), open from the first tensor on. A tensor stays pending
until it is acknowledged; when the connection breaks, pending tensors are sent again (the receiver
deduplicates). The coordinator decides when a peer is gone: `drop` ends its streams.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from shoal.protocol.errors import (
    ChecksumError,
    FencedError,
    MalformedFrameError,
    ProtocolError,
    ShoalError,
    TruncatedStreamError,
    WrongLeaseError,
    WrongStepError,
    error_class,
)
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.ids import Incarnation, PeerId
from shoal.protocol.printable import printable
from shoal.protocol.proto import peer_pb2, types_pb2
from shoal.protocol.rpc import Credentials, backoff
from shoal.protocol.wire import Payload, checksum, frames, open_tensor_stream

log = logging.getLogger(__name__)

INCARNATION_METADATA = "shoal-incarnation"
"""Stream metadata: the sender's incarnation, so that a receiver can wait for a plan naming it."""

_RESENDS = 3
"""How often a tensor that arrived damaged is sent again."""

_RETRY_LIMIT_S = 2.0
"""Tries lie closer together than the coordinator's patience with a broken link."""

_MAX_REASON_CHARS = 500

_WORTH_RESENDING = (ChecksumError, TruncatedStreamError, MalformedFrameError)
_STALE = (WrongStepError, WrongLeaseError, FencedError)


Call = grpc.aio.StreamStreamCall[bytes, peer_pb2.PushAck]


@dataclass(eq=False, slots=True)
class _Outgoing:
    header: types_pb2.TensorHeader
    payload: Payload
    acknowledged: asyncio.Future[None]
    tries: int = 0


OnRefused = Callable[[types_pb2.Member, types_pb2.TensorKey, ProtocolError], None]
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
        faults: Faults = NO_FAULTS,
        on_broken: OnUnreachable = lambda member, reason: None,
    ) -> None:
        """`on_refused` hears of refusals that sending again does not cure; `on_unreachable` of
        every failure to deliver something after the first in a row, `on_broken` of that first."""
        self._credentials = credentials
        self._incarnation = incarnation
        self._on_refused = on_refused
        self._on_unreachable = on_unreachable
        self._faults = faults
        self._on_broken = on_broken
        self._streams: dict[tuple[Incarnation, str], _TensorStream] = {}
        self._closed = False
        self.bytes_sent = 0

    def push(
        self, member: types_pb2.Member, header: types_pb2.TensorHeader, payload: Payload
    ) -> asyncio.Future[None]:
        """Queue a tensor; the future ends when the peer has it, or has refused it as stale.

        It is cancelled when the peer is dropped, and holds a `ProtocolError` for a refusal that
        sending again does not cure. `payload` must not change before it ends.
        """
        if self._closed:
            late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            late.cancel()
            return late
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
                faults=self._faults,
                on_broken=self._on_broken,
            )
        header.checksum = checksum(payload)
        self.bytes_sent += len(payload)
        return stream.put(header, payload)

    async def drop(self, incarnation: Incarnation) -> None:
        """The peer is out of the plan: end its streams, cancel what is pending."""
        await self._end([key for key in self._streams if key[0] == incarnation])

    async def close(self) -> None:
        self._closed = True
        await self._end(list(self._streams))

    async def _end(self, keys: Sequence[tuple[Incarnation, str]]) -> None:
        ended = [self._streams.pop(key) for key in keys]
        await asyncio.gather(*(stream.close() for stream in ended))


@dataclass(eq=False)
class _TensorStream:
    member: types_pb2.Member
    method: str
    open_channel: Callable[[], grpc.aio.Channel]
    incarnation: Incarnation
    on_refused: OnRefused
    on_unreachable: OnUnreachable
    faults: Faults
    on_broken: OnUnreachable
    _queue: deque[_Outgoing] = field(default_factory=deque)
    _pending: dict[int, _Outgoing] = field(default_factory=dict)
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _sequence: int = 0
    _failures: int = 0

    def __post_init__(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"push to {self.member.name}")

    @property
    def peer_id(self) -> PeerId:
        return PeerId(self.member.peer_id)

    def put(self, header: types_pb2.TensorHeader, payload: Payload) -> asyncio.Future[None]:
        outgoing = _Outgoing(header, payload, asyncio.get_running_loop().create_future())
        self._enqueue(outgoing)
        return outgoing.acknowledged

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._requeue()
        while self._queue:
            self._queue.popleft().acknowledged.cancel()

    async def _run(self) -> None:
        rng = random.Random()
        while True:
            await self._something_to_send()
            try:
                reason = await self._serve()
            except Exception as error:  # whatever it is, what is pending must be sent again
                if not isinstance(error, (grpc.RpcError, ShoalError)):
                    log.exception("stream to %s failed", self.member.name)
                details = error.details() if isinstance(error, grpc.aio.AioRpcError) else ""
                reason = f"{details or error!r}"
            reason = printable(reason[:_MAX_REASON_CHARS])
            log.debug("stream to %s broke: %s", self.member.name, reason)
            self._requeue()
            if not self._queue:
                continue
            self._failures += 1
            tell = self.on_unreachable if self._failures >= 2 else self.on_broken
            tell(self.member, reason)
            await asyncio.sleep(backoff(self._failures, rng, limit_s=_RETRY_LIMIT_S))

    async def _serve(self) -> str:
        """One connection, for as long as it lasts; says why it ended."""
        self.faults.check_link(self.peer_id)
        async with self.open_channel() as channel:
            call = open_tensor_stream(
                channel, self.method, ((INCARNATION_METADATA, str(self.incarnation)),)
            )
            reader = asyncio.create_task(self._read(call))
            writer = asyncio.create_task(self._write(call))
            parts = {reader, writer}
            if self.faults.are_possible:
                parts.add(asyncio.create_task(self.faults.link_drops(self.peer_id)))
            try:
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                if call.done():  # the reader knows why
                    await asyncio.wait({reader})
            finally:
                call.cancel()
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
            self.faults.check_link(self.peer_id)
            (writer if reader.cancelled() else reader).result()
            return f"{self.member.name} ended the stream"

    async def _read(self, call: Call) -> None:
        async for ack in call:
            self._failures = 0
            self._settle(ack)

    async def _write(self, call: Call) -> None:
        while True:
            await self._something_to_send()
            outgoing = self._queue.popleft()
            if outgoing.acknowledged.done():  # whoever pushed it gave it up
                continue
            self._sequence += 1
            self._pending[self._sequence] = outgoing
            if delay_s := self.faults.delay_s(self.peer_id):
                await asyncio.sleep(delay_s)
            header = types_pb2.TensorHeader()
            header.CopyFrom(outgoing.header)
            header.sequence = self._sequence
            header.payload_bytes = len(outgoing.payload)
            for frame in frames(header, outgoing.payload):
                await call.write(frame)
            del outgoing  # while idle, only what is pending is kept

    def _settle(self, ack: peer_pb2.PushAck) -> None:
        outgoing = self._pending.pop(ack.sequence, None)
        if outgoing is None or outgoing.acknowledged.done():
            return
        if ack.status != peer_pb2.PUSH_STATUS_REFUSED:
            outgoing.acknowledged.set_result(None)
            return
        kind, detail = error_class(ack.error), printable(ack.detail[:_MAX_REASON_CHARS])
        error = kind(detail) if issubclass(kind, ProtocolError) else ProtocolError(detail)
        if isinstance(error, _WORTH_RESENDING) and outgoing.tries < _RESENDS:
            outgoing.tries += 1
            self._enqueue(outgoing)
        elif isinstance(error, _STALE):
            log.debug("%s no longer wants a tensor: %s", self.member.name, error)
            outgoing.acknowledged.set_result(None)
        else:
            outgoing.acknowledged.set_exception(error)
            outgoing.acknowledged.exception()  # whoever awaits it still gets it
            self.on_refused(self.member, outgoing.header.key, error)

    def _enqueue(self, outgoing: _Outgoing) -> None:
        self._queue.append(outgoing)
        self._filled.set()

    async def _something_to_send(self) -> None:
        while not self._queue:
            self._filled.clear()
            await self._filled.wait()

    def _requeue(self) -> None:
        """What was sent but not acknowledged goes to the front again, oldest first."""
        for sequence in sorted(self._pending, reverse=True):
            self._queue.appendleft(self._pending[sequence])
        self._pending.clear()
