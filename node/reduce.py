# SPDX-License-Identifier: Apache-2.0
"""The replicas of a stage sum up: reduce-scatter and all-gather of int64 slices over gRPC.

Part i of the manifest owns slice i of the stage's flat sums. Everybody sends each owner its
partial slice, the owner adds them and sends the total to everybody. Integer addition is
associative, so the totals do not depend on arrival. Slices travel packed (compression/integers.py),
which is lossless. The accumulator itself is never changed here: a cancelled round leaves no trace.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shoal.compression import integers
from shoal.node.fixed_point import combine
from shoal.node.reduce_inbox import ReduceInbox, SliceKey
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import types_pb2
from shoal.protocol.wire import Payload

PushSlice = Callable[[Incarnation, types_pb2.TensorHeader, Payload], "asyncio.Future[None]"]

_PARTIAL = types_pb2.DIRECTION_REDUCE_PARTIAL
_TOTAL = types_pb2.DIRECTION_REDUCE_TOTAL


def slice_bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous slices that cover `numel` elements, as even as possible."""
    return [(i * numel // parts, (i + 1) * numel // parts) for i in range(parts)]


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
    without holding anybody up; a peer that is dropped meanwhile needs nothing any more. Raises
    the `ProtocolError` with which a peer refuses a slice for good. Cancelled from outside when
    the round is; waits end only so.
    """
    bounds = slice_bounds(sums.numel(), len(parts))
    mine = parts.index(me)
    start, stop = bounds[mine]
    others = [(index, who) for index, who in enumerate(parts) if who != me]
    expected: dict[SliceKey, int] = {}
    for index, who in others:
        begin, end = bounds[index]
        expected[_PARTIAL, mine, who] = stop - start
        expected[_TOTAL, index, who] = end - begin
    order = (key.step, key.attempt, key.round)
    sent: list[asyncio.Future[None]] = []
    num_bytes = 0

    async def send(
        receivers: Sequence[Incarnation],
        direction: types_pb2.Direction.ValueType,
        index: int,
        data: torch.Tensor,
    ) -> None:
        nonlocal num_bytes
        codec, payload = await asyncio.to_thread(integers.encode, data)
        for to in receivers:
            header = types_pb2.TensorHeader(
                codec=codec, dtype=types_pb2.DTYPE_INT64, shape=[data.numel()]
            )
            header.key.CopyFrom(key)
            header.key.direction = direction
            header.key.microbatch = index
            num_bytes += len(payload)
            sent.append(push(to, header, payload))

    inbox.open_round(order, expected)
    try:
        # A copy: pushes may still be pending when the round is over and the accumulator goes on.
        local = await asyncio.to_thread(lambda: sums.detach().to("cpu", copy=True))
        for index, owner in others:
            begin, end = bounds[index]
            await send([owner], _PARTIAL, index, local[begin:end])
        partials = [local[start:stop]]
        for _, sender in others:
            partials.append(await inbox.get((_PARTIAL, mine, sender)))
        total = await asyncio.to_thread(combine, partials)
        del partials
        if others:
            await send([peer for _, peer in others], _TOTAL, mine, total)
        totals = torch.empty_like(local)
        totals[start:stop] = total
        for index, owner in others:
            begin, end = bounds[index]
            totals[begin:end] = await inbox.get((_TOTAL, index, owner))
        # Not gather, which a future cancelled with its dropped peer would cancel too.
        if sent:
            await asyncio.wait(sent)
    finally:
        inbox.end_round(order)
    for future in sent:
        if not future.cancelled():
            future.result()
    return ReduceOutcome(totals, num_bytes)
