# SPDX-License-Identifier: Apache-2.0
"""Replicas sum up over an in-memory network: any order, dying peers, cancelled rounds."""

import asyncio
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.reduce import ReduceOutcome, all_reduce, slice_bounds
from shoal.node.reduce_inbox import ReduceInbox
from shoal.protocol.errors import (
    ChecksumError,
    NumericOverflowError,
    WrongStepError,
)
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import types_pb2
from shoal.protocol.wire import Payload, ReceivedTensor

RUN = "tiny-0a1b2c3d"
COMMITTED = 4
PARTIAL, TOTAL = types_pb2.DIRECTION_REDUCE_PARTIAL, types_pb2.DIRECTION_REDUCE_TOTAL


def inc(number: int) -> Incarnation:
    return Incarnation(number)


def member(incarnation: int, stage: int = 0) -> types_pb2.Member:
    return types_pb2.Member(incarnation=incarnation, stage=stage)


def key_of(who: int, *, attempt: int = 0, round: int = 1) -> types_pb2.TensorKey:
    return types_pb2.TensorKey(
        run_id=RUN, step=COMMITTED + 1, attempt=attempt, round=round, stage=0, incarnation=who
    )


class Network:
    """Delivers slices one by one, in an order of the seed's choosing, as often as it says."""

    def __init__(self, numel: int, members: int, *, seed: int = 0, repeat: int = 1) -> None:
        self.inboxes = {
            inc(i): ReduceInbox(RUN, 0, numel, COMMITTED) for i in range(1, members + 1)
        }
        self.rng = random.Random(seed)
        self.repeat = repeat
        self.gone: set[Incarnation] = set()
        self._held: dict[tuple[int, int, int], asyncio.Event] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.sent: dict[asyncio.Future[None], Incarnation] = {}
        self.payloads: list[Payload] = []
        self._pushed = asyncio.Event()

    def push_of(
        self, sender: Incarnation
    ) -> Callable[[Incarnation, types_pb2.TensorHeader, Payload], "asyncio.Future[None]"]:
        def push(
            to: Incarnation, header: types_pb2.TensorHeader, payload: Payload
        ) -> "asyncio.Future[None]":
            acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.sent[acknowledged] = to
            self.payloads.append(payload)
            self._pushed.set()
            if to in self.gone:
                acknowledged.cancel()
            else:
                work = self._carry(sender, to, header, payload, acknowledged)
                task = asyncio.create_task(work)
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            return acknowledged

        return push

    async def _carry(
        self,
        sender: Incarnation,
        to: Incarnation,
        header: types_pb2.TensorHeader,
        payload: Payload,
        acknowledged: "asyncio.Future[None]",
    ) -> None:
        for _ in range(self.repeat):
            for _ in range(self.rng.randrange(20)):
                await asyncio.sleep(0)
            held = self._held.get((sender, to, header.key.direction))
            if held is not None:
                await held.wait()
            header.payload_bytes = len(payload)
            try:
                inbox = self.inboxes[to]
                assert inbox.admit(header, member(sender)) == len(payload)
                await inbox.take(ReceivedTensor(header, bytes(payload)))
            except WrongStepError:
                pass  # stale, which links take for delivered
        if not acknowledged.done():
            acknowledged.set_result(None)

    def hold(self, sender: int, to: int, direction: int) -> None:
        """Nothing of this kind arrives until `release`."""
        self._held[sender, to, direction] = asyncio.Event()

    def release(self) -> None:
        for event in self._held.values():
            event.set()
        self._held.clear()

    def lose(self, who: Incarnation) -> None:
        """As `PeerLinks.drop`: what is pending for the peer is cancelled."""
        self.gone.add(who)
        for future, to in self.sent.items():
            if to == who:
                future.cancel()

    async def reduce(
        self, who: int, sums: torch.Tensor, parts: list[int], *, round: int = 1
    ) -> ReduceOutcome:
        return await all_reduce(
            sums,
            me=inc(who),
            parts=[inc(p) for p in parts],
            key=key_of(who, round=round),
            inbox=self.inboxes[inc(who)],
            push=self.push_of(inc(who)),
        )

    async def pushed(self, count: int) -> None:
        """Returns once so many slices are on their way, or were."""
        while len(self.sent) < count:
            self._pushed.clear()
            await asyncio.wait_for(self._pushed.wait(), 20)

    async def settle(self) -> None:
        await asyncio.gather(*self.tasks)


