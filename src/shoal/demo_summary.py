# SPDX-License-Identifier: Apache-2.0
"""What a demo did, from the run's public view. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.coordinator.dashboard.views import RunView, StepPoint
from shoal.status import human_bytes


@dataclass(slots=True)
class Kill:
    """A node killed in mid-step and its replacement, noted as it happens."""

    step: int | None
    """The step asked for; None: nobody is killed."""
    at_step: int = 0
    """The step that was open when it happened; 0: it did not."""
    name: str = ""
    stage: int = 0
    replacement_pid: int | None = None
    rejoined_step: int | None = None
    """The first step that the replacement may take part in."""


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

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=2).encode() + b"\n"

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
            ("bytes moved", human_bytes(self.bytes_moved)),
            ("weights SHA-256", self.weights_digest or "–"),
        ]
        width = max(len(name) for name, _ in rows)
        return ["", *(f"{name:<{width}}  {value}" for name, value in rows)]


def summarize(view: RunView, kill: Kill, *, wanted_steps: int) -> Summary:
    killed = bool(kill.at_step)
    return Summary(
        steps_done=view.step,
        steps_lost=view.steps_lost,
        microbatches_missing=view.microbatches_missing,
        microbatches_double=view.microbatches_double,
        nodes_killed=int(killed),
        nodes_joined_late=int(kill.rejoined_step is not None),
        loss_first=view.loss_first,
        loss_last=view.loss,
        validation_loss=view.validation_loss,
        tokens_per_s=_speed(view, kill),
        bytes_moved=view.bytes_total,
        bytes_per_step=view.boundary_bytes_per_step + view.reduce_bytes_per_step,
        weights_digest=view.weights_digest,
        killed_in_step=kill.at_step or None,
        seconds=view.now_s - view.started_s,
        failure=_failure(view, wanted_steps),
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


def _speed(view: RunView, kill: Kill) -> Speed:
    points, tokens = view.history, view.spec_summary.tokens_per_step
    if not kill.at_step:
        return Speed(_rate(points[1:] or points, tokens), None, None)
    back = kill.rejoined_step or points[-1].step + 1
    # The first step warms caches up; it counts only where there is no other.
    early = [p for p in points if p.step < kill.at_step]
    return Speed(
        before=_rate(early[1:] or early, tokens),
        during=_rate([p for p in points if kill.at_step <= p.step < back], tokens),
        after=_rate([p for p in points if p.step >= back], tokens),
    )


def _rate(points: Sequence[StepPoint], tokens_per_step: int) -> float | None:
    seconds = sum(point.seconds for point in points)
    return len(points) * tokens_per_step / seconds if seconds else None
