# SPDX-License-Identifier: Apache-2.0
"""What peers may send: every header is held against the plan before a byte is allocated.

Commands of the coordinator reach nodes at slightly different times, so a tensor may arrive before
the step or lease that it belongs to. Such tensors are parked and handed over when the command
arrives. Each sender has room for one tensor per microbatch, its newest, so that nobody can fill
the memory, or take the room that another one's tensors need.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.compression.codec import CodecContext, Leg, WireCodec
from shoal.compression.registry import Boundary
from shoal.node.swarm_view import SwarmView
from shoal.protocol.costs import boundary_shape
from shoal.protocol.errors import (
    FencedError,
    ImpossibleLeaseError,
    ImpossibleStepError,
    MalformedFrameError,
    WrongCodecError,
    WrongLeaseError,
    WrongRunError,
    WrongShapeError,
    WrongStepError,
)
from shoal.protocol.ids import Incarnation, MicrobatchId, PeerId
from shoal.protocol.proto import types_pb2
from shoal.protocol.spec import ResolvedRun, StageSpec
from shoal.protocol.wire import ReceivedTensor

_LEGS: dict[int, Leg] = {
    types_pb2.DIRECTION_FORWARD: "forward",
    types_pb2.DIRECTION_BACKWARD: "backward",
}


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """A decoded boundary tensor and what it is for."""

    step: int
    attempt: int
    leg: Leg
    microbatch: MicrobatchId
    sender: Incarnation
    tensor: torch.Tensor


Deliver = Callable[[BoundaryTensor], bool]
"""Hands a tensor to the open step; False for a duplicate, `WrongLeaseError` when it doesn't fit."""


