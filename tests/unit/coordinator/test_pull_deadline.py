# SPDX-License-Identifier: Apache-2.0
"""How long a run waits for a worker's weights: as observed, bounded, longer after each setback."""

import pytest

from shoal.coordinator.pull_deadline import (
    FIRST_REST_S,
    LEAST_S,
    LONGEST_REST_S,
    MOST_S,
    pull_deadline_s,
    rest_s,
)


@pytest.mark.parametrize(
    ("pulls_s", "steps_s", "setbacks", "expected"),
    [
        ([], [], 0, LEAST_S),
        ([0.1] * 5, [0.3] * 5, 0, LEAST_S),
        ([], [20.0, 30.0, 25.0], 0, 50.0),
        ([10.0] * 5, [1.0], 0, 30.0),
        ([10.0, 12.0, 8.0, 10.0, 14.0], [1.0], 0, 30.0),
        ([], [], 3, 8 * LEAST_S),
        ([900.0], [900.0], 9, MOST_S),
    ],
)
def test_the_deadline_follows_pulls_and_steps_within_bounds(
    pulls_s: list[float], steps_s: list[float], setbacks: int, expected: float
) -> None:
    assert pull_deadline_s(pulls_s, steps_s, setbacks=setbacks) == expected


def test_rests_grow_to_a_bound() -> None:
    assert [rest_s(n) for n in (1, 2, 3)] == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert rest_s(100) == LONGEST_REST_S
