# SPDX-License-Identifier: Apache-2.0
"""What a demo did, from the run's public view. Pure."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from shoal.coordinator.dashboard.views import RunView, StepPoint
from shoal.units import human_bytes


@dataclass(slots=True)
class FaultRecord:
    """A fault that was done to a process."""

    step: int
    """The one that was under way."""
    moment: str
    action: str
    node: str
    """Its name, or "coordinator"."""
    stage: int | None
    """None for the coordinator."""
    seconds: float
    """How long it lasted; 0 where the process ended."""
    at_s: float
    """Seconds after the start of the demo."""
    recovered_after_s: float | None = None
    """Until the first step was committed that the fault could hold up; None when none was."""
    others: int = 0
    """Nodes that held the stage beside this one when the fault was drawn."""


@dataclass(slots=True)
class Churn:
    """Trouble that was made, noted as it happens."""

    first_step: int = 0
    """The step that was open when it began; 0: there was none."""
    settled_step: int | None = None
    """The first step after it: what was killed may take part again."""
    nodes_killed: int = 0
    nodes_joined_late: int = 0
    crashes: int = 0
    """Processes that ended of themselves."""
    faults: list[FaultRecord] | None = None
    """None where faults weren't drawn."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second; None where no step fell into the span."""

    before: float | None
    during: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    steps_done: int
    steps_lost: int
    microbatches_missing: int
    microbatches_double: int
    nodes_killed: int
    nodes_joined_late: int
    loss_first: float | None
    loss_last: float | None
    validation_loss: float | None
    tokens_per_s: Speed
    bytes_moved: int
    bytes_per_step: int
    weights_digest: str | None
    killed_in_step: int | None
    seconds: float
    failure: str
    crashes: int = 0
    faults: list[FaultRecord] | None = None

    def to_json(self) -> bytes:
        values = asdict(self)
        if self.faults is None:
            del values["faults"]
        return json.dumps(values, indent=2).encode() + b"\n"

    def lines(self) -> list[str]:
        speed = self.tokens_per_s

        def rate(value: float | None) -> str:
            return "–" if value is None else f"{value:,.0f}"

        def loss(value: float | None) -> str:
            return "–" if value is None else f"{value:.3f}"

        rows: list[tuple[str, Any]] = [
            ("steps done", self.steps_done),
            ("steps lost", self.steps_lost),
            ("microbatches missing", self.microbatches_missing),
            ("microbatches counted twice", self.microbatches_double),
            ("nodes killed / joined late", f"{self.nodes_killed} / {self.nodes_joined_late}"),
            ("loss first / last", f"{loss(self.loss_first)} / {loss(self.loss_last)}"),
            (
                "tokens/s before / during / after",
                f"{rate(speed.before)} / {rate(speed.during)} / {rate(speed.after)}",
            ),
            *self._fault_rows(),
            ("bytes moved", human_bytes(self.bytes_moved)),
            ("weights SHA-256", self.weights_digest or "–"),
        ]
        width = max(len(name) for name, _ in rows)
        return ["", *(f"{name:<{width}}  {value}" for name, value in rows)]

    def _fault_rows(self) -> list[tuple[str, Any]]:
        if self.faults is None:
            return []
        kinds = Counter(fault.action for fault in self.faults)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        rows: list[tuple[str, Any]] = [
            ("faults survived", f"{len(self.faults)}" + f" ({listed})" * bool(listed))
        ]
        took = [f.recovered_after_s for f in self.faults if f.recovered_after_s is not None]
        if took:
            times = f"{median(took):.1f} s / {max(took):.1f} s"
            rows.append(("next step after, median / worst", times))
        if self.crashes:
            rows.append(("ended of themselves", self.crashes))
        return rows


def summarize(view: RunView, churn: Churn, *, wanted_steps: int, seconds: float) -> Summary:
    """`seconds` is how long the run took, coordinator restarts included."""
    return Summary(
        steps_done=view.step,
        steps_lost=view.steps_lost,
        microbatches_missing=view.microbatches_missing,
        microbatches_double=view.microbatches_double,
        nodes_killed=churn.nodes_killed,
        nodes_joined_late=churn.nodes_joined_late,
        loss_first=view.loss_first,
        loss_last=view.loss,
        validation_loss=view.validation_loss,
        tokens_per_s=_speed(view, churn),
        bytes_moved=view.bytes_total,
        bytes_per_step=view.boundary_bytes_per_step + view.reduce_bytes_per_step,
        weights_digest=view.weights_digest,
        killed_in_step=(churn.first_step or None) if churn.nodes_killed else None,
        seconds=seconds,
        failure=_failure(view, wanted_steps),
        crashes=churn.crashes,
        faults=churn.faults,
    )


def _failure(view: RunView, wanted_steps: int) -> str:
    """Why the demo failed, in a line; empty when nothing was lost."""
    if view.state == "failed":
        return f"the run failed: {view.waiting_for}"
    if view.step != wanted_steps or view.steps_lost:
        return f"{view.step} of {wanted_steps} steps done, {view.steps_lost} lost"
    if view.microbatches_missing or view.microbatches_double:
        return (
            f"{view.microbatches_missing} microbatches are missing, "
            f"{view.microbatches_double} were counted twice"
        )
    if view.weights_digest is None:
        return "the final weights were not stored"
    return ""


def _speed(view: RunView, churn: Churn) -> Speed:
    points, tokens = view.history, view.spec_summary.tokens_per_step
    if not churn.first_step:
        return Speed(_rate(points[1:] or points, tokens), None, None)
    back = churn.settled_step or (points[-1].step + 1 if points else 1)
    # The first step warms caches up; it counts only where there is no other.
    early = [p for p in points if p.step < churn.first_step]
    return Speed(
        before=_rate(early[1:] or early, tokens),
        during=_rate([p for p in points if churn.first_step <= p.step < back], tokens),
        after=_rate([p for p in points if p.step >= back], tokens),
    )


def _rate(points: Sequence[StepPoint], tokens_per_step: int) -> float | None:
    seconds = sum(point.seconds for point in points)
    return len(points) * tokens_per_step / seconds if seconds else None
