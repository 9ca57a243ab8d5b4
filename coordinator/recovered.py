# SPDX-License-Identifier: Apache-2.0
"""What losses have cost a run: replays, rollbacks, and the seconds that they took. Pure."""

from dataclasses import dataclass, replace

from shoal.protocol.ids import Stage

MAX_RECENT = 32
"""Recoveries that are remembered one by one."""

_MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Recovery:
    """How one loss was made good."""

    time_s: float
    """When a replayed stage was held again, or when the run went back."""
    stage: Stage | None
    """What was replayed; None when every stage went back."""
    from_step: int
    """A replay began with the state of this step; a rollback happened at it."""
    to_step: int
    """A replay reached it; a rollback went back to it."""
    seconds: float | None
    """None while a rollback has yet to be caught up with."""
    log_bytes: int = 0
    """Read out of boundary logs."""
    reason: str = ""
    """Why the run went back."""


@dataclass(frozen=True, slots=True)
class Recovered:
    replays: int = 0
    replay_seconds: float = 0.0
    """From the assignment until the stage was held again."""
    replay_bytes: int = 0
    """Read out of boundary logs."""
    rollbacks: int = 0
    rollback_seconds: float = 0.0
    """From going back until the run was at its old step again."""
    recomputing_to: int = 0
    """The step that the run was at before it went back; 0 when it has caught up."""
    recomputing_since_s: float = 0.0
    recent: tuple[Recovery, ...] = ()
    """The newest last, at most `MAX_RECENT`."""

    def with_replay(self, replay: Recovery) -> "Recovered":
        return replace(
            self,
            replays=self.replays + 1,
            replay_seconds=self.replay_seconds + (replay.seconds or 0.0),
            replay_bytes=self.replay_bytes + replay.log_bytes,
            recent=self._with(replay),
        )

    def with_rollback(
        self, *, from_step: int, to_step: int, time_s: float, reason: str
    ) -> "Recovered":
        """A rollback while another is being caught up with counts from the first one on."""
        rollback = Recovery(
            time_s=time_s,
            stage=None,
            from_step=from_step,
            to_step=to_step,
            seconds=None,
            reason=reason[:_MAX_REASON_CHARS],
        )
        more = replace(self, rollbacks=self.rollbacks + 1, recent=self._with(rollback))
        if self.recomputing_to >= from_step:
            return more
        since_s = self.recomputing_since_s if self.recomputing_to else time_s
        return replace(more, recomputing_to=from_step, recomputing_since_s=since_s)

    def with_step(self, step: int, time_s: float) -> "Recovered":
        if not self.recomputing_to or step < self.recomputing_to:
            return self
        seconds = max(0.0, time_s - self.recomputing_since_s)
        return replace(
            self,
            rollback_seconds=self.rollback_seconds + seconds,
            recomputing_to=0,
            recomputing_since_s=0.0,
            recent=tuple(
                replace(r, seconds=max(0.0, time_s - r.time_s)) if r.seconds is None else r
                for r in self.recent
            ),
        )

    def _with(self, recovery: Recovery) -> tuple[Recovery, ...]:
        return (*self.recent, recovery)[-MAX_RECENT:]
