# SPDX-License-Identifier: Apache-2.0
"""How long to wait for something, by how long it took before. Pure."""

import statistics
from collections.abc import Sequence

FEW = 4
"""With fewer observations nothing is known."""

DEVIATIONS = 8.0


def adaptive_s(
    observed: Sequence[float],
    *,
    least_s: float,
    most_s: float,
    unknown_s: float,
    medians: float = 1.0,
) -> float:
    """The median plus eight times the median deviation, within bounds.

    Medians, so that one odd observation changes little; and at least `medians` times the median
    itself, for what may be slower by a factor without being dead. `unknown_s` while too little has
    been observed.
    """
    if len(observed) < FEW:
        return unknown_s
    median = statistics.median(observed)
    deviation = statistics.median(abs(value - median) for value in observed)
    return min(max(least_s, median + DEVIATIONS * deviation, medians * median), most_s)
