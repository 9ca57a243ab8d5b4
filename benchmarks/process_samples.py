# SPDX-License-Identifier: Apache-2.0
"""Memory, open files and threads of processes over time, and whether they grow."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

WARM_UP_S = 40.0
LIVED_LONG_S = 120.0
"""A process that lived for less says nothing about growth."""

MAX_RSS_GROWTH_BYTES = 16_000_000
MAX_RSS_BYTES_PER_MIN = 1_500_000
MAX_FILE_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Sample:
    age_s: float
    rss_bytes: int
    num_files: int
    num_threads: int


@dataclass(slots=True)
class Life:
    """One process from its start to its end. Started again it is another one."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def lived_s(self) -> float:
        return self.samples[-1].age_s if self.samples else 0.0

    @property
    def steady(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.age_s >= WARM_UP_S]


@dataclass(frozen=True, slots=True)
class Growth:
    """How a process that lived long changed after its warm-up: medians of the first and the last
    quarter of that time."""

    name: str
    lived_s: float
    rss_warm_bytes: float
    rss_end_bytes: float
    rss_bytes_per_min: float
    """Least squares over the time after the warm-up."""
    files_warm: float
    files_end: float
    threads_warm: float
    threads_end: float

    @property
    def trouble(self) -> str:
        """What grows beyond the limits; empty when nothing does."""
        grown = self.rss_end_bytes - self.rss_warm_bytes
        if grown > MAX_RSS_GROWTH_BYTES and self.rss_bytes_per_min > MAX_RSS_BYTES_PER_MIN:
            return (
                f"memory of {self.name} grew by {grown / 1e6:.0f} MB, "
                f"{self.rss_bytes_per_min / 1e6:.1f} MB a minute"
            )
        if self.files_end - self.files_warm > MAX_FILE_GROWTH:
            return f"open files of {self.name} grew from {self.files_warm} to {self.files_end}"
        return ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "trouble": self.trouble}


def growth(life: Life) -> Growth | None:
    """None for a life too short to tell."""
    steady = life.steady
    if life.lived_s < LIVED_LONG_S or len(steady) < 8:
        return None
    quarter = max(2, len(steady) // 4)
    first, last = steady[:quarter], steady[-quarter:]

    def median(samples: Sequence[Sample], name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in samples))

    slope = statistics.linear_regression(
        [sample.age_s for sample in steady], [sample.rss_bytes for sample in steady]
    ).slope
    return Growth(
        name=life.name,
        lived_s=life.lived_s,
        rss_warm_bytes=median(first, "rss_bytes"),
        rss_end_bytes=median(last, "rss_bytes"),
        rss_bytes_per_min=60 * slope,
        files_warm=median(first, "num_files"),
        files_end=median(last, "num_files"),
        threads_warm=median(first, "num_threads"),
        threads_end=median(last, "num_threads"),
    )


class Sampler:
    """Follows processes by name, and sees when one has been started again."""

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self._now: dict[str, tuple[Life, psutil.Process]] = {}

    def sample(self, name: str, pid: int) -> None:
        """A process that has ended meanwhile is passed over."""
        try:
            if name not in self._now or self._now[name][0].pid != pid:
                self._now[name] = (Life(name, pid), psutil.Process(pid))
                self.lives.append(self._now[name][0])
            life, process = self._now[name]
            with process.oneshot():
                life.samples.append(
                    Sample(
                        age_s=time.time() - process.create_time(),
                        rss_bytes=process.memory_info().rss,
                        num_files=process.num_fds(),
                        num_threads=process.num_threads(),
                    )
                )
        except psutil.Error:
            return
