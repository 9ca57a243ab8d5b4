# SPDX-License-Identifier: Apache-2.0
"""Nodes whose heart beats but whose work never comes: who holds up a step, and for how long it may.
Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.protocol.deadlines import adaptive_s
from shoal.protocol.ids import NOBODY, Incarnation, Stage

LEAST_S = 5.0
WARM_UP_S = 30.0
"""The least for a node's first microbatch: kernels are loaded, or compiled, at the first use."""
MOST_S = 900.0

_MEDIANS = 10.0
"""A node may take so many times its usual time before it counts as mute."""

_REST_S = 30.0
_MAX_REST_S = 600.0


def patience_s(
    observed_s: Sequence[float], tasks: int, *, times: int = 0, least_s: float = LEAST_S
) -> float:
    """How long a node may go without finishing anything while it has `tasks` to do, when one took
    `observed_s` before; twice as long each time that it was taken out, so that one that is slow
    beyond all others gets in too. Generous: a slow node is not a dead one."""
    each_s = adaptive_s(observed_s, least_s=0.0, most_s=MOST_S, unknown_s=MOST_S, medians=_MEDIANS)
    doubled_s = each_s * max(1, tasks) * 2.0 ** min(times, 10)
    return min(max(least_s, doubled_s), MOST_S)


def rest_s(times: int) -> float:
    """How long a node gets no stage after it was mute `times` times in a row."""
    return min(_MAX_REST_S, _REST_S * 2.0 ** min(max(times - 1, 0), 10))


@dataclass(frozen=True, slots=True)
class Debtor:
    """A participant of the open step that has yet to do something for it."""

    incarnation: Incarnation
    stage: Stage
    waits_for: Incarnation
    """Whose tensor it says that it lacks."""
    still_s: float
    """For how long it has finished nothing, and said nothing new."""
    patience_s: float


def mute(debtors: Sequence[Debtor]) -> list[Incarnation]:
    """Who of them holds up the step beyond patience.

    Whoever waits for another debtor is not to blame; so the blame goes on to one that waits for
    nobody. Where they wait for each other in a circle, a tensor was lost between two of them: then
    the last stage in the circle goes, after twice the time.
    """
    by_id = {d.incarnation: d for d in debtors}
    found = []
    for debtor in debtors:
        circle = _circle(debtor, by_id)
        if circle is None:
            roots = debtor.waits_for not in by_id
            too_long = debtor.still_s > debtor.patience_s
        else:
            last = max(circle, key=lambda d: (d.stage, d.incarnation))
            roots = last is debtor
            too_long = min(d.still_s for d in circle) > 2 * max(d.patience_s for d in circle)
        if roots and too_long:
            found.append(debtor.incarnation)
    return found


def holding_up(debtors: Sequence[Debtor]) -> Debtor | None:
    """Who keeps the others waiting, and has done so for the longest time."""
    owing = {d.incarnation for d in debtors}
    roots = [d for d in debtors if d.waits_for not in owing]
    return max(roots or debtors, key=lambda d: d.still_s, default=None)


def _circle(debtor: Debtor, by_id: dict[Incarnation, Debtor]) -> list[Debtor] | None:
    """Those who wait for each other, when `debtor` is one of them."""
    circle, who = [debtor], debtor.waits_for
    while who != debtor.incarnation:
        if who == NOBODY or who not in by_id or len(circle) > len(by_id):
            return None
        circle.append(by_id[who])
        who = by_id[who].waits_for
    return circle
