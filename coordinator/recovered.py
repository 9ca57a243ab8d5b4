# SPDX-License-Identifier: Apache-2.0
"""What losses have cost a run: replays, rollbacks, and the seconds that they took. Pure."""

from dataclasses import dataclass, replace


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

    def with_replay(self, seconds: float, num_bytes: int) -> "Recovered":
        return replace(
            self,
            replays=self.replays + 1,
            replay_seconds=self.replay_seconds + seconds,
            replay_bytes=self.replay_bytes + num_bytes,
        )

    def with_rollback(self, *, from_step: int, time_s: float) -> "Recovered":
        """A rollback while another is being caught up with counts from the first one on."""
        rollbacks = self.rollbacks + 1
        if self.recomputing_to >= from_step:
            return replace(self, rollbacks=rollbacks)
        since_s = self.recomputing_since_s if self.recomputing_to else time_s
        return replace(
            self, rollbacks=rollbacks, recomputing_to=from_step, recomputing_since_s=since_s
        )

    def with_step(self, step: int, time_s: float) -> "Recovered":
        if not self.recomputing_to or step < self.recomputing_to:
            return self
        seconds = max(0.0, time_s - self.recomputing_since_s)
        return replace(
            self,
            rollback_seconds=self.rollback_seconds + seconds,
            recomputing_to=0,
            recomputing_since_s=0.0,
        )
