# SPDX-License-Identifier: Apache-2.0
"""The order of work within a stage and how much of it may be in flight. Pure functions.

1F1B: backward first, then the oldest forward, as long as the window has room (Narayanan et al.,
arXiv 1806.03377). A plain 1F1B window of S - s exposes every hop's latency; the window here
covers it.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from shoal.protocol.ids import MicrobatchId


def in_flight_window(
    stage: int,
    num_stages: int,
    *,
    hop_s: float = 0.0,
    latency_s: float = 0.0,
    period_s: float = 1.0,
) -> int:
    """Microbatches that stage `stage` of `num_stages` keeps in flight: forward done, backward not.

    K = (S - s) + ceil(2 (S-1-s) (x + l) / P) + 4, with x = `hop_s` the time of a boundary tensor
    on the wire, l = `latency_s` one way, P = `period_s` the time between two microbatches.
    """
    hops = num_stages - 1 - stage
    return (num_stages - stage) + math.ceil(2 * hops * (hop_s + latency_s) / period_s) + 4


def credits_per_sender(stage: int, num_stages: int, num_senders: int) -> int:
    """Credits that a replica of `stage` grants each of the previous stage's `num_senders` replicas:
    microbatches that a sender may have there, pushed and their gradient not yet back.

    A replica then holds no more inputs than its own window keeps busy, rounded up to a whole
    credit each. At least one, so that nobody starves.
    """
    return max(1, math.ceil(in_flight_window(stage, num_stages) / num_senders))


@dataclass(frozen=True, slots=True)
class Task:
    kind: Literal["forward", "backward"]
    microbatch: MicrobatchId


def next_task(
    *,
    forwards: Iterable[MicrobatchId],
    backwards: Iterable[MicrobatchId],
    in_flight: Collection[MicrobatchId],
    window: int,
) -> Task | None:
    """The task to run now: the oldest backward, else the oldest forward that the window admits.

    `forwards` have their input, `backwards` their output gradient; `in_flight` are forwards done
    whose backward is not. None means: wait for input.
    """
    backward = min(backwards, default=None)
    if backward is not None:
        return Task("backward", backward)
    forward = min(forwards, default=None)
    if forward is not None and len(in_flight) < window:
        return Task("forward", forward)
    return None
