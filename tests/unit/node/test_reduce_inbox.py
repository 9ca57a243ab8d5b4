# SPDX-License-Identifier: Apache-2.0
"""Slices: what the manifest admits, what waits for its round, and that nobody can take memory."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from shoal.compression import integers
from shoal.node.reduce_inbox import ReduceInbox
from shoal.protocol.errors import (
    CodecError,
    ImpossibleLeaseError,
    ImpossibleStepError,
    MalformedFrameError,
    OversizedStreamError,
    ProtocolError,
    ReduceMismatchError,
    WrongCodecError,
    WrongLeaseError,
    WrongRunError,
    WrongShapeError,
    WrongStepError,
)
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import types_pb2
from shoal.protocol.wire import ReceivedTensor

RUN = "tiny-0a1b2c3d"
COMMITTED = 4
PARTIAL, TOTAL = types_pb2.DIRECTION_REDUCE_PARTIAL, types_pb2.DIRECTION_REDUCE_TOTAL


def inc(number: int) -> Incarnation:
    return Incarnation(number)


def member(incarnation: int, stage: int = 0) -> types_pb2.Member:
    return types_pb2.Member(incarnation=incarnation, stage=stage)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def slice_header(
    sender: int = 2, *, direction: types_pb2.Direction.ValueType = PARTIAL, index: int = 0,
    numel: int = 3, **changes: object,
) -> types_pb2.TensorHeader:  # fmt: skip
    key = types_pb2.TensorKey(
        run_id=RUN, step=COMMITTED + 1, round=1, stage=0, incarnation=sender,
        direction=direction, microbatch=index,
    )  # fmt: skip
    made = types_pb2.TensorHeader(
        key=key, codec=integers.RAW, dtype=types_pb2.DTYPE_INT64, shape=[numel],
        payload_bytes=8 * numel,
    )  # fmt: skip
    for name, value in changes.items():
        if name == "shape":
            del made.shape[:]
            made.shape.extend(value)  # type: ignore[arg-type]  # a test's tuple
        else:
            setattr(made.key if hasattr(made.key, name) else made, name, value)
    return made


def packed_header(numel: int, payload_bytes: int, **changes: object) -> types_pb2.TensorHeader:
    return slice_header(
        numel=numel, codec=integers.PACKED, payload_bytes=payload_bytes, **changes
    )  # fmt: skip


def received(header: types_pb2.TensorHeader) -> ReceivedTensor:
    return ReceivedTensor(header, bytes(8 * header.shape[0]))


def inbox_in_round(round: int = 1) -> ReduceInbox:
    """Six elements between incarnations 1 (this) and 2."""
    inbox = ReduceInbox(RUN, 0, 6, COMMITTED)
    inbox.open_round((COMMITTED + 1, 0, round), {(PARTIAL, 0, inc(2)): 3, (TOTAL, 1, inc(2)): 3})
    return inbox


LARGE = 100_000
"""Unpacked in a thread."""


def large_inbox() -> ReduceInbox:
    inbox = ReduceInbox(RUN, 0, LARGE, COMMITTED)
    inbox.open_round((COMMITTED + 1, 0, 1), {(PARTIAL, 0, inc(2)): LARGE})
    return inbox


def large_slice() -> ReceivedTensor:
    codec, payload = integers.encode(torch.ones(LARGE).long())
    assert codec == integers.PACKED
    return ReceivedTensor(packed_header(LARGE, len(payload)), payload)


@pytest.mark.parametrize(
    ("header", "sender", "error"),
    [
        (slice_header(run_id="other"), member(2), WrongRunError),
        (slice_header(direction=types_pb2.DIRECTION_FORWARD), member(2), MalformedFrameError),
        (slice_header(), member(2, stage=1), ImpossibleLeaseError),
        (slice_header(stage=1), member(2), ImpossibleLeaseError),
        (slice_header(step=COMMITTED), member(2), WrongStepError),
        (slice_header(step=COMMITTED + 3), member(2), ImpossibleStepError),
        (slice_header(shape=(7,)), member(2), WrongShapeError),
        (slice_header(shape=(1, 3)), member(2), WrongShapeError),
        (slice_header(shape=()), member(2), WrongShapeError),
        (slice_header(dtype=types_pb2.DTYPE_FLOAT32), member(2), WrongShapeError),
        # Held against the manifest of the open round:
        (slice_header(numel=2), member(2), WrongShapeError),
        (slice_header(index=1), member(2), ReduceMismatchError),
        (slice_header(sender=3), member(3), ReduceMismatchError),
        (slice_header(round=0), member(2), WrongStepError),
        # Lengths, before anything is there:
        (slice_header(codec="zip"), member(2), WrongCodecError),
        (slice_header(payload_bytes=23), member(2), OversizedStreamError),
        (slice_header(payload_bytes=25), member(2), OversizedStreamError),
        (packed_header(3, 24), member(2), OversizedStreamError),
        (packed_header(3, 2**40), member(2), OversizedStreamError),
        (packed_header(6, 48, round=2), member(2), OversizedStreamError),
    ],
)
async def test_whatever_the_plan_does_not_allow_is_refused_by_name(
    header: types_pb2.TensorHeader, sender: types_pb2.Member, error: type[ProtocolError]
) -> None:
    with pytest.raises(ProtocolError) as caught:
        inbox_in_round().admit(header, sender)
    assert type(caught.value) is error


async def test_slice_is_a_duplicate_even_after_its_use() -> None:
    inbox = inbox_in_round()
    assert await inbox.take(received(slice_header()))
    assert not await inbox.take(received(slice_header()))
    await inbox.get((PARTIAL, 0, inc(2)))
    assert not await inbox.take(received(slice_header()))
    assert not inbox._round.arrived


async def test_packed_slice_is_admitted_at_its_length_and_unpacked() -> None:
    values = torch.arange(100)
    codec, payload = integers.encode(values)
    assert codec == integers.PACKED
    inbox = ReduceInbox(RUN, 0, 200, COMMITTED)
    inbox.open_round((COMMITTED + 1, 0, 1), {(PARTIAL, 0, inc(2)): 100})
    header = packed_header(100, len(payload))
    assert inbox.admit(header, member(2)) == len(payload) < 800
    assert await inbox.take(ReceivedTensor(header, payload))
    assert torch.equal(await inbox.get((PARTIAL, 0, inc(2))), values)


async def test_damaged_slice_is_its_senders_fault_and_the_good_one_still_counts() -> None:
    inbox = ReduceInbox(RUN, 0, 200, COMMITTED)
    inbox.open_round((COMMITTED + 1, 0, 1), {(PARTIAL, 0, inc(2)): 100})
    for payload in (b"", bytes(5), b"\xff" * 100):
        with pytest.raises(CodecError):
            await inbox.take(ReceivedTensor(packed_header(100, len(payload)), payload))
    assert inbox.waits_for() == inc(2)
    zeros = bytes(4)  # two blocks of no width
    assert await inbox.take(ReceivedTensor(packed_header(100, 4), zeros))
    assert inbox.waits_for() is None


class Unpacking:
    """Unpacking waits, in its thread, until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.calls = 0
        self._decode = integers.decode

    def __call__(self, codec: str, payload: integers.Buffer, count: int) -> torch.Tensor:
        self.calls += 1
        assert self.may_go_on.wait(20)
        return self._decode(codec, payload, count)


