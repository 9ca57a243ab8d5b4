# SPDX-License-Identifier: Apache-2.0
"""Who sent what over stage boundaries since the newest snapshot: where a replay looks. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.protocol.ids import Incarnation, PeerId, Stage

MAX_REPLAY_STEPS = 512
"""A longer replay is not planned: the plan travels in one message."""

Computed = tuple[dict[PeerId, tuple[int, ...]], ...]
"""By stage: who computed which microbatches."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A node computed a stage's steps again, all microbatches, and logged what came of them."""

    stage: Stage
    peer_id: PeerId
    from_step: int
    to_step: int
    """Inclusive."""


@dataclass(frozen=True, slots=True)
class BoundarySources:
    """Bounded: steps after the newest snapshot, at most `MAX_REPLAY_STEPS`."""

    computed: Mapping[int, Computed] = field(default_factory=dict)
    """By step, of its latest computation: after a rollback others may have computed it."""
    rebuilt: tuple[Rebuilt, ...] = ()

    def with_step(
        self,
        step: int,
        contributions: Sequence[Mapping[Incarnation, Sequence[int]]],
        peers: Mapping[int, PeerId],
    ) -> "BoundarySources":
        """After `step` is committed, for the first time or again."""
        by_stage = []
        for of_stage in contributions:
            parts: dict[PeerId, tuple[int, ...]] = {}
            for incarnation, microbatches in of_stage.items():
                if incarnation in peers:
                    peer_id = peers[incarnation]
                    parts[peer_id] = (*parts.get(peer_id, ()), *microbatches)
            by_stage.append(parts)
        computed = {s: c for s, c in self.computed.items() if s > step - MAX_REPLAY_STEPS}
        computed[step] = tuple(by_stage)
        # A step computed once more takes the place of what was logged of it.
        rebuilt = tuple(r for r in self.rebuilt if r.to_step < step)
        return BoundarySources(computed, rebuilt)

    def with_rebuilt(self, rebuilt: Rebuilt) -> "BoundarySources":
        kept = (r for r in self.rebuilt if (r.stage, r.peer_id) != (rebuilt.stage, rebuilt.peer_id))
        return replace(self, rebuilt=(*kept, rebuilt))

    def after_snapshot(self, step: int) -> "BoundarySources":
        """Every stage has a snapshot of `step`: nobody replays what was before."""
        return BoundarySources(
            computed={s: c for s, c in self.computed.items() if s > step},
            rebuilt=tuple(r for r in self.rebuilt if r.to_step > step),
        )

    def computed_by(self, step: int, stage: Stage) -> set[PeerId]:
        return set(self._of(step, stage))

    def candidates(self, step: int, stage: Stage, microbatch: int) -> Iterator[PeerId]:
        """Who may have logged what `stage` sent for this microbatch; the likeliest first."""
        for peer_id, microbatches in self._of(step, stage).items():
            if microbatch in microbatches:
                yield peer_id
        yield from self._rebuilders(step, stage)

    def sharers(self, step: int, stage: Stage) -> Iterator[PeerId]:
        """Who may have logged the stage's share of what it holds in common with a neighbour: all
        who summed the step up; the likeliest first."""
        yield from self._of(step, stage)
        yield from self._rebuilders(step, stage)

    def _rebuilders(self, step: int, stage: Stage) -> Iterator[PeerId]:
        for rebuilt in reversed(self.rebuilt):
            if rebuilt.stage == stage and rebuilt.from_step <= step <= rebuilt.to_step:
                yield rebuilt.peer_id

    def _of(self, step: int, stage: Stage) -> Mapping[PeerId, Sequence[int]]:
        of_step = self.computed.get(step, ())
        return of_step[stage] if stage < len(of_step) else {}
