# SPDX-License-Identifier: Apache-2.0
"""Boundary tensors: what the plan admits, what is parked, and when it is handed over."""

from collections.abc import Callable

import pytest
import torch

from shoal.compression.codec import CodecContext
from shoal.compression.registry import parse_boundary
from shoal.node.inbox import BoundaryInbox, BoundaryTensor
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import (
    CodecError,
    FencedError,
    ImpossibleLeaseError,
    ImpossibleStepError,
    MalformedFrameError,
    NonFiniteError,
    OversizedStreamError,
    ProtocolError,
    UnknownPeerError,
    WrongCodecError,
    WrongLeaseError,
    WrongRunError,
    WrongShapeError,
    WrongStepError,
)
from shoal.protocol.ids import Incarnation, MicrobatchId, PeerId, RunId
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.spec import DataManifest, ResolvedRun, RunSpec
from shoal.protocol.wire import ReceivedTensor

UP, HERE, DOWN, UP_TOO = (PeerId(c * 26) for c in "uhdv")
COMMITTED = 4
SHAPE = (2, 3, 8)
BOUNDARY = parse_boundary("fwd=bf16;bwd=fp32")


def resolved_run() -> ResolvedRun:
    spec = RunSpec.model_validate(
        {
            "model": {
                "dim": 8, "num_heads": 2, "num_layers": 3, "seq_len": 3, "vocab_size": 256
            },
            "batch": {"microbatches": 4, "microbatch_size": 2},
            "validation": {"every": 2, "microbatches": 2},
            "pipeline": {"stages": 3, "cuts": [1, 2]},
        }
    )  # fmt: skip
    data = DataManifest(vocab_size=256, token_bytes=2, train=(), validation=(), tokenizer_sha256="")
    return ResolvedRun(run_id=RunId("tiny-0a1b2c3d"), spec=spec, data=data)


def member(incarnation: int, peer_id: PeerId, stage: int) -> types_pb2.Member:
    return types_pb2.Member(incarnation=incarnation, peer_id=peer_id, stage=stage)


MEMBERS = [member(1, UP, 0), member(2, HERE, 1), member(3, DOWN, 2), member(4, UP_TOO, 0)]


@pytest.fixture
async def swarm() -> SwarmView:
    view = SwarmView()
    await view.update(coordinator_pb2.Plan(epoch=1, members=MEMBERS, fenced=[9]))
    return view


@pytest.fixture
def inbox(swarm: SwarmView) -> BoundaryInbox:
    """Of a node at stage 1 of 3."""
    run = resolved_run()
    return BoundaryInbox(run, run.stage(1), BOUNDARY, swarm, torch.device("cpu"), COMMITTED)


def header(**changes: object) -> types_pb2.TensorHeader:
    """A forward tensor from incarnation 1 for the next step, with changes to its key or itself."""
    made = types_pb2.TensorHeader(
        key=types_pb2.TensorKey(
            run_id="tiny-0a1b2c3d",
            step=COMMITTED + 1,
            attempt=0,
            microbatch=0,
            stage=1,
            direction=types_pb2.DIRECTION_FORWARD,
            incarnation=1,
        ),
        codec="bf16",
        dtype=types_pb2.DTYPE_FLOAT32,
        shape=SHAPE,
    )
    for name, value in changes.items():
        if name == "shape":
            del made.shape[:]
            made.shape.extend(value)  # type: ignore[arg-type]  # a test's tuple
        else:
            setattr(made.key if hasattr(made.key, name) else made, name, value)
    return made


def tensor(step: int = COMMITTED + 1, attempt: int = 0, microbatch: int = 0, sender: int = 1,
           value: float = 0.0) -> BoundaryTensor:  # fmt: skip
    return BoundaryTensor(
        step=step,
        attempt=attempt,
        leg="forward",
        microbatch=MicrobatchId(microbatch),
        sender=Incarnation(sender),
        tensor=torch.full(SHAPE, value),
    )


class OpenStep:
    """Takes tensors for its leases, as a step does."""

    def __init__(self, *leased: int) -> None:
        self.leased = set(leased)
        self.got: list[tuple[int, int, int]] = []

    def __call__(self, received: BoundaryTensor) -> bool:
        if received.microbatch not in self.leased:
            raise WrongLeaseError("not here")
        what = (received.step, received.attempt, received.microbatch)
        fresh = what not in self.got
        self.got.append(what)
        return fresh


# ---- admission ---------------------------------------------------------------------------


def test_tensors_of_both_neighbours_are_admitted_with_their_exact_length(
    inbox: BoundaryInbox,
) -> None:
    numel = 2 * 3 * 8
    assert inbox.admit(header(), UP) == 2 * numel
    backward = header(direction=types_pb2.DIRECTION_BACKWARD, incarnation=3, codec="fp32")
    assert inbox.admit(backward, DOWN) == 4 * numel
    assert inbox.admit(header(microbatch=5), UP) == 2 * numel  # the last of validation