@pytest.fixture
def unpacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Unpacking]:
    held = Unpacking()
    monkeypatch.setattr(integers, "decode", held)
    yield held
    held.may_go_on.set()


async def test_slice_that_comes_on_two_streams_is_unpacked_once(unpacking: Unpacking) -> None:
    inbox = large_inbox()
    taking = [asyncio.create_task(inbox.take(large_slice())) for _ in range(2)]
    await turns(20)
    unpacking.may_go_on.set()
    assert await asyncio.gather(*taking) == [True, False]
    assert unpacking.calls == inbox.num_taken == 1


async def test_repetition_is_not_acknowledged_before_the_slice_is_in(unpacking: Unpacking) -> None:
    """Its stream may break in the middle of unpacking; then only the repetition is left."""
    inbox = large_inbox()
    first, second = (asyncio.create_task(inbox.take(large_slice())) for _ in range(2))
    await turns(20)
    assert not second.done()
    first.cancel()
    unpacking.may_go_on.set()
    assert await second
    assert torch.equal(await inbox.get((PARTIAL, 0, inc(2))), torch.ones(LARGE).long())


@pytest.mark.parametrize(
    "end",
    [
        lambda inbox: inbox.end_round((COMMITTED + 1, 0, 1)),
        lambda inbox: inbox.open_round((COMMITTED + 1, 0, 2), {(PARTIAL, 0, inc(2)): LARGE}),
        lambda inbox: inbox.close_step(COMMITTED + 1),
    ],
)
async def test_round_that_ends_while_a_slice_is_unpacked_keeps_nothing_of_it(
    end: Callable[[ReduceInbox], None], unpacking: Unpacking
) -> None:
    inbox = large_inbox()
    opened = inbox._round
    taking = asyncio.create_task(inbox.take(large_slice()))
    await turns(20)
    end(inbox)
    unpacking.may_go_on.set()
    with pytest.raises(WrongStepError, match="cancelled"):
        await taking
    assert not opened.arrived
    assert not inbox._round.arrived


