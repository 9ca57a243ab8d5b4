# SPDX-License-Identifier: Apache-2.0
"""Which faults are tried: every moment with every action that makes sense there; pairs. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.protocol.faults import COORDINATOR_MOMENTS, LINK_ACTIONS, NODE_MOMENTS, Action, Moment

Target = tuple[int, int] | Literal["coordinator"]
"""(stage, which of its replicas), as they stand when the case begins."""

LONG_STOP_S = 7.0
"""Longer than the lease, so that the stopped node is fenced."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault, and whom it hits."""

    target: Target
    moment: Moment
    action: Action
    seconds: float = 0.0
    delay_s: float = 0.0
    skip: int = 0
    later: int = 0
    """Steps after the case's first."""

    def __str__(self) -> str:
        who = self.target if isinstance(self.target, str) else "stage {}, {}".format(*self.target)
        lasting = f" {self.seconds:g} s" if self.seconds else ""
        return f"{who}: {self.moment} {self.action}{lasting}"


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    strikes: tuple[Strike, ...]

    @property
    def id(self) -> str:
        """For pytest."""
        parts = [
            f"{'-'.join(map(str, s.target)) if isinstance(s.target, tuple) else 'coordinator'}-"
            f"{s.moment}-{s.action}{f'-{s.seconds:g}s' if s.seconds else ''}"
            for s in self.strikes
        ]
        return f"{self.kind}:{'+'.join(parts)}"


Lasting = tuple[Action, float, float]
"""(what, for how many seconds, delay in seconds)."""

_LASTING: tuple[Lasting, ...] = (
    (Action.KILL, 0.0, 0.0),
    (Action.TERM, 0.0, 0.0),
    (Action.STOP, 1.5, 0.0),
    (Action.STOP, LONG_STOP_S, 0.0),
    (Action.DROP_LINK, 2.0, 0.0),
    (Action.DELAY_LINK, 2.0, 0.2),
    (Action.FULL_DISK, 2.0, 0.0),
)

_LETHAL = _LASTING[:2] + _LASTING[3:4]
"""After these a node's share is lost: killed, sent home, fenced."""

_STAGE_OF = {
    Moment.FORWARD_RECEIVED: 1,  # of two
    Moment.FORWARD_SENT: 0,
    Moment.BACKWARD_RECEIVED: 0,
}
"""Where a moment belongs to one stage."""


def singles() -> list[Case]:
    """Every moment with every action. Where a moment belongs to either stage, both take turns."""
    cases = []
    for number, moment in enumerate([*NODE_MOMENTS, *COORDINATOR_MOMENTS]):
        for turn, (action, seconds, delay_s) in enumerate(_LASTING):
            target: Target = (_STAGE_OF.get(moment, (number + turn) % 2), turn % 2)
            if moment in COORDINATOR_MOMENTS:
                if action in LINK_ACTIONS:
                    continue
                target = "coordinator"
            strike = Strike(target, moment, action, seconds=seconds, delay_s=delay_s)
            cases.append(Case("single", (strike,)))
    return cases


def one_a_moment(cases: Sequence[Case]) -> list[Case]:
    """One of the singles for each moment, with every action among them."""
    actions = {
        Moment.FORWARD_RECEIVED: Action.STOP,
        Moment.FORWARD_SENT: Action.DROP_LINK,
        Moment.BACKWARD_RECEIVED: Action.KILL,
        Moment.GRADIENT_ACCUMULATED: Action.TERM,
        Moment.MID_REDUCE: Action.KILL,
        Moment.PREPARED: Action.STOP,
        Moment.COMMITTED: Action.DELAY_LINK,
        Moment.STEP_OPENED: Action.STOP,
        Moment.RECEIPTS_COMPLETE: Action.FULL_DISK,
        Moment.COMMIT_WRITTEN: Action.KILL,
    }
    long_stops = {Moment.PREPARED}
    chosen = []
    for moment, action in actions.items():
        chosen.append(
            next(
                case
                for case in cases
                if (strike := case.strikes[0]).moment is moment
                and strike.action is action
                and (strike.seconds == LONG_STOP_S) == (moment in long_stops)
            )
        )
    return chosen


PAIR_KINDS = (
    "both replicas of a stage",
    "adjacent stages",
    "node and coordinator",
    "while it takes over",
    "any two",
)


NUM_PAIRS = 35
DEFAULT_PAIRS = range(6)


def pair(seed: int) -> Case:
    """The pair of faults that this seed draws; kinds take turns."""
    rng, kind = random.Random(seed), PAIR_KINDS[seed % len(PAIR_KINDS)]
    stage, replica = rng.randrange(2), rng.randrange(2)
    if kind == "both replicas of a stage":
        strikes = (_node(rng, (stage, 0), _LETHAL[:1]), _node(rng, (stage, 1), _LETHAL[:2]))
    elif kind == "adjacent stages":
        other = rng.randrange(2)
        strikes = (_node(rng, (0, replica), _LETHAL), _node(rng, (1, other), _LETHAL))
    elif kind == "node and coordinator":
        strikes = (_node(rng, (stage, replica), _LETHAL), _coordinator(rng))
    elif kind == "while it takes over":
        # Of four microbatches the other one computes all four only where it takes some over.
        gone = Strike((stage, replica), _STARTS[stage], Action.KILL)
        if rng.randrange(2):  # fenced, but it comes back with what it holds
            gone = replace(gone, action=Action.STOP, seconds=LONG_STOP_S)
        heir = Strike((stage, 1 - replica), Moment.GRADIENT_ACCUMULATED, Action.KILL, skip=3)
        strikes = (gone, heir)
    else:
        targets: list[Target] = [(0, 0), (0, 1), (1, 0), (1, 1), "coordinator"]
        one, other = rng.sample(targets, 2)
        strikes = (_strike(rng, one), _strike(rng, other))
    return Case(kind, strikes)


_STARTS = (Moment.FORWARD_SENT, Moment.FORWARD_RECEIVED)
"""By stage: a moment that comes before the node's last gradient."""


def _strike(rng: random.Random, target: Target) -> Strike:
    return _coordinator(rng) if target == "coordinator" else _node(rng, target)


def _node(
    rng: random.Random, target: tuple[int, int], lasting: Sequence[Lasting] = _LASTING
) -> Strike:
    moments = [m for m in NODE_MOMENTS if _STAGE_OF.get(m, target[0]) == target[0]]
    return _drawn(rng, target, rng.choice(moments), lasting)


def _coordinator(rng: random.Random) -> Strike:
    lasting = [one for one in _LASTING if one[0] not in LINK_ACTIONS]
    return _drawn(rng, "coordinator", rng.choice(COORDINATOR_MOMENTS), lasting)


def _drawn(
    rng: random.Random,
    target: Target,
    moment: Moment,
    lasting: Sequence[Lasting],
) -> Strike:
    action, seconds, delay_s = rng.choice(lasting)
    return Strike(
        target, moment, action, seconds=seconds, delay_s=delay_s, later=rng.choice((0, 0, 1))
    )