def test_length_that_depends_on_the_data_is_admitted_up_to_the_codecs_bound(
    swarm: SwarmView,
) -> None:
    run, boundary = resolved_run(), parse_boundary("int8|zstd:3")
    inbox = BoundaryInbox(run, run.stage(1), boundary, swarm, torch.device("cpu"), COMMITTED)
    codec, values = boundary.forward, torch.randn(SHAPE)
    context = CodecContext(run_seed=0, step=5, microbatch=0, boundary=0, leg="forward")
    payload, most = codec.encode(values, context), codec.max_encoded_bytes(SHAPE)
    sent = header(codec=codec.spec, payload_bytes=len(payload))
    assert inbox.admit(sent, UP) == len(payload)
    decoded = inbox.decode(ReceivedTensor(sent, payload)).tensor
    assert torch.equal(decoded, codec.decode(payload, SHAPE, context))
    assert inbox.admit(header(codec=codec.spec, payload_bytes=most), UP) == most
    for length in (0, most + 1, 2**63):
        with pytest.raises(OversizedStreamError, match=f"1 to {most}"):
            inbox.admit(header(codec=codec.spec, payload_bytes=length), UP)


@pytest.mark.parametrize(
    ("changes", "sender", "error"),
    [
        ({"run_id": "other-0a1b2c3d"}, UP, WrongRunError),
        ({"run_id": ""}, UP, WrongRunError),
        ({"direction": 0}, UP, MalformedFrameError),
        ({"direction": 3}, UP, MalformedFrameError),
        ({"incarnation": 9}, UP, FencedError),
        ({"incarnation": 77}, UP, FencedError),
        ({"incarnation": 0}, UP, FencedError),
        ({}, UP_TOO, UnknownPeerError),
        ({"incarnation": 3}, DOWN, ImpossibleLeaseError),  # stage 2 sends no activations here
        ({"incarnation": 2}, HERE, ImpossibleLeaseError),
        ({"direction": 2}, UP, ImpossibleLeaseError),  # nor stage 0 gradients
        ({"stage": 2}, UP, ImpossibleLeaseError),
        ({"step": COMMITTED}, UP, WrongStepError),
        ({"step": COMMITTED + 2}, UP, ImpossibleStepError),
        ({"step": 0}, UP, WrongStepError),
        ({"step": 2**64 - 1}, UP, ImpossibleStepError),
        ({"microbatch": 6}, UP, ImpossibleLeaseError),
        ({"codec": "fp32"}, UP, WrongCodecError),
        ({"codec": "x" * 4000}, UP, WrongCodecError),
        ({"codec_version": 1}, UP, WrongCodecError),
        ({"shape": (2, 3, 9)}, UP, WrongShapeError),
        ({"shape": (6, 8)}, UP, WrongShapeError),
        ({"shape": ()}, UP, WrongShapeError),
        ({"shape": (2**32 - 1,) * 3}, UP, WrongShapeError),
        ({"dtype": types_pb2.DTYPE_BFLOAT16}, UP, WrongShapeError),
        ({"dtype": 0}, UP, WrongShapeError),
    ],
)
def test_whatever_the_plan_does_not_allow_is_refused_by_name(
    inbox: BoundaryInbox, changes: dict[str, object], sender: PeerId, error: type[ProtocolError]
) -> None:
    with pytest.raises(ProtocolError) as caught:
        inbox.admit(header(**changes), sender)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 300


# ---- decoding ----------------------------------------------------------------------------


def encoded(values: torch.Tensor) -> memoryview:
    context = CodecContext(run_seed=0, step=5, microbatch=0, boundary=0, leg="forward")
    return BOUNDARY.forward.encode(values, context)


def test_decoded_tensor_is_what_was_sent(inbox: BoundaryInbox) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    got = inbox.decode(ReceivedTensor(header(microbatch=3, attempt=2), encoded(values)))
    assert torch.equal(got.tensor, values)
    assert (got.step, got.attempt, got.microbatch, got.sender) == (5, 2, 3, 1)
    assert got.leg == "forward"


def test_nan_is_refused(inbox: BoundaryInbox) -> None:
    nan = b"\xc0\x7f" * (2 * 3 * 8)
    with pytest.raises(NonFiniteError):
        inbox.decode(ReceivedTensor(header(), nan))


def test_payload_of_another_length_is_refused(inbox: BoundaryInbox) -> None:
    with pytest.raises(CodecError):
        inbox.decode(ReceivedTensor(header(), b"\0\0"))


# ---- delivery ----------------------------------------------------------------------------


def test_leased_tensor_is_delivered_and_its_duplicate_is_not_new(inbox: BoundaryInbox) -> None:
    step = OpenStep(0)
    inbox.open_step(5, 0, step)
    assert inbox.accept(tensor())
    assert not inbox.accept(tensor())
    assert step.got == [(5, 0, 0)] * 2


def test_tensor_that_comes_before_its_step_waits_for_it(inbox: BoundaryInbox) -> None:
    step = OpenStep(0)
    assert inbox.accept(tensor())
    assert not inbox.accept(tensor())
    inbox.open_step(5, 0, step)
    assert step.got == [(5, 0, 0)]
    inbox.leases_changed()
    assert step.got == [(5, 0, 0)]


