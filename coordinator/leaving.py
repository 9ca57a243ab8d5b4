# SPDX-License-Identifier: Apache-2.0
"""What becomes of a node that says farewell: whether it still helps, and until when. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

_MARGIN_S = 2.0
"""A node is let go so long before its time is up, that others learn of it in order."""


@dataclass(frozen=True, slots=True)
class Leaver:
    grace_s: float
    """What it gave itself."""
    left_s: float
    """What is left of that; infinite when it didn't say."""
    in_step: bool
    """It takes part in the open step."""
    is_idle: bool
    """Nothing of the open step is with it any more."""
    is_needed: bool
    """The run's state of its stage would be lost with it."""


Decision = Literal["let go", "stay", "save its state", "abandon the step"]


def decide(leaver: Leaver, *, step_left_s: float, handover_s: float | None) -> Decision:
    """`step_left_s` is how long the open step takes from now at a guess, `handover_s` how long it
    takes to store a stage or to copy it, None while unknown.

    What a node has summed is worth waiting for, but only within its grace: else others compute it
    again, and had better begin at once. A stage's state is worth more than an open step, which can
    be done again.
    """
    if not leaver.in_step:
        return "save its state" if leaver.is_needed else "let go"
    half_s = leaver.grace_s / 2
    if leaver.is_needed:
        reserve_s = half_s if handover_s is None else min(half_s, handover_s)
    elif leaver.is_idle:
        return "let go"
    else:
        reserve_s = min(_MARGIN_S, half_s / 2)
    spare_s = leaver.left_s - reserve_s
    if spare_s > max(0.0, step_left_s):
        return "stay"
    return "abandon the step" if leaver.is_needed else "let go"


def time_left_s(leave_by_s: float | None, now_s: float) -> float:
    return math.inf if leave_by_s is None else leave_by_s - now_s
