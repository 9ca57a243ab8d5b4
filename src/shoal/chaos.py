# SPDX-License-Identifier: Apache-2.0
"""Which fault comes next, drawn by a seed: whom it hits, at which moment, and how. Pure.

`shoal demo --chaos SEED` and the benchmarks carry out what is drawn here (`demo_chaos.py`). The
same seed, number and facts give the same fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from shoal.protocol.faults import COORDINATOR_MOMENTS, LINK_ACTIONS, Action, Fault, Moment

COORDINATOR = "coordinator"

T = TypeVar("T")

_COORDINATOR_SHARE = 0.2
_RECOVERY_STEPS = 3
_SHORT_STOP_S = (0.3, 2.0)
_LONG_STOP_S = (6.0, 9.0)
"""Longer than a lease: the node is fenced, and comes back as a zombie."""

# A poisoned gradient is no accident of processes, links or disks; its tests draw it themselves.
_NODE_ACTIONS = (
    (Action.KILL, 4),
    (Action.STOP, 2),
    (Action.TERM, 2),
    (Action.DROP_LINK, 2),
    (Action.DELAY_LINK, 1),
    (Action.FULL_DISK, 1),
)
_COORDINATOR_ACTIONS = (
    (Action.KILL, 5),
    (Action.STOP, 2),
    (Action.TERM, 1),
    (Action.FULL_DISK, 1),
)

_ONCE_A_STEP = (Moment.MID_REDUCE, Moment.PREPARED, Moment.COMMITTED)


@dataclass(frozen=True, slots=True)
class NodeFact:
    """A node that holds a stage and can be hit."""

    process: str
    """What its supervisor calls it: "node-1"."""
    name: str
    """What the swarm calls it."""
    stage: int


@dataclass(frozen=True, slots=True)
class SwarmFacts:
    step: int
    """Committed steps."""
    total_steps: int
    num_stages: int
    microbatches: int
    """Per step."""
    nodes: tuple[NodeFact, ...]


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault and the process that is to suffer it."""

    process: str
    name: str
    stage: int | None
    """None: the coordinator's."""
    fault: Fault
    others: int = 0
    """Nodes that hold the stage beside this one."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The next fault is due after so long, or after so many steps, whichever is first; both vary
    by a quarter. None: time alone decides."""

    every_s: float = 20.0
    every_steps: int | None = 4


def is_due(pace: Pace, seed: int, number: int, *, steps_since: int, seconds_since: float) -> bool:
    """Whether fault `number` may come, so long after the one before it (or the start). The first
    one waits for a committed step, not for its time."""
    if number == 0 and pace.every_steps is not None:
        return steps_since >= 1
    vary = Random(f"{seed}/{number}/pace").uniform(0.75, 1.25)
    if seconds_since >= pace.every_s * vary:
        return True
    return pace.every_steps is not None and steps_since >= round(pace.every_steps * vary)


def last_faulty_step(total_steps: int) -> int:
    """No fault is for a later step: the run must have time to show that it recovers."""
    return max(1, total_steps - min(_RECOVERY_STEPS, total_steps // 3))


def draw(seed: int, number: int, facts: SwarmFacts) -> Strike | None:
    """Fault `number` (from 0) of this seed, for the step after the open one. None when there is
    nobody to hit, or the end is too near."""
    step = facts.step + 2  # a process looks for faults when it begins a step
    last = last_faulty_step(facts.total_steps)
    if step > last:
        if facts.step + 1 > last:
            return None
        step = last
    if not facts.nodes:
        return None
    rng = Random(f"{seed}/{number}")
    if rng.random() < _COORDINATOR_SHARE:
        action = _weighted(rng, _COORDINATOR_ACTIONS)
        return Strike(
            process=COORDINATOR,
            name=COORDINATOR,
            stage=None,
            fault=Fault(
                id=f"chaos-{seed}-{number}",
                step=step,
                moment=rng.choice(COORDINATOR_MOMENTS),
                action=action,
                seconds=_seconds(rng, action),
            ),
        )
    node = rng.choice(sorted(facts.nodes, key=lambda node: node.process))
    moment = rng.choice(moments_of(node.stage, facts.num_stages))
    alone = len(facts.nodes) == 1
    action = _weighted(rng, [a for a in _NODE_ACTIONS if not (alone and a[0] in LINK_ACTIONS)])
    replicas = sum(other.stage == node.stage for other in facts.nodes)
    share = facts.microbatches // (2 * replicas)
    return Strike(
        process=node.process,
        name=node.name,
        stage=node.stage,
        others=replicas - 1,
        fault=Fault(
            id=f"chaos-{seed}-{number}",
            step=step,
            moment=moment,
            action=action,
            seconds=_seconds(rng, action),
            delay_s=round(rng.uniform(0.05, 0.3), 2) if action is Action.DELAY_LINK else 0.0,
            skip=0 if moment in _ONCE_A_STEP else rng.randint(0, share),
        ),
    )


def moments_of(stage: int, num_stages: int) -> tuple[Moment, ...]:
    """The moments that a node of this stage comes to."""
    moments = [Moment.GRADIENT_ACCUMULATED, *_ONCE_A_STEP]
    if stage > 0:
        moments.append(Moment.FORWARD_RECEIVED)
    if stage < num_stages - 1:
        moments += [Moment.FORWARD_SENT, Moment.BACKWARD_RECEIVED]
    return tuple(moments)


def _seconds(rng: Random, action: Action) -> float:
    match action:
        case Action.STOP:
            span = rng.choice((_SHORT_STOP_S, _LONG_STOP_S))
        case Action.DROP_LINK:
            span = (1.0, 3.0)
        case Action.DELAY_LINK:
            span = (2.0, 5.0)
        case Action.FULL_DISK:
            span = (1.0, 4.0)
        case _:
            return 0.0
    return round(rng.uniform(*span), 1)


def _weighted(rng: Random, choices: Sequence[tuple[T, int]]) -> T:
    return rng.choices([c for c, _ in choices], [weight for _, weight in choices])[0]