class BoundaryInbox:
    """Boundary tensors for one assignment (stage, incarnation)."""

    def __init__(
        self,
        run: ResolvedRun,
        stage: StageSpec,
        boundary: Boundary,
        swarm: SwarmView,
        device: torch.device,
        committed_step: int,
    ) -> None:
        self._run = run
        self._stage = stage
        self._boundary = boundary
        self._swarm = swarm
        self._device = device
        self._shape = boundary_shape(run.spec)
        validation = run.spec.validation.microbatches if run.spec.validation.every else 0
        self._max_microbatches = run.spec.batch.microbatches + validation
        self._step = committed_step
        self._attempt = 0
        self._oldest = (committed_step + 1, 0)  # the first (step, attempt) that isn't over
        self._deliver: Deliver | None = None
        self._parked: dict[tuple[Incarnation, MicrobatchId], BoundaryTensor] = {}

    def _codec(self, leg: Leg) -> WireCodec:
        return self._boundary.forward if leg == "forward" else self._boundary.backward

    def admit(self, header: types_pb2.TensorHeader, sender: PeerId) -> int:
        """The payload length to expect: the plan's, or what the sender announces where the codec's
        length depends on the data and the plan allows it. Raises a `ProtocolError` for anything
        else."""
        key = header.key
        if key.run_id != self._run.run_id:
            raise WrongRunError(f"tensor of run {key.run_id[:64]!r}; this is {self._run.run_id!r}")
        leg = _LEGS.get(key.direction)
        if leg is None:
            raise MalformedFrameError(f"direction {key.direction} is not a boundary's")
        member = self._swarm.check(Incarnation(key.incarnation), sender)
        if member.stage != key.stage + (-1 if leg == "forward" else 1):
            raise ImpossibleLeaseError(
                f"{leg} tensor from stage {member.stage} for stage {key.stage}; they are no "
                "neighbours that way"
            )
        if key.stage != self._stage.stage:
            raise WrongLeaseError(
                f"{leg} tensor for stage {key.stage}; this is stage {self._stage.stage}"
            )
        self._check_not_over(key.step, key.attempt)
        if key.microbatch >= self._max_microbatches:
            raise ImpossibleLeaseError(
                f"microbatch {key.microbatch}; steps of this run have {self._max_microbatches}"
            )
        codec = self._codec(leg)
        if header.codec != codec.spec or header.codec_version != codec.version:
            raise WrongCodecError(
                f"codec {header.codec[:64]!r} version {header.codec_version}; the run's is "
                f"{codec.spec!r} version {codec.version}"
            )
        if tuple(header.shape) != self._shape or header.dtype != types_pb2.DTYPE_FLOAT32:
            raise WrongShapeError(
                f"boundary tensor of shape {list(header.shape)[:8]} and dtype {header.dtype}; "
                f"the plan's is {list(self._shape)}, float32"
            )
        return codec.admitted_bytes(self._shape, header.payload_bytes)

    def decode(self, received: ReceivedTensor) -> BoundaryTensor:
        """Raises `CodecError` or `NonFiniteError`. May run in any thread."""
        key = received.header.key
        leg = _LEGS[key.direction]
        sender_boundary = self._stage.stage - 1 if leg == "forward" else self._stage.stage
        context = CodecContext(
            run_seed=self._run.spec.seed,
            step=key.step,
            microbatch=key.microbatch,
            boundary=sender_boundary,
            leg=leg,
        )
        tensor = self._codec(leg).decode(
            received.payload, self._shape, context, device=self._device
        )
        return BoundaryTensor(
            step=key.step,
            attempt=key.attempt,
            leg=leg,
            microbatch=MicrobatchId(key.microbatch),
            sender=Incarnation(key.incarnation),
            tensor=tensor,
        )

    def accept(self, tensor: BoundaryTensor) -> bool:
        """Deliver or park; False for a duplicate.

        Raises `WrongStepError` when it came too late, `FencedError` when its sender left the plan
        while it was decoded.
        """
        self._check_not_over(tensor.step, tensor.attempt)
        if self._swarm.member(tensor.sender) is None:
            raise FencedError(f"incarnation {tensor.sender} left the plan")
        if self._deliver is not None and _try_of(tensor) == (self._step, self._attempt):
            try:
                return self._deliver(tensor)
            except WrongLeaseError:
                pass  # the lease may be on its way here
        key = (tensor.sender, tensor.microbatch)
        parked = self._parked.get(key)
        if parked is not None and _try_of(parked) > _try_of(tensor):
            raise WrongStepError(
                f"tensor of step {tensor.step}, attempt {tensor.attempt}; its sender is at step "
                f"{parked.step}, attempt {parked.attempt} already"
            )
        self._parked[key] = tensor
        return parked is None or _try_of(parked) < _try_of(tensor)

    def _check_not_over(self, step: int, attempt: int) -> None:
        where = (
            f"tensor of step {step}, attempt {attempt}; this node is at step {self._step}, "
            f"attempt {self._attempt}"
        )
        if (step, attempt) < self._oldest:
            raise WrongStepError(where)
        if step > self._step + 1:  # a step opens once everybody has applied the one before
            raise ImpossibleStepError(where)

    # ---- the node's own progress ---------------------------------------------------------

    def open_step(self, step: int, attempt: int, deliver: Deliver) -> None:
        """From now on tensors of this try go to `deliver`; earlier tries are over."""
        self._step, self._attempt, self._deliver = step, attempt, deliver
        self._forget_before((step, attempt))
        self.leases_changed()

    def suspend(self) -> None:
        """The open try ends here, committed or to be opened anew: nothing of it is taken any more.
        What comes for later ones is parked."""
        if self._deliver is not None:
            self._deliver = None
            self._forget_before((self._step, self._attempt + 1))

    def close_step(self, step: int) -> None:
        """`step` is committed: whatever still comes for it is late."""
        self._step, self._attempt, self._deliver = step, 0, None
        self._forget_before((step + 1, 0))

    def leases_changed(self) -> None:
        """Hand over what was parked for leases that have come since; forget what came from senders
        that have left the plan."""
        for key, tensor in list(self._parked.items()):
            if self._swarm.member(tensor.sender) is None:
                del self._parked[key]
            elif self._deliver is not None and _try_of(tensor) == (self._step, self._attempt):
                try:
                    self._deliver(tensor)
                except WrongLeaseError:
                    continue
                del self._parked[key]

    def _forget_before(self, oldest: tuple[int, int]) -> None:
        self._oldest = oldest
        self._parked = {k: v for k, v in self._parked.items() if _try_of(v) >= oldest}


def _try_of(tensor: BoundaryTensor) -> tuple[int, int]:
    return tensor.step, tensor.attempt
