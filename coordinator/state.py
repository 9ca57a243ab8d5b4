# SPDX-License-Identifier: Apache-2.0
"""The durable state of a run: events that are logged, and a pure reducer over them.

The state is bounded, however long the run: compaction moves the records of old steps to the
history (`compaction.py`). What is not here (receipts, sessions, queues) is soft and comes back
from the nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from shoal.coordinator.boundary_sources import BoundarySources, Rebuilt
from shoal.coordinator.recovered import Recovered
from shoal.coordinator.step_scale import ScaleHistory, StepScale
from shoal.coordinator.timeline import Timeline
from shoal.protocol.ids import NOBODY, Incarnation, PeerId, Stage


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    time_s: float


class RunCreated(Event):
    kind: Literal["run_created"] = "run_created"
    run_digest: str


class StageAssigned(Event):
    kind: Literal["stage_assigned"] = "stage_assigned"
    incarnation: Incarnation
    peer_id: PeerId
    name: str
    stage: int


class NodeFenced(Event):
    kind: Literal["node_fenced"] = "node_fenced"
    incarnation: Incarnation
    reason: str


class StepOpened(Event):
    kind: Literal["step_opened"] = "step_opened"
    step: int
    attempt: int


class NumbersBackedOff(Event):
    """From this step on, until they change again: the loss scale, and the low bits of the fixed
    point that are given up."""

    kind: Literal["numbers_backed_off"] = "numbers_backed_off"
    step: int
    loss_scale: float
    coarsen: int
    reason: str


class StepCommitted(Event):
    """The step record: what a replay needs, and what the ledger proves."""

    kind: Literal["step_committed"] = "step_committed"
    step: int
    attempt: int
    loss: float
    validation_loss: float | None
    grad_norm: float
    clip_scale: float
    learning_rate: float
    scale_exponent: int
    loss_scale: float
    num_tokens: int
    sums_digests: tuple[int, ...]
    """By stage."""
    contributions: tuple[dict[Incarnation, tuple[int, ...]], ...]
    """By stage: which incarnation's gradient was counted for which microbatches."""
    boundary_bytes: int
    reduce_bytes: int
    seconds: float


class StepApplied(Event):
    kind: Literal["step_applied"] = "step_applied"
    step: int
    weights_digests: tuple[int, ...]
    """By stage."""


class SnapshotStored(Event):
    kind: Literal["snapshot_stored"] = "snapshot_stored"
    step: int


class RolledBack(Event):
    kind: Literal["rolled_back"] = "rolled_back"
    to_step: int
    reason: str


class StageReplayed(Event):
    """A stage whose last holder was lost is held again, its state computed anew out of its
    neighbours' logs."""

    kind: Literal["stage_replayed"] = "stage_replayed"
    stage: Stage
    peer_id: PeerId
    from_step: int
    """The snapshot's; 0 is the beginning."""
    to_step: int
    seconds: float
    log_bytes: int


class Paused(Event):
    kind: Literal["paused"] = "paused"
    reason: str


class Resumed(Event):
    kind: Literal["resumed"] = "resumed"


class RunFinished(Event):
    kind: Literal["run_finished"] = "run_finished"
    weights_sha256: str


class Compacted(Event):
    """Stands for all events before it: what they add up to, without the records of their steps."""

    kind: Literal["compacted"] = "compacted"
    state: dict[str, Any]
    """As `dump` makes it."""


AnyEvent = (
    RunCreated
    | StageAssigned
    | NodeFenced
    | StepOpened
    | NumbersBackedOff
    | StepCommitted
    | StepApplied
    | SnapshotStored
    | RolledBack
    | StageReplayed
    | Paused
    | Resumed
    | RunFinished
    | Compacted
)

EVENT_KINDS: dict[str, type[Event]] = {
    cls.model_fields["kind"].default: cls
    for cls in (
        RunCreated,
        StageAssigned,
        NodeFenced,
        StepOpened,
        NumbersBackedOff,
        StepCommitted,
        StepApplied,
        SnapshotStored,
        RolledBack,
        StageReplayed,
        Paused,
        Resumed,
        RunFinished,
        Compacted,
    )
}

DURABLE = (
    RunCreated,
    StageAssigned,
    NodeFenced,
    StepOpened,
    NumbersBackedOff,
    StepCommitted,
    SnapshotStored,
    RolledBack,
    StageReplayed,
    Paused,
    Resumed,
    RunFinished,
    Compacted,
)
"""Fsynced before anything follows from them. The rest can be had again."""


