# SPDX-License-Identifier: Apache-2.0
"""A fake node's share of an attempt at a step, and how the numbers in it may go wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.node.step_work import StepWork
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import coordinator_pb2 as pb

if TYPE_CHECKING:
    from .fake_member import FakeMember


@dataclass
class Try:
    """A node's share of an attempt at a step."""

    step: int
    attempt: int
    work: StepWork[int, int]
    loss_scale: float
    coarsen: int
    inputs: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)  # what is accumulated
    parked: list[tuple[Incarnation, str, int, int]] = field(default_factory=list)


@dataclass
class Reduction:
    command: pb.Reduce
    partials: dict[int, int] = field(default_factory=dict)
    unacknowledged: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class BadNumbers:
    """What a task of a fake node fails with."""

    error: str = "NonFiniteError"
    leg: "pb.TaskLeg.ValueType" = pb.TASK_LEG_BACKWARD


Spoil = Callable[["FakeMember", int, Try], BadNumbers | None]
"""(node, microbatch, try) -> how the task's numbers go wrong."""
