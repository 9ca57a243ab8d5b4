# SPDX-License-Identifier: Apache-2.0
"""How long the run waits for a worker that pulls the weights after a step. Pure."""

import statistics
from collections.abc import Sequence

LEAST_S = 5.0
MOST_S = 600.0
FIRST_REST_S = 30.0
LONGEST_REST_S = 600.0

_STEPS = 2.0
_DEVIATIONS = 8


def pull_deadline_s(pulls_s: Sequence[float], steps_s: Sequence[float], *, setbacks: int) -> float:
    """From what its earlier pulls and the run's steps took: twice a step's time, or the median of
    its pulls plus eight times their median deviation, whichever is longer. Twice as long after each
    setback, so that a node on a slow line gets in in the end."""
    found_s = max(LEAST_S, _STEPS * statistics.median(steps_s) if steps_s else 0.0)
    if pulls_s:
        median = statistics.median(pulls_s)
        deviation = statistics.median(abs(p - median) for p in pulls_s)
        found_s = max(found_s, median + _DEVIATIONS * max(deviation, median / 4))
    return min(found_s * 2.0 ** min(setbacks, 16), MOST_S)


def rest_s(setbacks: int) -> float:
    """How long a node that didn't keep up waits before it warms up again."""
    return min(FIRST_REST_S * 2.0 ** min(max(setbacks - 1, 0), 16), LONGEST_REST_S)