async def turns(count: int = 200) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def random_sums(members: int, numel: int, seed: int = 0, *, bits: int = 60) -> list[torch.Tensor]:
    """Of 60 bits they don't pack, of 20 bits they do."""
    generator = torch.Generator().manual_seed(seed)
    high = 2**bits // max(members, 1)
    return [torch.randint(-high, high, (numel,), generator=generator) for _ in range(members)]


@given(numel=st.integers(0, 50), parts=st.integers(1, 9))
def test_slices_cover_everything_once_and_evenly(numel: int, parts: int) -> None:
    bounds = slice_bounds(numel, parts)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(numel))
    sizes = [stop - start for start, stop in bounds]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(
    members=st.integers(1, 4),
    numel=st.sampled_from([0, 1, 2, 3, 7, 100, 1000]),
    bits=st.sampled_from([20, 60]),
    seed=st.integers(0, 2**20),
    repeat=st.integers(1, 2),
)
async def test_totals_are_the_plain_sum_in_any_order_of_arrival(
    members: int, numel: int, bits: int, seed: int, repeat: int
) -> None:
    network = Network(numel, members, seed=seed, repeat=repeat)
    sums = random_sums(members, numel, seed, bits=bits)
    before = [s.clone() for s in sums]
    parts = list(range(1, members + 1))
    random.Random(seed).shuffle(parts)
    outcomes = await asyncio.wait_for(
        asyncio.gather(*(network.reduce(i + 1, sums[i], parts) for i in range(members))), 20
    )
    expected = sum(before, torch.zeros(numel, dtype=torch.int64))
    for outcome in outcomes:
        assert torch.equal(outcome.totals, expected)
    assert all(torch.equal(a, b) for a, b in zip(sums, before, strict=True))
    # Everybody's slices but the own ones out, the own totals to all others.
    raw_bytes = 2 * 8 * numel * (members - 1)
    sent = sum(o.bytes_sent for o in outcomes)
    assert sent == sum(len(p) for p in network.payloads) <= raw_bytes
    if numel == 1000 and bits == 20 and raw_bytes:
        assert sent < 0.5 * raw_bytes
    await network.settle()
    for inbox in network.inboxes.values():
        assert not inbox._round.arrived


async def test_large_slices_are_packed_and_unpacked_off_the_loop() -> None:
    numel = 2 * 40_000  # a slice is more than what is unpacked at once
    network = Network(numel, 2)
    sums = random_sums(2, numel, bits=30)
    outcomes = await asyncio.wait_for(
        asyncio.gather(*(network.reduce(i, sums[i - 1], [1, 2]) for i in (1, 2))), 20
    )
    for outcome in outcomes:
        assert torch.equal(outcome.totals, sums[0] + sums[1])
        assert outcome.bytes_sent < 4 * numel + 4000


async def test_totals_belong_to_the_caller() -> None:
    [sums] = random_sums(1, 5)
    outcome = await Network(5, 1).reduce(1, sums, [1])
    assert outcome.totals.data_ptr() != sums.data_ptr()
    assert torch.equal(outcome.totals, sums)


async def test_peer_that_dies_after_it_prepared_does_not_hold_up_survivors() -> None:
    network = Network(9, 3)
    sums = random_sums(3, 9)
    # 2's total for 3 is stuck, so 3 isn't done when 1 is.
    network.hold(2, 3, TOTAL)
    one, two, three = (
        asyncio.create_task(network.reduce(i, sums[i - 1], [1, 2, 3])) for i in (1, 2, 3)
    )
    await asyncio.wait_for(one, 20)
    assert not three.done()
    network.lose(inc(1))
    network.release()
    outcomes = await asyncio.wait_for(asyncio.gather(two, three), 20)
    for outcome in outcomes:
        assert torch.equal(outcome.totals, sums[0] + sums[1] + sums[2])