async def test_early_slice_waits_in_its_stream_until_its_round_opens() -> None:
    inbox = inbox_in_round(round=1)
    assert inbox.admit(slice_header(round=2, numel=6), member(2)) == 48  # not known better yet
    taking = asyncio.create_task(inbox.take(received(slice_header(round=2))))
    await turns(5)
    assert not taking.done()
    inbox.open_round((COMMITTED + 1, 0, 2), {(PARTIAL, 0, inc(2)): 3})
    assert await taking
    assert (await inbox.get((PARTIAL, 0, inc(2)))).tolist() == [0, 0, 0]


async def test_early_slice_of_wrong_length_is_its_senders_fault() -> None:
    inbox = inbox_in_round(round=1)
    taking = asyncio.create_task(inbox.take(received(slice_header(round=2, numel=6))))
    await turns(5)
    inbox.open_round((COMMITTED + 1, 0, 2), {(PARTIAL, 0, inc(2)): 3})
    with pytest.raises(WrongShapeError):
        await taking


@pytest.mark.parametrize(
    ("instead", "error"),
    [
        (lambda inbox: inbox.open_round((COMMITTED + 1, 1, 1), {}), WrongStepError),
        (lambda inbox: inbox.close_step(COMMITTED + 1), WrongStepError),
        (lambda inbox: inbox.close(), WrongLeaseError),
    ],
)
async def test_early_slice_is_refused_when_its_round_never_comes(
    instead: Callable[[ReduceInbox], None], error: type[ProtocolError]
) -> None:
    inbox = inbox_in_round(round=1)
    taking = asyncio.create_task(inbox.take(received(slice_header(round=2))))
    await turns(5)
    instead(inbox)
    with pytest.raises(error):
        await taking


async def test_late_slices_of_an_old_round_are_refused_and_kept_nowhere() -> None:
    inbox = inbox_in_round(round=1)
    await inbox.take(received(slice_header()))
    inbox.open_round((COMMITTED + 1, 0, 2), {(PARTIAL, 0, inc(2)): 3})
    with pytest.raises(WrongStepError):
        inbox.admit(slice_header(), member(2))
    with pytest.raises(WrongStepError):
        await inbox.take(received(slice_header()))
    assert not inbox._round.arrived
    assert not inbox._round.seen


async def test_ended_round_takes_no_more_and_frees_what_it_had() -> None:
    inbox = inbox_in_round()
    await inbox.take(received(slice_header()))
    inbox.end_round((COMMITTED + 1, 0, 1))
    assert not inbox._round.arrived
    assert not await inbox.take(received(slice_header()))
    with pytest.raises(WrongStepError, match="cancelled"):
        await inbox.take(received(slice_header(direction=TOTAL, index=1)))


async def test_ending_an_older_round_does_not_touch_the_open_one() -> None:
    inbox = inbox_in_round(round=2)
    await inbox.take(received(slice_header(round=2)))
    inbox.end_round((COMMITTED + 1, 0, 1))
    assert (await inbox.get((PARTIAL, 0, inc(2)))).tolist() == [0, 0, 0]


async def test_flood_of_slices_takes_no_memory_and_nobodys_room() -> None:
    inbox = inbox_in_round(round=1)
    flood = [
        asyncio.create_task(inbox.take(received(slice_header(sender=2, round=r))))
        for r in range(3, 60)
    ]
    await turns(5)
    assert not inbox._round.arrived
    inbox.open_round((COMMITTED + 1, 0, 2), {(PARTIAL, 0, inc(7)): 3})
    assert await inbox.take(received(slice_header(sender=7, round=2)))
    inbox.close()
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert {type(result) for result in results} == {WrongLeaseError}