def test_tensor_that_comes_before_its_lease_waits_for_it(inbox: BoundaryInbox) -> None:
    step = OpenStep()
    inbox.open_step(5, 0, step)
    assert inbox.accept(tensor(microbatch=2))
    step.leased.add(2)
    inbox.leases_changed()
    assert step.got == [(5, 0, 2)]


def test_tensor_of_a_later_try_waits_while_the_current_one_goes_on(inbox: BoundaryInbox) -> None:
    first, second, third = OpenStep(0), OpenStep(0), OpenStep(0)
    inbox.open_step(5, 0, first)
    inbox.accept(tensor(attempt=1))
    assert first.got == []
    inbox.open_step(5, 1, second)
    assert second.got == [(5, 1, 0)]
    inbox.accept(tensor(step=6))
    inbox.suspend()
    inbox.close_step(5)
    inbox.open_step(6, 0, third)
    assert third.got == [(6, 0, 0)]
    assert first.got == []


@pytest.mark.parametrize(
    ("late", "move_on"),
    [
        (tensor(5, 0), lambda inbox: inbox.open_step(5, 1, OpenStep(0))),
        (tensor(5, 0), lambda inbox: inbox.suspend()),
        (tensor(5, 0), lambda inbox: inbox.close_step(5)),
        (tensor(5, 7), lambda inbox: inbox.close_step(5)),
        (tensor(4, 9), lambda inbox: None),
        (tensor(7, 0), lambda inbox: None),
    ],
)
def test_tensor_that_came_too_late_or_far_too_early_is_refused(
    inbox: BoundaryInbox, late: BoundaryTensor, move_on: Callable[[BoundaryInbox], None]
) -> None:
    inbox.open_step(5, 0, OpenStep())
    move_on(inbox)
    with pytest.raises(WrongStepError):
        inbox.accept(late)
    with pytest.raises(WrongStepError):
        inbox.admit(header(step=late.step, attempt=late.attempt), UP)


def test_nothing_is_delivered_between_a_tries_end_and_the_next_opening(
    inbox: BoundaryInbox,
) -> None:
    over, again = OpenStep(0), OpenStep(0)
    inbox.open_step(5, 0, over)
    inbox.suspend()
    inbox.suspend()  # also when there is nothing to suspend
    assert inbox.accept(tensor(attempt=1))
    assert over.got == []
    inbox.open_step(5, 1, again)
    assert again.got == [(5, 1, 0)]


async def test_sender_that_left_while_its_tensor_was_decoded_is_refused(
    inbox: BoundaryInbox, swarm: SwarmView
) -> None:
    inbox.open_step(5, 0, OpenStep(0))
    await swarm.update(coordinator_pb2.Plan(epoch=2, members=MEMBERS[1:], fenced=[1]))
    with pytest.raises(FencedError):
        inbox.accept(tensor(sender=1))


async def test_parked_tensors_of_a_sender_that_left_are_forgotten(
    inbox: BoundaryInbox, swarm: SwarmView
) -> None:
    step = OpenStep()
    inbox.open_step(5, 0, step)
    inbox.accept(tensor(sender=1))
    inbox.accept(tensor(sender=4, microbatch=1))
    await swarm.update(coordinator_pb2.Plan(epoch=2, members=MEMBERS[1:], fenced=[1]))
    step.leased |= {0, 1}
    inbox.leases_changed()
    assert step.got == [(5, 0, 1)]
    assert not inbox._parked


# ---- bounds ------------------------------------------------------------------------------


def test_each_sender_has_room_for_its_newest_tensor_per_microbatch(inbox: BoundaryInbox) -> None:
    for attempt in range(50):
        for microbatch in range(6):
            assert inbox.accept(tensor(attempt=attempt, microbatch=microbatch))
    assert len(inbox._parked) == 6
    with pytest.raises(WrongStepError, match="already"):
        inbox.accept(tensor(attempt=48))


def test_flood_of_one_sender_does_not_take_anothers_room(inbox: BoundaryInbox) -> None:
    for attempt in range(50):
        for microbatch in range(6):
            inbox.accept(tensor(attempt=attempt + 1, microbatch=microbatch, sender=4))
    step = OpenStep(*range(6))
    assert all(inbox.accept(tensor(microbatch=i, sender=1)) for i in range(6))
    inbox.open_step(5, 0, step)
    assert step.got == [(5, 0, i) for i in range(6)]


def test_commit_frees_what_was_parked_for_the_step(inbox: BoundaryInbox) -> None:
    inbox.open_step(5, 0, OpenStep())
    for microbatch in range(6):
        inbox.accept(tensor(microbatch=microbatch))
    inbox.accept(tensor(step=6, microbatch=0, sender=4))
    inbox.suspend()
    assert len(inbox._parked) == 1
    inbox.close_step(5)
    assert len(inbox._parked) == 1
    inbox.close_step(6)
    assert not inbox._parked
