# SPDX-License-Identifier: Apache-2.0
"""From what a session gave to the rows of `docs/reliability.md`. Pure."""

import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outcomes import LogSize, Outcome, Result
from process_samples import growth

from shoal.demo_summary import FaultRecord

MAX_LOG_BYTES_PER_STEP = 400
"""Of the event log after its first half: a compacted step is one short row."""
MIN_LOG_STEPS = 2000


@dataclass(frozen=True, slots=True)
class Loss:
    """What faults cost, by comparison with the undisturbed stretches beside them."""

    num_faults: int
    lost_s: float
    """For each fault."""
    goodput: float
    """Committed tokens a second, over undisturbed tokens a second."""


def loss(quiet: Sequence[Outcome], disturbed: Sequence[Outcome]) -> Loss:
    quiet_steps = sum(o.steps for o in quiet)
    quiet_s = sum(o.seconds for o in quiet)
    seconds = sum(o.seconds for o in disturbed)
    steps = sum(o.steps for o in disturbed)
    faults = sum(len(o.faults) for o in disturbed)
    if not (quiet_steps and seconds):
        return Loss(faults, 0.0, 0.0)
    step_s = quiet_s / quiet_steps
    lost_s = (seconds - steps * step_s) / faults if faults else 0.0
    return Loss(faults, lost_s, steps * step_s / seconds)


def kind(fault: FaultRecord) -> str:
    """ "kill, a node of several", "kill, a stage's only node", "kill, the coordinator"."""
    if fault.stage is None:
        whom = "the coordinator"
    else:
        whom = "a node of several" if fault.others else "a stage's only node"
    what = fault.action.replace("_", " ")
    if fault.action == "stop":
        what += " within a lease" if fault.seconds < 5.0 else " beyond a lease"
    return f"{what}, {whom}"


def computed_twice(result: Result) -> float:
    """Share of all (microbatch, stage) computations that were not the counted one."""
    taken = sum(o.taken for o in result.outcomes)
    useful = sum(o.steps for o in result.outcomes) * result.pairs_per_step
    return max(0.0, taken - useful) / taken if taken else 0.0


def log_bytes_per_step(sizes: Sequence[LogSize]) -> float | None:
    """Growth of the event log's file over the second half; None for too few steps."""
    half = sizes[len(sizes) // 2 :]
    if len(half) < 8 or half[-1].step - half[0].step < MIN_LOG_STEPS:
        return None
    return statistics.linear_regression(
        [size.step for size in half], [size.file_bytes for size in half]
    ).slope


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def fault_table(faults: Sequence[FaultRecord], step_s: float) -> str:
    """Kinds tried, and the time until the next committed step in undisturbed steps."""
    kinds: dict[str, list[FaultRecord]] = {}
    for fault in faults:
        kinds.setdefault(kind(fault), []).append(fault)
    rows = []
    for name, group in sorted(kinds.items()):
        took = [f.recovered_after_s for f in group if f.recovered_after_s is not None]
        if took and step_s:
            times = (
                f"{statistics.median(took) / step_s:.1f}",
                f"{max(took) / step_s:.1f}",
                f"{max(took):.1f} s",
            )
        else:
            times = ("–", "–", "–")
        rows.append((name, len(group), len(took), *times))
    header = ("fault", "tried", "survived", "median, steps", "worst, steps", "worst")
    return table(header, rows)


def memory_table(result: Result) -> tuple[str, list[str]]:
    """(a row for each process that lived long, what grows too much)."""
    rows, troubles = [], []
    for life in result.sampler.lives:
        grown = growth(life)
        if grown is None:
            continue
        rows.append(
            (
                grown.name,
                f"{grown.lived_s:.0f} s",
                f"{grown.rss_warm_bytes / 1e6:.0f} / {grown.rss_end_bytes / 1e6:.0f} MB",
                f"{grown.rss_bytes_per_min / 1e6:+.2f} MB/min",
                f"{grown.files_warm:.0f} / {grown.files_end:.0f}",
                f"{grown.threads_warm:.0f} / {grown.threads_end:.0f}",
            )
        )
        if grown.trouble:
            troubles.append(grown.trouble)
    header = (
        "process", "lived", "memory warm / end", "slope", "open files warm / end",
        "threads warm / end",
    )  # fmt: skip
    return table(header, rows), troubles


def machine() -> str:
    """ "2 cores of AMD EPYC, Linux, Python 3.11.2, commit 0123abcd"."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"], cwd=Path(__file__).parent,
            capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
        commit = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    name = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return (
        f"{os.cpu_count()} cores of {name}, {platform.system()}, "
        f"Python {platform.python_version()}, commit {commit}"
    )
