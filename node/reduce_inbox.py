# SPDX-License-Identifier: Apache-2.0
"""Slices from the other replicas of a stage, held against the manifest of the round.

A slice may arrive before the coordinator's command that opens its round here. It then waits in
its stream, unacknowledged: so a sender holds at most one slice of memory per stream, whatever
rounds it names, and never takes room from another one's.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shoal.compression import integers
from shoal.protocol.errors import (
    ImpossibleLeaseError,
    ImpossibleStepError,
    MalformedFrameError,
    ReduceMismatchError,
    WrongLeaseError,
    WrongRunError,
    WrongShapeError,
    WrongStepError,
)
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import types_pb2
from shoal.protocol.wire import ReceivedTensor

Order = tuple[int, int, int]
"""(step, attempt, round): which of two rounds is the later one."""

SliceKey = tuple[int, int, Incarnation]
"""(direction, slice, sender)."""

_INLINE_ELEMENTS = 32 * 1024
"""Unpacked on the loop, in a fraction of a millisecond. Not bytes, since zeros take hardly any."""

_DIRECTIONS = (types_pb2.DIRECTION_REDUCE_PARTIAL, types_pb2.DIRECTION_REDUCE_TOTAL)


@dataclass(slots=True)
class _Round:
    expected: Mapping[SliceKey, int]
    arrived: dict[SliceKey, Tensor] = field(default_factory=dict)
    seen: set[SliceKey] = field(default_factory=set)
    over: bool = False


class ReduceInbox:
    """Slices for one assignment: a stage whose flat sums have `numel` elements."""

    def __init__(self, run_id: str, stage: int, numel: int, committed_step: int) -> None:
        self._run_id = run_id
        self._stage = stage
        self._numel = numel
        self._committed_step = committed_step
        self._order: Order = (committed_step + 1, 0, 0)  # rounds count from 1
        self._round = _Round({}, over=True)
        self._closed = False
        self._changed = asyncio.Event()
        self._unpacking = asyncio.Lock()
        self.num_taken = 0

    def admit(self, header: types_pb2.TensorHeader, sender: types_pb2.Member) -> int:
        """The payload length that the plan allows; raises a `ProtocolError` for anything else.

        A packed slice is shorter than a raw one, by how much only its sender knows. The number of
        its elements is held against the manifest when its round is open here; before that, it is
        at most the whole of the sums (`take` looks again).
        """
        key = header.key
        if key.run_id != self._run_id:
            raise WrongRunError(f"slice of run {key.run_id[:64]!r}; this is {self._run_id!r}")
        if key.direction not in _DIRECTIONS:
            raise MalformedFrameError(f"direction {key.direction} is not a reduction's")
        if sender.stage != self._stage or key.stage != self._stage:
            kind = WrongLeaseError if sender.stage == key.stage else ImpossibleLeaseError
            raise kind(
                f"slice of stage {key.stage} from stage {sender.stage}; this is stage {self._stage}"
            )
        if key.step > self._committed_step + 2:  # peers may have applied a commit before us
            raise ImpossibleStepError(
                f"slice of step {key.step}; this node is at step {self._committed_step}"
            )
        length = header.shape[0] if len(header.shape) == 1 else -1
        if header.dtype != types_pb2.DTYPE_INT64 or not 0 <= length <= self._numel:
            raise WrongShapeError(
                f"slice of shape {list(header.shape)[:8]} and dtype {header.dtype}; the plan's is "
                f"int64 with at most {self._numel} elements"
            )
        if _order_of(key) <= self._order:
            self._check(key, length)
        integers.check_length(header.codec, header.payload_bytes, length)
        return header.payload_bytes

    async def take(self, received: ReceivedTensor) -> bool:
        """Unpack and store a slice, once its round is open; False for a duplicate.

        Raises `WrongStepError` when another round was opened instead, and `CodecError` for bytes
        that no encoder writes.
        """
        header, key = received.header, received.header.key
        while _order_of(key) > self._order:
            if self._closed:
                raise WrongLeaseError("this node gave up its stage")
            await self._changed.wait()
        # One at a time, which bounds the memory of a sender that repeats a slice on many streams.
        # A repetition waits here: acknowledged before the first is in, it would be lost with it.
        async with self._unpacking:
            slice_key, opened = self._check(key, header.shape[0]), self._round
            if slice_key in opened.seen:
                return False
            values = None if opened.over else await _unpacked(received)
            if values is None or opened.over or opened is not self._round:
                raise WrongStepError(f"round {_order_of(key)} was cancelled")
            opened.seen.add(slice_key)
            self.num_taken += 1
            opened.arrived[slice_key] = values
            self._notify()
            return True

    def _check(self, key: types_pb2.TensorKey, numel: int) -> SliceKey:
        """Holds a slice of an opened round against its manifest."""
        sender = Incarnation(key.incarnation)
        slice_key = (int(key.direction), key.microbatch, sender)
        if _order_of(key) < self._order:
            raise WrongStepError(
                f"slice of step {key.step}, attempt {key.attempt}, round {key.round}; "
                f"this node is at {self._order}"
            )
        expected = self._round.expected.get(slice_key)
        if expected is None:
            if self._round.over:
                raise WrongStepError(f"round {self._order} is over")
            raise ReduceMismatchError(
                f"slice {key.microbatch}, direction {key.direction}, of incarnation {sender} "
                "is not in the manifest"
            )
        if numel != expected:
            raise WrongShapeError(
                f"slice of {numel} elements from incarnation {sender}; its part has {expected}"
            )
        return slice_key

    def waits_for(self) -> Incarnation | None:
        """Whose slice the open round lacks; None when there is no such round."""
        if self._round.over:
            return None
        missing = [key for key in self._round.expected if key not in self._round.seen]
        return missing[0][2] if missing else None

    # ---- the node's own progress ---------------------------------------------------------

    def open_round(self, order: Order, expected: Mapping[SliceKey, int]) -> None:
        """Take the slices in `expected` (key to number of elements); earlier rounds are over."""
        self._order, self._round = order, _Round(expected)
        self._notify()

    async def get(self, key: SliceKey) -> Tensor:
        """A slice of the open round, flat int64, once it is here. Its memory is the caller's."""
        opened = self._round
        while key not in opened.arrived:
            await self._changed.wait()
        return opened.arrived.pop(key)

    def end_round(self, order: Order) -> None:
        """The round's result is in, or it was cancelled: keep none of its slices."""
        if order == self._order:
            self._round.over = True
            self._round.arrived.clear()

    def close_step(self, committed_step: int) -> None:
        self._committed_step = committed_step
        self._order, self._round = (committed_step + 1, 0, 0), _Round({}, over=True)
        self._notify()

    def close(self) -> None:
        """The assignment is over: whatever waits for a round is refused."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _unpacked(received: ReceivedTensor) -> Tensor:
    codec, payload, numel = received.header.codec, received.payload, received.header.shape[0]
    if numel <= _INLINE_ELEMENTS:
        return integers.decode(codec, payload, numel)
    return await asyncio.to_thread(integers.decode, codec, payload, numel)


def _order_of(key: types_pb2.TensorKey) -> Order:
    return key.step, key.attempt, key.round
