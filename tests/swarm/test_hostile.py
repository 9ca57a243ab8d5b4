# SPDX-License-Identifier: Apache-2.0
"""A member of the swarm sends what it should not. It is refused by name, and harms nobody.

The member is real: the test joins with one node's identity and speaks for its incarnation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import pytest
import torch

from shoal.compression.codec import CodecContext, WireCodec
from shoal.compression.registry import parse_boundary
from shoal.coordinator.dashboard.views import NodeView
from shoal.node.admission import Membership, join
from shoal.node.links import INCARNATION_METADATA
from shoal.protocol.errors import (
    ChecksumError,
    FencedError,
    ImpossibleLeaseError,
    ImpossibleStepError,
    MalformedFrameError,
    NonFiniteError,
    OversizedStreamError,
    ShoalError,
    TruncatedStreamError,
    UnknownPeerError,
    WrongCodecError,
    WrongRunError,
    WrongShapeError,
    WrongStepError,
    error_class,
)
from shoal.protocol.identity import NodeIdentity
from shoal.protocol.ids import PeerId
from shoal.protocol.join_link import JoinLink
from shoal.protocol.proto import peer_pb2, types_pb2
from shoal.protocol.rpc import error_from_rpc
from shoal.protocol.wire import checksum, encode_frame, frames, open_tensor_stream

from .harness import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


async def _nowhere() -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Hostile:
    """A client with a stage-0 member's identity, and a stage-1 node to be hurt."""

    membership: Membership
    me: NodeView
    victim: NodeView
    step: int

    @classmethod
    async def of(cls, swarm: Swarm) -> "Hostile":
        link = JoinLink.parse((swarm.folder / "link").read_text(encoding="utf-8").strip())
        view = await swarm.view()
        me, victim = view.stages[0].nodes[0], view.stages[1].nodes[0]
        process = swarm.process_of(me)
        membership = await join(link, NodeIdentity.load_or_create(process.folder), _nowhere)
        return cls(membership, me, victim, view.step + 1)

    @property
    def codec(self) -> WireCodec:
        return parse_boundary(self.membership.run.spec.pipeline.boundary).forward

    @property
    def shape(self) -> tuple[int, int, int]:
        spec = self.membership.run.spec
        return spec.batch.microbatch_size, spec.model.seq_len, spec.model.dim

    def good(self) -> tuple[types_pb2.TensorHeader, bytes]:
        """A forward tensor that the victim would take."""
        context = CodecContext(run_seed=0, step=self.step, microbatch=0, boundary=0, leg="forward")
        payload = bytes(self.codec.encode(torch.ones(self.shape), context))
        header = types_pb2.TensorHeader(
            key=types_pb2.TensorKey(
                run_id=self.membership.run.run_id,
                step=self.step,
                attempt=1,
                microbatch=0,
                stage=1,
                direction=types_pb2.DIRECTION_FORWARD,
                incarnation=self.me.incarnation,
            ),
            codec=self.codec.spec,
            codec_version=self.codec.version,
            dtype=types_pb2.DTYPE_FLOAT32,
            shape=self.shape,
            payload_bytes=len(payload),
            checksum=checksum(payload),
            sequence=1,
        )
        return header, payload

    async def send(self, messages: Sequence[bytes], method: str = "Push") -> type[ShoalError]:
        """The class of error that the victim answers with."""
        channel = self.membership.credentials.channel(
            self.victim.address, PeerId(self.victim.peer_id)
        )
        async with channel:
            metadata = ((INCARNATION_METADATA, str(self.me.incarnation)),)
            call = open_tensor_stream(channel, method, metadata)
            try:
                for message in messages:
                    await call.write(message)
                await call.done_writing()
                acks = [ack async for ack in call]
            except grpc.aio.AioRpcError as error:
                return type(error_from_rpc(error))
        assert [ack.status for ack in acks] == [peer_pb2.PUSH_STATUS_REFUSED], "it was taken"
        return error_class(acks[0].error)


Spoil = Callable[[types_pb2.TensorHeader, bytes], list[bytes]]


def whole(change: Callable[[types_pb2.TensorHeader], None]) -> Spoil:
    """A complete tensor whose header is changed."""

    def spoil(header: types_pb2.TensorHeader, payload: bytes) -> list[bytes]:
        change(header)
        return list(frames(header, payload))

    return spoil


def nan(header: types_pb2.TensorHeader, payload: bytes) -> list[bytes]:
    poisoned = torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).clone()
    poisoned[5] = math.nan
    spoilt = bytes(poisoned.view(torch.uint8).numpy())
    header.checksum = checksum(spoilt)
    return list(frames(header, spoilt))


