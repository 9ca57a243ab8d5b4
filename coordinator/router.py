# SPDX-License-Identifier: Apache-2.0
"""Who computes which microbatch at which stage. Pure.

Within a stage, microbatches go to the replica with the earliest virtual finish time: the work it
already holds over its measured speed (the weighted fair queue of SWARM, arXiv 2301.11913, section
3.2, applied to whole routes).
"""

import heapq
from collections.abc import Mapping, Sequence

from shoal.protocol.ids import Incarnation, MicrobatchId


def spread(
    microbatches: Sequence[MicrobatchId],
    replicas: Mapping[Incarnation, float],
    held: Mapping[Incarnation, int] | None = None,
) -> dict[MicrobatchId, Incarnation]:
    """Assign microbatches of one stage to its replicas.

    `replicas` maps live incarnations to speed (microbatches per second; 0 means not measured yet
    and counts as the mean of the measured ones). `held` is unfinished work that they already
    have. Deterministic: ties go to the lower incarnation. Raises ValueError without replicas.
    """
    if not replicas:
        raise ValueError("a stage without replicas can't hold microbatches")
    measured = [speed for speed in replicas.values() if speed > 0]
    default = sum(measured) / len(measured) if measured else 1.0
    seconds_each = {who: 1.0 / (speed if speed > 0 else default) for who, speed in replicas.items()}
    queue = [(((held or {}).get(who, 0) + 1) * seconds_each[who], who) for who in sorted(replicas)]
    heapq.heapify(queue)
    routes: dict[MicrobatchId, Incarnation] = {}
    for microbatch in microbatches:
        finish, who = heapq.heappop(queue)
        routes[microbatch] = who
        heapq.heappush(queue, (finish + seconds_each[who], who))
    return routes