@dataclass(frozen=True, slots=True)
class RunState:
    step: int = 0
    """Committed steps contained in the weights."""
    highest_step: int = 0
    """The highest step ever committed; above `step` after a rollback."""
    attempt: int = 0
    """Attempts at step + 1 so far."""
    last_incarnation: Incarnation = NOBODY
    records: Mapping[int, StepCommitted] = field(default_factory=Timeline)
    """Of recent steps; `RunLog.recorded` knows the older ones too."""
    weights_digests: Mapping[int, tuple[int, ...]] = field(default_factory=Timeline)
    """Of recent steps, of step 0, and always of `step` where they were logged."""
    peers: Mapping[int, PeerId] = field(default_factory=Timeline)
    """Of incarnations that are attached or named in `records`."""
    scales: ScaleHistory = field(default_factory=ScaleHistory)
    snapshot_step: int = 0
    paused: str | None = None
    weights_sha256: str | None = None
    sources: BoundarySources = field(default_factory=BoundarySources)
    """Whose boundary logs a replay would read."""
    recovered: Recovered = field(default_factory=Recovered)


_STATE = TypeAdapter(RunState)


def apply(event: AnyEvent, state: RunState) -> RunState:
    """The state after `event`. Pure: the argument is left as it was."""
    match event:
        case StageAssigned():
            return replace(
                state,
                last_incarnation=max(state.last_incarnation, event.incarnation),
                peers=Timeline.of(state.peers).adding(event.incarnation, event.peer_id),
            )
        case StepOpened():
            return replace(state, attempt=event.attempt)
        case NumbersBackedOff():
            scale = StepScale(event.loss_scale, event.coarsen)
            return replace(state, scales=state.scales.after_back_off(scale))
        case StepCommitted():
            # The first record of a step stands: a recomputed step must equal it. A log with a hole
            # is read as it is; `RunView.steps_lost` shows the hole.
            records = state.records
            if event.step not in records:
                records = Timeline.of(records).adding(event.step, event)
            return replace(
                state,
                step=event.step,
                highest_step=max(state.highest_step, event.step),
                attempt=0,
                records=records,
                scales=_scales_after(event, state),
                sources=state.sources.with_step(event.step, event.contributions, state.peers),
                recovered=state.recovered.with_step(event.step, event.time_s),
            )
        case StepApplied():
            digests = Timeline.of(state.weights_digests)
            return replace(state, weights_digests=digests.adding(event.step, event.weights_digests))
        case SnapshotStored():
            return replace(
                state, snapshot_step=event.step, sources=state.sources.after_snapshot(event.step)
            )
        case RolledBack():
            recovered = state.recovered.with_rollback(from_step=state.step, time_s=event.time_s)
            return replace(state, step=event.to_step, attempt=0, recovered=recovered)
        case StageReplayed():
            rebuilt = Rebuilt(event.stage, event.peer_id, event.from_step + 1, event.to_step)
            return replace(
                state,
                sources=state.sources.with_rebuilt(rebuilt),
                recovered=state.recovered.with_replay(event.seconds, event.log_bytes),
            )
        case Paused():
            return replace(state, paused=event.reason)
        case Resumed():
            return replace(state, paused=None)
        case RunFinished():
            return replace(state, weights_sha256=event.weights_sha256)
        case Compacted():
            return _STATE.validate_python(event.state)
        case RunCreated() | NodeFenced():
            return state


def _scales_after(event: StepCommitted, state: RunState) -> ScaleHistory:
    if event.step <= state.highest_step:  # recomputed, with what its record says
        return state.scales
    return state.scales.after_commit(
        event.step,
        loss_scale=event.loss_scale,
        exponent=event.scale_exponent,
        tokens_per_step=event.num_tokens,
    )


def dump(state: RunState) -> dict[str, Any]:
    """As JSON, for `Compacted`."""
    plain = {f.name: getattr(state, f.name) for f in fields(state)}
    plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in plain.items()}
    dumped: dict[str, Any] = _STATE.dump_python(RunState(**plain), mode="json")
    return dumped


def parse(kind: str, payload: Mapping[str, Any]) -> AnyEvent:
    """A logged event."""
    return EVENT_KINDS[kind].model_validate(payload)  # type: ignore[return-value]


def replay(events: Iterable[tuple[str, Mapping[str, Any]]]) -> RunState:
    """The state that logged (kind, payload) pairs add up to."""
    state = RunState()
    for kind, payload in events:
        state = apply(parse(kind, payload), state)
    return state