async def test_acknowledgement_that_died_with_its_peer_does_not_hold_up_a_survivor() -> None:
    network = Network(8, 2)
    sums = random_sums(2, 8)
    push = network.push_of(inc(1))
    lost: list[asyncio.Future[None]] = []

    def without_acknowledgement(
        to: Incarnation, header: types_pb2.TensorHeader, payload: Payload
    ) -> "asyncio.Future[None]":
        push(to, header, payload)
        lost.append(asyncio.get_running_loop().create_future())
        return lost[-1]

    one = asyncio.create_task(
        all_reduce(
            sums[0], me=inc(1), parts=[inc(1), inc(2)], key=key_of(1),
            inbox=network.inboxes[inc(1)], push=without_acknowledgement,
        )
    )  # fmt: skip
    await asyncio.wait_for(network.reduce(2, sums[1], [1, 2]), 20)
    await network.settle()
    assert not one.done()
    for future in lost:
        future.cancel()
    outcome = await asyncio.wait_for(one, 20)
    assert torch.equal(outcome.totals, sums[0] + sums[1])


async def test_slice_refused_for_good_fails_the_reduction() -> None:
    network = Network(8, 2)
    sums = random_sums(2, 8)
    push = network.push_of(inc(1))

    def refused(
        to: Incarnation, header: types_pb2.TensorHeader, payload: Payload
    ) -> "asyncio.Future[None]":
        push(to, header, payload)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_exception(ChecksumError("three times"))
        return future

    one = asyncio.create_task(
        all_reduce(
            sums[0], me=inc(1), parts=[inc(1), inc(2)], key=key_of(1),
            inbox=network.inboxes[inc(1)], push=refused,
        )
    )  # fmt: skip
    await asyncio.wait_for(network.reduce(2, sums[1], [1, 2]), 20)
    with pytest.raises(ChecksumError):
        await asyncio.wait_for(one, 20)


async def test_sums_that_do_not_fit_together_are_an_overflow() -> None:
    network = Network(2, 2)
    big = torch.full((2,), 2**62)
    tasks = [asyncio.create_task(network.reduce(i, big, [1, 2])) for i in (1, 2)]
    with pytest.raises(NumericOverflowError):
        await asyncio.wait_for(tasks[0], 20)
    with pytest.raises(NumericOverflowError):
        await asyncio.wait_for(tasks[1], 20)


async def test_cancelled_round_leaves_no_trace_and_the_next_one_counts() -> None:
    network = Network(10, 3)
    sums = random_sums(3, 10)
    before = [s.clone() for s in sums]
    first = [asyncio.create_task(network.reduce(i, sums[i - 1], [3, 1, 2])) for i in (1, 2)]
    await network.pushed(4)
    await turns()
    assert not any(task.done() for task in first)  # 3 is dead
    assert network.inboxes[inc(1)]._round.arrived
    for task in first:
        task.cancel()
    await asyncio.gather(*first, return_exceptions=True)
    assert not network.inboxes[inc(1)]._round.arrived
    network.lose(inc(3))
    assert all(torch.equal(a, b) for a, b in zip(sums, before, strict=True))
    second = [network.reduce(i, sums[i - 1], [1, 2], round=2) for i in (1, 2)]
    for outcome in await asyncio.wait_for(asyncio.gather(*second), 20):
        assert torch.equal(outcome.totals, sums[0] + sums[1])


async def test_what_is_sent_does_not_follow_the_accumulator() -> None:
    network = Network(10, 2)
    sums = random_sums(2, 10)
    expected = sums[0] + sums[1]
    network.hold(1, 2, PARTIAL)
    one = asyncio.create_task(network.reduce(1, sums[0], [1, 2]))
    two = asyncio.create_task(network.reduce(2, sums[1], [1, 2]))
    await network.pushed(2)
    sums[0].zero_()
    sums[1].zero_()
    network.release()
    for outcome in await asyncio.wait_for(asyncio.gather(one, two), 20):
        assert torch.equal(outcome.totals, expected)
