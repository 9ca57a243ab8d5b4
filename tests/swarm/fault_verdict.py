# SPDX-License-Identifier: Apache-2.0
"""What became of a swarm after a fault: judged by its event log, told in a line."""

import itertools
import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.coordinator.run_view import audit
from shoal.coordinator.state import (
    Event,
    RolledBack,
    StageReplayed,
    StepApplied,
    StepCommitted,
    StepOpened,
)
from shoal.protocol.faults import FiredFault

from .fault_cases import Case
from .harness import Swarm

REPORT_VARIABLE = "SHOAL_FAULT_REPORT"
"""Names a file: a line of JSON for every case is added to it."""

_REROUTED = re.compile(r"(\d+) microbatch(?:es)? rerouted to")


@dataclass(frozen=True, slots=True)
class Aftermath:
    """Times are reported, never judged: they depend on the machine."""

    kind: str
    faults: list[str]
    step: int
    """The one that was under way at the first fault."""
    seconds_to_next_commit: float
    """From the first fault to the first new step after the last one."""
    steps_to_next_commit: float
    """The same in units of the swarm's median step."""
    longest_gap_steps: float
    """Between two commits from the first fault on, in the same units: a fault may also hold up
    the steps after the one that it hit."""
    attempts: int
    """How often steps were opened beyond once each."""
    rolled_back: int
    replayed: int
    steps_recomputed: int
    microbatches_moved: int
    """Leases that went to another node; those that had their receipt are computed twice."""


def check_since(swarm: Swarm, first_event: int) -> None:
    """Every step that was committed since has the undisturbed run's bits, whoever computed it,
    and counts every microbatch once."""
    before, since = swarm.log()[:first_event], swarm.log()[first_event:]
    reference = swarm.reference
    records = [e for e in since if isinstance(e, StepCommitted)]
    for record in records:
        truth = reference.truth(record.step)
        assert record.sums_digests == truth.sums_digests, f"sums of step {record.step}"
        assert (record.loss, record.validation_loss, record.grad_norm) == (
            truth.loss, truth.validation_loss, truth.grad_norm,
        ), f"record of step {record.step}"  # fmt: skip
    for applied in since:
        if isinstance(applied, StepApplied) and applied.step:
            truth = reference.truth(applied.step)
            assert applied.weights_digests == truth.weights_digests, f"weights: {applied.step}"
    assert audit(reference.run, records) == (0, 0), "microbatches missing or double"
    known = {e.step for e in before if isinstance(e, StepCommitted)}
    new = {record.step for record in records} - known
    highest = max(known, default=0)
    assert new == set(range(highest + 1, highest + 1 + len(new))), "steps are lost"


def aftermath(
    case: Case,
    fired: Sequence[FiredFault],
    events: Sequence[Event],
    first_event: int,
    new_log: str,
) -> Aftermath:
    """`new_log`: what the coordinator has logged since `first_event`, for people."""
    since = events[first_event:]
    commits = [e for e in events if isinstance(e, StepCommitted)]
    step_s = max(statistics.median(_gaps([e.time_s for e in commits])), 1e-6)
    first_s, last_s = fired[0].time_s, fired[-1].time_s
    known = max((e.step for e in commits if e.time_s <= last_s), default=0)
    after = next((e for e in commits if e.time_s > last_s and e.step > known), None)
    seconds = after.time_s - first_s if after is not None else float("inf")
    from_fault = [first_s, *(e.time_s for e in commits if e.time_s > first_s)]
    recomputed = [e.step for e in since if isinstance(e, StepCommitted)]
    opened = [e.step for e in since if isinstance(e, StepOpened)]
    return Aftermath(
        kind=case.kind,
        faults=[str(strike) for strike in case.strikes],
        step=fired[0].step,
        seconds_to_next_commit=round(seconds, 3),
        steps_to_next_commit=round(seconds / step_s, 1),
        longest_gap_steps=round(max(_gaps(from_fault), default=0.0) / step_s, 1),
        attempts=len(opened) - len(set(opened)),
        rolled_back=sum(isinstance(e, RolledBack) for e in since),
        replayed=sum(isinstance(e, StageReplayed) for e in since),
        steps_recomputed=len(recomputed) - len(set(recomputed)),
        microbatches_moved=sum(int(n) for n in _REROUTED.findall(new_log)),
    )


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def report(outcome: Aftermath) -> None:
    path = os.environ.get(REPORT_VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
