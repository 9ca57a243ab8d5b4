# SPDX-License-Identifier: Apache-2.0
"""What a session under faults is asked for, and what it gave."""

from dataclasses import dataclass, field

from process_samples import Sampler

from shoal.demo_summary import FaultRecord


@dataclass(frozen=True, slots=True)
class Stretch:
    """`every_s` None: undisturbed."""

    seconds: float
    every_s: float | None = None


@dataclass(slots=True)
class Outcome:
    """What a stretch gave."""

    every_s: float | None
    seconds: float
    steps: float
    """Committed in it, with the fraction of the open one."""
    faults: list[FaultRecord]
    taken: int
    """(Microbatch, stage) pairs computed, recomputed ones too."""

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class LogSize:
    time_s: float
    step: int
    file_bytes: int
    """With the write-ahead log."""
    rows: int


@dataclass(slots=True)
class Result:
    outcomes: list[Outcome] = field(default_factory=list)
    sampler: Sampler = field(default_factory=Sampler)
    log_sizes: list[LogSize] = field(default_factory=list)
    restarts: int = 0
    crashes: int = 0
    steps: int = 0
    tokens_per_step: int = 0
    pairs_per_step: int = 0
    steps_lost: int = 0
    microbatches_missing: int = 0
    microbatches_double: int = 0

    @property
    def faults(self) -> list[FaultRecord]:
        return [fault for outcome in self.outcomes for fault in outcome.faults]

    @property
    def step_s(self) -> float:
        """A step in the undisturbed stretches."""
        quiet = [o for o in self.outcomes if o.every_s is None]
        steps = sum(outcome.steps for outcome in quiet)
        return sum(outcome.seconds for outcome in quiet) / steps if steps else 0.0
