# SPDX-License-Identifier: Apache-2.0
"""Until when a node that leaves still helps."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.leaving import Leaver, decide, time_left_s

FACTS: dict[str, Any] = {
    "grace_s": 30.0, "left_s": 29.0, "in_step": True, "is_idle": False, "is_needed": False,
}  # fmt: skip


def decision(step_left_s: float = 5.0, handover_s: float | None = None, **facts: Any) -> str:
    return decide(Leaver(**{**FACTS, **facts}), step_left_s=step_left_s, handover_s=handover_s)


def test_a_node_stays_for_the_sum_of_what_it_has_computed() -> None:
    assert decision() == "stay"


def test_who_has_nothing_of_the_step_goes_at_once() -> None:
    assert decision(is_idle=True) == "let go"
    assert decision(in_step=False) == "let go"


def test_a_step_that_ends_after_the_grace_is_not_waited_for() -> None:
    assert decision(step_left_s=40.0) == "let go"
    assert decision(step_left_s=26.0) == "stay"


def test_others_learn_of_it_in_order_before_its_time_is_up() -> None:
    assert decision(step_left_s=0.0, left_s=2.5) == "stay"
    assert decision(step_left_s=0.0, left_s=1.9) == "let go"


def test_a_stages_last_state_goes_before_the_step() -> None:
    assert decision(is_needed=True, step_left_s=10.0) == "stay"
    assert decision(is_needed=True, step_left_s=16.0) == "abandon the step"
    assert decision(is_needed=True, step_left_s=16.0, handover_s=5.0) == "stay"
    assert decision(is_needed=True, step_left_s=0.0, left_s=14.9) == "abandon the step"
    assert decision(is_needed=True, in_step=False) == "save its state"


def test_a_node_that_names_no_grace_has_time() -> None:
    assert decision(step_left_s=1e6, grace_s=0.0, left_s=time_left_s(None, 5.0)) == "stay"
    assert time_left_s(7.0, 5.0) == 2.0


@pytest.mark.parametrize("needed", [True, False])
@given(
    left_s=st.floats(-5, 1e4), grace_s=st.floats(0, 1e4), step_left_s=st.floats(-1e4, 1e6),
    handover_s=st.none() | st.floats(0, 1e6),
)  # fmt: skip
def test_nobody_stays_in_a_step_beyond_its_grace(
    needed: bool, left_s: float, grace_s: float, step_left_s: float, handover_s: float | None
) -> None:
    stays = decision(
        step_left_s, handover_s, left_s=left_s, grace_s=grace_s, is_needed=needed
    ) == "stay"  # fmt: skip
    assert not stays or (left_s > 0 and left_s > step_left_s)
    assert math.isfinite(left_s)
