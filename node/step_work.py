# SPDX-License-Identifier: Apache-2.0
"""A node's share of one step: events in, instructions out. Pure; no clock, no I/O, no tensors.

Tensors and payloads are opaque here. Encoded payloads are kept until the step is over, since a
neighbour may die at any moment and its replacement needs them again.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from shoal.protocol.errors import WrongLeaseError
from shoal.protocol.ids import NOBODY, Incarnation, MicrobatchId
from shoal.protocol.schedule import Task, next_task

P = TypeVar("P")
"""An encoded boundary tensor, as it is kept for neighbours."""

T = TypeVar("T")
"""A decoded boundary tensor, as it is consumed here."""


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    microbatch: MicrobatchId
    upstream: Incarnation
    downstream: Incarnation
    downstream_done: bool = False
    upstream_done: bool = False


@dataclass(frozen=True, slots=True)
class Push(Generic[P]):
    """Send a boundary tensor to a neighbour."""

    to: Incarnation
    direction: Literal["forward", "backward"]
    microbatch: MicrobatchId
    payload: P


@dataclass(slots=True)
class _Slot(Generic[P, T]):
    lease: LeaseFacts
    input: T | None = None  # what upstream sent; None at stage 0 and once it was used
    output_gradient: T | None = None  # what downstream sent
    forward_done: bool = False
    backward_done: bool = False
    output: P | None = None  # kept for downstream
    input_gradient: P | None = None  # kept for upstream
    received: set[str] = field(default_factory=set)


class StepWork(Generic[P, T]):
    """Leases, their progress, and what to do next."""

    def __init__(
        self, *, stage: int, num_stages: int, num_microbatches: int, window: int, credits: int
    ) -> None:
        """`window` bounds microbatches in flight here, `credits` those of them at one downstream
        replica."""
        self._first = stage == 0
        self._last = stage == num_stages - 1
        self._num_microbatches = num_microbatches
        self._window = window
        self._credits = credits
        self._slots: dict[MicrobatchId, _Slot[P, T]] = {}
        self._released: dict[MicrobatchId, _Slot[P, T]] = {}
        self._running: MicrobatchId | None = None

    def is_validation(self, microbatch: int) -> bool:
        return microbatch >= self._num_microbatches

    @property
    def leased(self) -> set[MicrobatchId]:
        return set(self._slots)

    def update_leases(self, leases: Iterable[LeaseFacts]) -> list[Push[P]]:
        """Take new leases and new neighbours; returns what new neighbours must get again."""
        pushes: list[Push[P]] = []
        for lease in leases:
            slot = self._slots.get(lease.microbatch)
            if slot is None:
                slot = self._released.pop(lease.microbatch, None)
                self._slots[lease.microbatch] = slot or _Slot(lease)
            if slot is None:
                continue
            before, slot.lease = slot.lease, lease
            if lease.downstream != before.downstream:
                pushes += self._push_output(slot)
            if lease.upstream != before.upstream:
                pushes += self._push_input_gradient(slot)
        return pushes

    @property
    def running(self) -> MicrobatchId | None:
        """What is computed now."""
        return self._running

    def release(self, only: MicrobatchId | None = None) -> list[MicrobatchId]:
        """Give leases back, all or one: those that are not in the sums and not being computed.
        Returns them. What has arrived for them is kept, in case they come back.
        """
        given = [
            microbatch
            for microbatch, slot in self._slots.items()
            if only in (None, microbatch)
            and microbatch != self._running
            and not slot.backward_done
            and not (slot.forward_done and self.is_validation(microbatch))
        ]
        for microbatch in given:
            self._released[microbatch] = self._slots.pop(microbatch)
        return given

    def receive(
        self,
        direction: Literal["forward", "backward"],
        microbatch: MicrobatchId,
        sender: Incarnation,
        tensor: T,
    ) -> bool:
        """Take a neighbour's tensor; False for a duplicate.

        Raises `WrongLeaseError` when the microbatch isn't leased here or the sender isn't its
        neighbour.
        """
        slot = self._slots.get(microbatch)
        expected = None
        if slot is not None:
            lease = slot.lease
            expected = lease.upstream if direction == "forward" else lease.downstream
        if slot is None or sender != expected:
            raise WrongLeaseError(
                f"{direction} of microbatch {microbatch} from incarnation {sender}: "
                + ("not leased here" if slot is None else f"its neighbour is {expected}")
            )
        if direction in slot.received:
            return False
        slot.received.add(direction)
        if direction == "forward":
            slot.input = tensor
        else:
            slot.output_gradient = tensor
        return True

    def next_task(self) -> Task | None:
        """What to compute now; None when input or credit is missing, the window is full, or a
        task runs. It runs from now on."""
        task = self._choose()
        if task is not None:
            self._running = task.microbatch
        return task

    def _choose(self) -> Task | None:
        if self._running is not None:
            return None
        backwards, in_flight = [], []
        outstanding: Counter[Incarnation] = Counter()
        for microbatch, slot in self._slots.items():
            if not slot.forward_done or slot.backward_done or self.is_validation(microbatch):
                continue
            in_flight.append(microbatch)
            if slot.output_gradient is not None:
                backwards.append(microbatch)
            elif not slot.lease.downstream_done:
                outstanding[slot.lease.downstream] += 1
        forwards = [
            microbatch
            for microbatch, slot in self._slots.items()
            if self._is_ready(slot)
            and (self._last or outstanding[slot.lease.downstream] < self._credits)
        ]
        return next_task(
            forwards=forwards, backwards=backwards, in_flight=in_flight, window=self._window
        )

    def _is_ready(self, slot: _Slot[P, T]) -> bool:
        """Its forward has its input and is still to be computed."""
        return not slot.forward_done and (self._first or slot.input is not None)

    def input_of(self, task: Task) -> T | None:
        """The tensor that the task consumes; None for a forward at stage 0."""
        slot = self._slots[task.microbatch]
        return slot.input if task.kind == "forward" else slot.output_gradient

    def forward_done(self, microbatch: MicrobatchId, output: P) -> list[Push[P]]:
        """Not for the last stage, whose forward and backward are one task."""
        slot = self._finish(microbatch)
        slot.forward_done = True
        slot.output = output
        slot.input = None
        return [] if slot.lease.downstream_done else self._push_output(slot)

    def backward_done(self, microbatch: MicrobatchId, input_gradient: P | None) -> list[Push[P]]:
        """The gradient is in the accumulator (or, for validation, the loss is known)."""
        slot = self._finish(microbatch)
        slot.forward_done = slot.backward_done = True
        slot.input = slot.output_gradient = None
        slot.input_gradient = input_gradient
        return [] if slot.lease.upstream_done else self._push_input_gradient(slot)

    def give_back(self, microbatch: MicrobatchId) -> None:
        """Its running task gave bad numbers, and somebody else is to execute it: forget it. A new
        lease for it begins from nothing."""
        self._running = None
        del self._slots[microbatch]

    def task_failed(self) -> None:
        """The running task ended without a result; it may be chosen again."""
        self._running = None

    def _finish(self, microbatch: MicrobatchId) -> _Slot[P, T]:
        self._running = None
        return self._slots[microbatch]

    def _push_output(self, slot: _Slot[P, T]) -> list[Push[P]]:
        lease = slot.lease
        if slot.output is None or lease.downstream == NOBODY:
            return []
        return [Push(lease.downstream, "forward", lease.microbatch, slot.output)]

    def _push_input_gradient(self, slot: _Slot[P, T]) -> list[Push[P]]:
        lease = slot.lease
        if slot.input_gradient is None or lease.upstream == NOBODY:
            return []
        return [Push(lease.upstream, "backward", lease.microbatch, slot.input_gradient)]

    def sent(self) -> list[tuple[Literal["forward", "backward"], MicrobatchId, P]]:
        """(direction, microbatch, payload) of every boundary tensor that is kept, but for
        validation: what a neighbour would need to compute the step again."""
        kept: list[tuple[Literal["forward", "backward"], MicrobatchId, P]] = []
        for microbatch, slot in self._slots.items():
            if self.is_validation(microbatch):
                continue
            if slot.output is not None:
                kept.append(("forward", microbatch, slot.output))
            if slot.input_gradient is not None:
                kept.append(("backward", microbatch, slot.input_gradient))
        return kept

    # ---- facts for status ----------------------------------------------------------------

    def queue_depth(self) -> int:
        """Tasks that have their input and wait for the processor."""
        return sum(
            self._is_ready(slot) or (slot.output_gradient is not None and not slot.backward_done)
            for slot in self._slots.values()
        )

    def lacks(self) -> Incarnation:
        """Whose tensor would let this node go on; nobody's while it computes, can compute, or has
        nothing left to do.

        A gradient before an activation: whoever follows such answers from node to node comes to
        the one that holds up the step, and in a circle only where a tensor was lost on its way.
        """
        if self._running is not None or self._choose() is not None:
            return NOBODY
        waits = sorted(self.waits_for(), key=lambda wait: (wait[0] == "forward", wait[1]))
        return waits[0][2] if waits else NOBODY

    def waits_for(self) -> list[tuple[str, MicrobatchId, Incarnation]]:
        """(direction, microbatch, neighbour) of every tensor that is still to come."""
        waits = []
        for microbatch, slot in self._slots.items():
            if not slot.forward_done and not self._first and slot.input is None:
                waits.append(("forward", microbatch, slot.lease.upstream))
            elif (
                slot.forward_done
                and not slot.backward_done
                and not self.is_validation(microbatch)
                and slot.output_gradient is None
            ):
                waits.append(("backward", microbatch, slot.lease.downstream))
        return waits
