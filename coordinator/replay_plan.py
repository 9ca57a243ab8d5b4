# SPDX-License-Identifier: Apache-2.0
"""Whether a lost stage can be replayed out of its neighbours' logs, and from whose. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.coordinator.boundary_sources import MAX_REPLAY_STEPS, BoundarySources
from shoal.protocol.ids import PeerId, Stage

Parts = Mapping[PeerId, tuple[int, ...]]
"""Whose log holds which microbatches' tensors."""


@dataclass(frozen=True, slots=True)
class StepSources:
    step: int
    inputs: Parts
    """Empty at stage 0."""
    gradients: Parts
    """Empty at the last stage."""
    shares: Mapping[int, PeerId] = field(default_factory=dict)
    """By boundary, whose log holds the other side's share of what both sides hold."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    stage: Stage
    base_step: int
    """The state to begin with; 0 is the beginning."""
    steps: tuple[StepSources, ...]

    @property
    def to_step(self) -> int:
        return self.base_step + len(self.steps)

    @property
    def logs(self) -> list[PeerId]:
        """Everybody whose log is read, in a fixed order."""
        return sorted(
            {p for s in self.steps for parts in (s.inputs, s.gradients) for p in parts}
            | {p for s in self.steps for p in s.shares.values()}
        )


@dataclass(frozen=True, slots=True)
class NoReplay:
    reason: str
    """In plain words."""
    absent: tuple[PeerId, ...] = ()
    """Whose log would help, were its owner here."""


@dataclass(frozen=True, slots=True)
class Missing:
    """An input that nobody's log holds, as far as is known."""

    step: int
    stage: Stage
    microbatch: int | None
    """None for the stage's share of what it holds in common with its neighbour."""
    logged_by: tuple[PeerId, ...]


@dataclass(slots=True)
class ReplayProgress:
    """A replay under way."""

    plan: ReplayPlan
    step: int
    """The state that the node has got to."""
    log_bytes: int = 0


def plan_replay(
    stage: Stage,
    *,
    num_stages: int,
    num_microbatches: int,
    base_step: int,
    to_step: int,
    sources: BoundarySources,
    logs: Mapping[PeerId, int],
    has_shares: bool = False,
) -> ReplayPlan | Missing | NoReplay:
    """A source for every input of every step after `base_step` up to `to_step`.

    `has_shares`: the two sides of a boundary hold parameters in common (node/shares.py).

    `logs` are the boundary logs within reach, by their owner, each with the oldest step that it is
    known to begin with (0: unknown, taken for all). A plan exists exactly when every input of
    every step is covered.
    """
    if to_step - base_step > MAX_REPLAY_STEPS:
        return NoReplay(
            f"the newest snapshot is {to_step - base_step} steps old, and at most "
            f"{MAX_REPLAY_STEPS} are replayed"
        )
    steps = []
    for step in range(base_step + 1, to_step + 1):
        both: list[dict[PeerId, tuple[int, ...]]] = []
        for neighbour in (stage - 1, stage + 1):
            parts: dict[PeerId, tuple[int, ...]] = {}
            wanted = range(num_microbatches) if 0 <= neighbour < num_stages else ()
            for microbatch in wanted:
                candidates = tuple(sources.candidates(step, Stage(neighbour), microbatch))
                source = _within_reach(candidates, logs, step)
                if source is None:
                    return Missing(step, Stage(neighbour), microbatch, candidates)
                parts[source] = (*parts.get(source, ()), microbatch)
            both.append(parts)
        shares: dict[int, PeerId] = {}
        for boundary, neighbour in ((stage - 1, stage - 1), (stage, stage + 1)):
            if not has_shares or not 0 <= neighbour < num_stages:
                continue
            candidates = tuple(sources.sharers(step, Stage(neighbour)))
            source = _within_reach(candidates, logs, step)
            if source is None:
                return Missing(step, Stage(neighbour), None, candidates)
            shares[boundary] = source
        steps.append(StepSources(step, both[0], both[1], shares))
    return ReplayPlan(stage, base_step, tuple(steps))


def _within_reach(
    candidates: Iterable[PeerId], logs: Mapping[PeerId, int], step: int
) -> PeerId | None:
    return next((p for p in candidates if p in logs and logs[p] <= step), None)
