# SPDX-License-Identifier: Apache-2.0
"""How long to wait, by how long it took before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.deadlines import adaptive_s

BOUNDS = {"least_s": 1.0, "most_s": 60.0, "unknown_s": 20.0}
seconds = st.floats(0, 1e6)


def test_few_observations_say_nothing() -> None:
    assert adaptive_s([1.0, 1.0, 1.0], **BOUNDS) == 20.0


def test_the_median_and_eight_deviations() -> None:
    assert adaptive_s([2.0, 3.0, 3.0, 4.0, 4.0], **BOUNDS) == 3.0 + 8 * 1.0


def test_one_odd_observation_changes_nothing() -> None:
    assert adaptive_s([2.0] * 7 + [50.0], **BOUNDS) == 2.0


def test_as_many_medians_as_wanted() -> None:
    assert adaptive_s([2.0] * 5, medians=10, **BOUNDS) == 20.0


@pytest.mark.parametrize(("each", "expected"), [(0.001, 1.0), (1e9, 60.0)])
def test_bounds_hold(each: float, expected: float) -> None:
    assert adaptive_s([each] * 5, **BOUNDS) == expected


@given(st.lists(seconds, min_size=4, max_size=40))
def test_what_is_usual_is_always_in_time(observed: list[float]) -> None:
    limit_s = adaptive_s(observed, least_s=0.0, most_s=2e7, unknown_s=0.0)
    assert sum(value <= limit_s for value in observed) * 2 >= len(observed)