def half(header: types_pb2.TensorHeader, payload: bytes) -> list[bytes]:
    return [encode_frame(header, payload[: len(payload) // 2])]


def longer_than_planned(header: types_pb2.TensorHeader, payload: bytes) -> list[bytes]:
    header.payload_bytes = 2 * len(payload)
    return [encode_frame(header, payload), encode_frame(None, payload)]


def longer_than_announced(header: types_pb2.TensorHeader, payload: bytes) -> list[bytes]:
    return [encode_frame(header, payload[:-2]), encode_frame(None, payload)]


def no_header(header: types_pb2.TensorHeader, payload: bytes) -> list[bytes]:
    return [encode_frame(None, payload)]


def no_frame(header: types_pb2.TensorHeader, payload: bytes) -> list[bytes]:
    return [b"\xff" * 64]


def _set(**values: object) -> Callable[[types_pb2.TensorHeader], None]:
    def change(header: types_pb2.TensorHeader) -> None:
        for name, value in values.items():
            target = header.key if name in types_pb2.TensorKey.DESCRIPTOR.fields_by_name else header
            setattr(target, name, value)

    return change


def _reshape(header: types_pb2.TensorHeader) -> None:
    header.shape[1] *= 2


def _far_ahead(header: types_pb2.TensorHeader) -> None:
    header.key.step += 1000


FAULTS: dict[str, tuple[Spoil, type[ShoalError]]] = {
    "NaN": (nan, NonFiniteError),
    "wrong shape": (whole(_reshape), WrongShapeError),
    "wrong dtype": (whole(_set(dtype=types_pb2.DTYPE_INT64)), WrongShapeError),
    "truncated": (half, TruncatedStreamError),
    "longer than the plan": (longer_than_planned, OversizedStreamError),
    "longer than announced": (longer_than_announced, OversizedStreamError),
    "bad checksum": (whole(_set(checksum=bytes(16))), ChecksumError),
    "wrong run": (whole(_set(run_id="another-00000000")), WrongRunError),
    "wrong codec": (whole(_set(codec="fp32")), WrongCodecError),
    "bytes before a header": (no_header, MalformedFrameError),
    "no frame at all": (no_frame, MalformedFrameError),
    "a reduction's direction": (
        whole(_set(direction=types_pb2.DIRECTION_REDUCE_TOTAL)), MalformedFrameError
    ),
    "wrong step": (whole(_far_ahead), ImpossibleStepError),
    "wrong stage": (whole(_set(stage=0)), ImpossibleLeaseError),
    "no such microbatch": (whole(_set(microbatch=10**6)), ImpossibleLeaseError),
}  # fmt: skip
"""Each costs its sender a mark."""

LATE: dict[str, tuple[Spoil, type[ShoalError]]] = {
    "a step that is over": (whole(_set(step=0)), WrongStepError),
    "no such incarnation": (whole(_set(incarnation=10**9)), FencedError),
}
"""Refused, yet no fault: honest nodes do so when a command reaches them late."""


async def marks(swarm: Swarm, node: NodeView) -> int:
    return next(n.marks for n in (await swarm.view()).nodes if n.peer_id == node.peer_id)


async def test_bad_tensors_are_refused_by_name_and_marked_and_harm_nobody(shared: Swarm) -> None:
    # The run is paused, so that the step to lie about stands still.
    hostile = await Hostile.of(shared)
    before = await marks(shared, hostile.me)

    for name, (spoil, expected) in {**LATE, **FAULTS}.items():
        answer = await hostile.send(spoil(*hostile.good()))
        assert answer is expected, name
    other = next(
        n for n in (await shared.view()).nodes if n.stage == 0 and n.peer_id != hostile.me.peer_id
    )
    in_anothers_name = whole(_set(incarnation=other.incarnation))
    assert await hostile.send(in_anothers_name(*hostile.good())) is UnknownPeerError
    assert await hostile.send(in_anothers_name(*hostile.good()), "Reduce") is UnknownPeerError

    expected_marks = before + len(FAULTS) + 2
    await shared.see(
        lambda v: any(
            n.peer_id == hostile.me.peer_id and n.marks == expected_marks for n in v.nodes
        ),
        f"{expected_marks} marks",
    )
    await shared.resume()
    await shared.advance()
    await shared.pause()
    shared.check_exact(finished=False)
    assert await marks(shared, hostile.victim) == 0
    assert await marks(shared, hostile.me) == expected_marks


async def test_bad_tensors_between_good_ones_of_an_open_step_change_no_bit(shared: Swarm) -> None:
    await shared.resume()
    for spoil, expected in FAULTS.values():
        hostile = await Hostile.of(shared)
        answer = await hostile.send(spoil(*hostile.good()))
        # The step may have moved on meanwhile.
        assert issubclass(answer, expected | WrongStepError)
    await shared.advance()
    await shared.pause()
    shared.check_exact(finished=False)
