# SPDX-License-Identifier: Apache-2.0
"""The replicas of a stage sum up: reduce-scatter and all-gather of int64 slices over gRPC.

Part i of the manifest owns slice i of the stage's flat sums. Everybody sends each owner its
partial slice, the owner adds them and sends the total to everybody. Integer addition is
associative, so the totals do not depend on arrival. The accumulator itself is never changed here:
a cancelled round leaves no trace.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shoal.node.fixed_point import combine
from shoal.protocol.errors import (
    MalformedFrameError,
    WrongLeaseError,
    WrongRunError,
    WrongShapeError,
    WrongStepError,
)
from shoal.protocol.ids import Incarnation, PeerId
from shoal.protocol.proto import types_pb2
from shoal.protocol.wire import Payload, ReceivedTensor

_DIRECTIONS = (types_pb2.DIRECTION_REDUCE_PARTIAL, types_pb2.DIRECTION_REDUCE_TOTAL)

Key = tuple[int, int, int, int, int, Incarnation]
"""(step, attempt, round, direction, slice, sender)."""

PushSlice = Callable[[Incarnation, types_pb2.TensorHeader, Payload], "asyncio.Future[None]"]


def slice_bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous slices that cover `numel` elements, as even as possible."""
    return [(i * numel // parts, (i + 1) * numel // parts) for i in range(parts)]


@dataclass(slots=True)
class ReduceInbox:
    """Slices that arrived, perhaps before the coordinator's command to reduce."""

    run_id: str
    stage: int
    numel: int
    committed_step: int
    _arrived: dict[Key, Payload] = field(default_factory=dict)
    _waiting: dict[Key, "asyncio.Future[Payload]"] = field(default_factory=dict)

    def admit(
        self, header: types_pb2.TensorHeader, sender: types_pb2.Member, num_replicas: int
    ) -> int:
        """The payload length that the plan allows; raises a `ProtocolError` for anything else."""
        key = header.key
        if key.run_id != self.run_id:
            raise WrongRunError(f"slice of run {key.run_id!r}; this is {self.run_id!r}")
        if key.direction not in _DIRECTIONS:
            raise MalformedFrameError(f"direction {key.direction} is not a reduction's")
        if sender.stage != self.stage or key.stage != self.stage:
            raise WrongLeaseError(
                f"slice of stage {key.stage} from stage {sender.stage}; this is stage {self.stage}"
            )
        if key.step != self.committed_step + 1:
            raise WrongStepError(
                f"slice of step {key.step}; this node is at step {self.committed_step}"
            )
        length = header.shape[0] if len(header.shape) == 1 else -1
        if header.dtype != types_pb2.DTYPE_INT64 or not 0 <= length <= self.numel:
            raise WrongShapeError(
                f"slice of shape {list(header.shape)[:8]} and dtype {header.dtype}; the plan's is "
                f"int64 with at most {self.numel} elements"
            )
        if len(self._arrived) >= 8 * max(num_replicas, 1):
            raise WrongLeaseError(f"{len(self._arrived)} slices wait for a reduction already")
        return 8 * length

    def accept(self, received: ReceivedTensor) -> bool:
        """False for a duplicate."""
        k = received.header.key
        key = (
            k.step, k.attempt, k.round, int(k.direction), k.microbatch, Incarnation(k.incarnation)
        )  # fmt: skip
        waiting = self._waiting.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(received.payload)
            return True
        fresh = key not in self._arrived
        self._arrived[key] = received.payload
        return fresh

    async def get(self, key: Key) -> Payload:
        if key in self._arrived:
            return self._arrived.pop(key)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        try:
            return await waiting
        finally:
            self._waiting.pop(key, None)

    def close_step(self, committed_step: int) -> None:
        self.committed_step = committed_step
        self._arrived = {k: v for k, v in self._arrived.items() if k[0] > committed_step}


@dataclass(frozen=True, slots=True)
class ReduceOutcome:
    totals: torch.Tensor
    """Flat int64, CPU."""
    bytes_sent: int


async def all_reduce(
    sums: torch.Tensor,
    *,
    me: Incarnation,
    parts: Sequence[Incarnation],
    key: types_pb2.TensorKey,
    inbox: ReduceInbox,
    push: PushSlice,
) -> ReduceOutcome:
    """Total sums over all parts. `sums` is flat int64 and is left as it is.

    `key` names run, step, attempt, round, stage and the own incarnation. Returns once the peers
    have acknowledged everything that they need from here, so that this node may die afterwards
    without holding anybody up. Cancelled from outside when the round is; waits end only so.
    """
    local = sums.to("cpu")
    if len(parts) == 1:
        return ReduceOutcome(local.clone(), 0)
    bounds = slice_bounds(local.numel(), len(parts))
    mine = parts.index(me)
    sent: list[asyncio.Future[None]] = []
    num_bytes = 0

    def send(
        to: Incarnation, direction: types_pb2.Direction, index: int, data: torch.Tensor
    ) -> None:
        nonlocal num_bytes
        header = types_pb2.TensorHeader(
            codec="raw", dtype=types_pb2.DTYPE_INT64, shape=[data.numel()]
        )
        header.key.CopyFrom(key)
        header.key.direction = direction
        header.key.microbatch = index
        payload = memoryview(data.contiguous().numpy()).cast("B")
        num_bytes += len(payload)
        sent.append(push(to, header, payload))

    def incoming(direction: types_pb2.Direction, index: int, sender: Incarnation) -> Key:
        return (key.step, key.attempt, key.round, int(direction), index, sender)

    for index, owner in enumerate(parts):
        if owner != me:
            start, stop = bounds[index]
            send(owner, types_pb2.DIRECTION_REDUCE_PARTIAL, index, local[start:stop])

    start, stop = bounds[mine]
    partials = [local[start:stop]]
    for sender in parts:
        if sender != me:
            payload = await inbox.get(incoming(types_pb2.DIRECTION_REDUCE_PARTIAL, mine, sender))
            partials.append(_int64(payload, stop - start, sender))
    total = combine(partials)
    for peer in parts:
        if peer != me:
            send(peer, types_pb2.DIRECTION_REDUCE_TOTAL, mine, total)

    totals = torch.empty_like(local)
    totals[start:stop] = total
    for index, owner in enumerate(parts):
        if owner != me:
            payload = await inbox.get(incoming(types_pb2.DIRECTION_REDUCE_TOTAL, index, owner))
            begin, end = bounds[index]
            totals[begin:end] = _int64(payload, end - begin, owner)
    await asyncio.gather(*sent)
    return ReduceOutcome(totals, num_bytes)


def _int64(payload: Payload, numel: int, sender: PeerId | Incarnation) -> torch.Tensor:
    if len(payload) != 8 * numel:
        raise WrongShapeError(
            f"slice of {len(payload)} bytes from incarnation {sender}; its part is {8 * numel}"
        )
    return (
        torch.frombuffer(bytearray(payload), dtype=torch.int64)
        if numel
        else torch.empty(0, dtype=torch.int64)
    )
