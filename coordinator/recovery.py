# SPDX-License-Identifier: Apache-2.0
"""Where a stage's state comes from, what becomes of a lost stage, why a step can't open. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.coordinator.state import RunState
from shoal.protocol.ids import PeerId, Stage
from shoal.protocol.proto import coordinator_pb2

RECLAIM_S = 3.0
"""How long a lost stage's old holders may take to come back, where nothing says that they can't;
a broken session is attached again within about a second."""

RESTART_RECLAIM_S = 10.0
"""The same after the coordinator itself was away: nodes must find it first."""

JOIN_DEADLINE_S = 120.0
"""A node that gets a whole state while there is no run to go on with holds up the next step for so
long; then it warms up behind the run's back, as every joiner does."""


def keepable(
    held: coordinator_pb2.HeldState | None, state: RunState, num_stages: int
) -> Stage | None:
    """The stage whose state a returning node still holds, if that is the run's: the state at the
    run's step, or the one before with the sums that the step's record names."""
    if held is None or held.stage >= num_stages:
        return None
    step, stage = state.step, Stage(held.stage)
    if held.step == step:
        digests = state.weights_digests.get(step)
        return stage if digests is None or digests[stage] == held.weights_digest else None
    record = state.records.get(step)
    prepared = (
        held.step == step - 1
        and held.has_prepared
        and record is not None
        and record.sums_digests[stage] == held.prepared_digest
    )
    return stage if prepared else None


def source(
    *, has_donor: bool, step: int, complete_steps: Collection[int]
) -> coordinator_pb2.StateSource.ValueType | None:
    """Where a stage's state at `step` can be had, beside from a node that keeps it."""
    if has_donor:
        return coordinator_pb2.STATE_SOURCE_PEER
    if step == 0:
        return coordinator_pb2.STATE_SOURCE_INIT
    if step in complete_steps:
        return coordinator_pb2.STATE_SOURCE_SNAPSHOT
    return None


def rollback_target(complete_steps: Collection[int], step: int) -> int:
    """The newest snapshot before `step`; 0 is the beginning, which needs none."""
    return max((s for s in complete_steps if s < step), default=0)


def may_return(
    expected: Iterable[PeerId], *, here: Collection[PeerId], gone_for_good: Collection[PeerId]
) -> bool:
    """Whether one of a stage's last holders might still bring its state back: it is neither here
    (then it came without, else the stage weren't lost) nor has it left or ended."""
    return any(peer not in here and peer not in gone_for_good for peer in expected)


@dataclass(frozen=True, slots=True)
class LostStage:
    """A stage that nobody holds at the run's step."""

    stage: Stage
    has_source: bool
    is_kept: bool
    """A node that holds its state, or computes it again, is on its way."""
    is_taken: bool
    """A node is free to take it."""
    may_return: bool = True
    """A last holder might come back with the state."""
    can_replay: bool = False
    """Its state can be computed again out of its neighbours' logs."""

    @property
    def is_hopeless(self) -> bool:
        return not self.has_source and not self.is_kept


Decision = Literal["go on", "wait", "replay", "roll back"]


def lost_stages(
    lost: Sequence[LostStage], *, step: int, lost_for_s: float, reclaim_s: float = RECLAIM_S
) -> Decision:
    """What to do: give the stages out as they are, wait for the old holders, replay what can be
    replayed, or roll back."""
    hopeless = [s for s in lost if s.is_hopeless]
    if not hopeless or not step:
        return "go on"
    if lost_for_s < reclaim_s and any(s.may_return for s in hopeless):
        return "wait"
    taken = [s for s in hopeless if s.is_taken]
    if not taken:
        return "go on"
    return "replay" if all(s.can_replay for s in taken) else "roll back"


@dataclass(frozen=True, slots=True)
class Readiness:
    """What decides whether the next step can open; names are for people."""

    state: RunState
    holders: Mapping[Stage, int]
    wanted: int
    """Nodes to wait for before the first step."""
    copying: Mapping[str, Stage | None]
    """Everybody who is on the way to holding a stage."""
    awaited: Sequence[str]
    """Those of them that the step waits for."""
    pulling: Sequence[str]
    """Workers that get the weights of the run's step."""
    last_leaving: Sequence[tuple[str, Stage]]
    """Nodes that want to leave, but are their stage's last."""
    lost_for_s: float | None
    """Since when a stage has been lost."""
    reclaim_s: float = 0.0
    """How long its last holders have from then on; 0 when none of them can come back."""
    replays: Mapping[Stage, str] = field(default_factory=dict)
    """Replays under way, in plain words."""


def obstacle(facts: Readiness) -> str:
    """Why the next step can't open and what would end that; empty when it can open."""
    state = facts.state
    if state.paused is not None:
        return f"{state.paused}; resume it with POST /api/run/resume"
    uncovered = [stage for stage, count in facts.holders.items() if not count]
    if uncovered:
        return _uncovered(uncovered, facts)
    if facts.last_leaving:
        name, stage = facts.last_leaving[0]
        return (
            f"{name}, the last node of stage {stage}, leaves: another node is taking over, or the "
            f"snapshot of step {state.step} is being stored"
        )
    ready = sum(facts.holders.values())
    if state.highest_step == 0 and state.attempt == 0 and ready < facts.wanted:
        return f"{ready} of {facts.wanted} nodes are ready for the first step"
    if facts.awaited:
        of_what = "its stage" if len(facts.awaited) == 1 else "their stages"
        return f"{_getting(facts.awaited)} the state of {of_what}"
    if facts.pulling:
        return f"{_getting(facts.pulling)} the weights of step {state.step}"
    return ""


def _uncovered(uncovered: Sequence[Stage], facts: Readiness) -> str:
    replayed = [facts.replays[stage] for stage in uncovered if stage in facts.replays]
    others = [stage for stage in uncovered if stage not in facts.replays]
    return "; ".join([*replayed, *([_unreplayed(others, facts)] if others else [])])


def _unreplayed(uncovered: Sequence[Stage], facts: Readiness) -> str:
    state, one = facts.state, len(uncovered) == 1
    which = f"stage {uncovered[0]}" if one else f"stages {_listed(map(str, uncovered))}"
    needs = f"{which} {'needs a node' if one else 'need a node each'}"
    copying = [name for name, stage in facts.copying.items() if stage in uncovered]
    if copying:
        return f"{needs}: {_getting(copying)} {'its' if len(copying) == 1 else 'their'} state"
    if facts.lost_for_s is None or not state.step:
        return f"{needs}; give the join link to {'one' if one else len(uncovered)} more"
    lost = f"{which} {'has' if one else 'have'} no node that holds step {state.step}"
    if facts.lost_for_s < facts.reclaim_s:
        return f"{lost}; its last holders have {facts.reclaim_s:.0f} s to come back"
    return (
        f"{lost}; it is replayed, or the run goes back to snapshot {state.snapshot_step}, once a "
        "node is free for it: give the join link to one more"
    )


def _listed(names: Iterable[str]) -> str:
    """ "fox", "fox and owl", "fox, owl and hare"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _getting(names: Sequence[str]) -> str:
    return f"{_listed(names)} {'is' if len(names) == 1 else 'are'} getting"
