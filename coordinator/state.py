# SPDX-License-Identifier: Apache-2.0
"""The durable state of a run: events that are logged, and a pure reducer over them.

The state is bounded, however long the run: compaction moves the records of old steps to the
history (`compaction.py`). What is not here (receipts, sessions, queues) is soft and comes back
from the nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from shoal.coordinator.boundary_sources import BoundarySources, Rebuilt
from shoal.coordinator.quorum import Council
from shoal.coordinator.recovered import Recovered, Recovery
from shoal.coordinator.step_scale import BackOffNote, ScaleHistory, StepScale
from shoal.coordinator.timeline import Timeline
from shoal.protocol.errors import StorageError
from shoal.protocol.ids import NOBODY, Incarnation, PeerId, Stage

MAX_STANDBYS = 8


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
    voters: tuple[PeerId, ...] = ()
    """With the first one in a run: who decides, beside this log, until a step is committed."""


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
    traffic: dict[str, tuple[int, ...]] = {}
    """`boundary_bytes` by kind, and for each by boundary (coordinator/boundary_traffic.py)."""
    term: int = 0
    """The term in which it was committed; 0 in logs from before there were terms."""
    commits: int = 0
    """Counts records in the order of their commits."""
    log_id: str = ""
    """The log in which it was first recorded."""
    voters: tuple[PeerId, ...] = ()
    """The nodes that prepared it and lived: they decide who leads from here on."""
    peers: dict[Incarnation, PeerId] = {}
    """Of `contributions`."""


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


class TermOpened(Event):
    """A coordinator leads from here on."""

    kind: Literal["term_opened"] = "term_opened"
    term: int
    log_id: str
    forced: bool = False
    """By the operator, who knows that nobody else leads: until a step opens, this log decides
    alone."""


class StandbyRegistered(Event):
    """From the first one on, a majority decides who leads."""

    kind: Literal["standby_registered"] = "standby_registered"
    log_id: str
    admission: str
    session: str


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
    | TermOpened
    | StandbyRegistered
    | RunFinished
    | Compacted
)

EVENT_KINDS: dict[str, type[Event]] = {
    cls.model_fields["kind"].default: cls for cls in get_args(AnyEvent)
}

DURABLE = tuple(cls for cls in EVENT_KINDS.values() if cls is not StepApplied)
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
    term: int = 0
    """The newest term that a coordinator of this log, or of the log it follows, led in."""
    commits: int = 0
    """Records so far, also of recomputed steps."""
    last_record: StepCommitted | None = None
    """The one committed last; `records` keeps the first of each step."""
    council: Council = field(default_factory=Council)
    """Who decides about the next commit."""
    council_before: Council = field(default_factory=Council)
    """Who decided about the last one, until the step after it has opened."""
    standbys: dict[str, StandbyRegistered] = field(default_factory=dict)
    """By log id, the newest last; at most `MAX_STANDBYS`."""

    @property
    def term_of_last_record(self) -> int:
        return self.last_record.term if self.last_record is not None else 0

    @property
    def is_alone(self) -> bool:
        """Whether nobody but the coordinator at this log can ever have led."""
        return not self.standbys


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
            # It opens once quorums of both councils keep the last record: that one is settled.
            council = state.council
            if not council.voters and event.voters:  # nobody has prepared anything yet
                council = Council(frozenset(event.voters), council.log_id)
            return replace(state, attempt=event.attempt, council=council, council_before=council)
        case NumbersBackedOff():
            scale = StepScale(event.loss_scale, event.coarsen)
            back_off = BackOffNote(event.step, event.reason)
            return replace(state, scales=state.scales.after_back_off(scale, back_off))
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
                sources=state.sources.with_step(
                    event.step, event.contributions, _with_peers(state.peers, event.peers)
                ),
                recovered=state.recovered.with_step(event.step, event.time_s),
                term=max(state.term, event.term),
                commits=event.commits or state.commits + 1,
                last_record=event,
                council=Council(frozenset(event.voters), event.log_id),
                council_before=state.council,
                peers=_with_peers(state.peers, event.peers),
            )
        case StepApplied():
            digests = Timeline.of(state.weights_digests)
            return replace(state, weights_digests=digests.adding(event.step, event.weights_digests))
        case SnapshotStored():
            return replace(
                state, snapshot_step=event.step, sources=state.sources.after_snapshot(event.step)
            )
        case RolledBack():
            recovered = state.recovered.with_rollback(
                from_step=state.step,
                to_step=event.to_step,
                time_s=event.time_s,
                reason=event.reason,
            )
            return replace(state, step=event.to_step, attempt=0, recovered=recovered)
        case StageReplayed():
            rebuilt = Rebuilt(event.stage, event.peer_id, event.from_step + 1, event.to_step)
            replayed = Recovery(
                time_s=event.time_s,
                stage=event.stage,
                from_step=event.from_step,
                to_step=event.to_step,
                seconds=event.seconds,
                log_bytes=event.log_bytes,
            )
            return replace(
                state,
                sources=state.sources.with_rebuilt(rebuilt),
                recovered=state.recovered.with_replay(replayed),
            )
        case Paused():
            return replace(state, paused=event.reason)
        case Resumed():
            return replace(state, paused=None)
        case TermOpened():
            return _opened(event, state)
        case StandbyRegistered():
            standbys = {k: v for k, v in state.standbys.items() if k != event.log_id}
            standbys[event.log_id] = event
            newest = dict(list(standbys.items())[-MAX_STANDBYS:])
            return replace(state, standbys=newest)
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


def _with_peers(
    known: Mapping[int, PeerId], named: Mapping[Incarnation, PeerId]
) -> Mapping[int, PeerId]:
    peers = Timeline.of(known)
    for who in sorted(named.keys() - known.keys()):
        peers = peers.adding(who, named[who])
    return peers


def _opened(event: TermOpened, state: RunState) -> RunState:
    opened = replace(
        state,
        term=event.term,
        # Never two incarnations with one number, whoever gave them out in which term.
        last_incarnation=max(state.last_incarnation, Incarnation((event.term - 1) << 32)),
    )
    if not event.forced and state.council.log_id:
        return opened
    council = Council(frozenset() if event.forced else state.council.voters, event.log_id)
    return replace(opened, council=council, council_before=council)


def dump(state: RunState) -> dict[str, Any]:
    """As JSON, for `Compacted`."""
    plain = {f.name: getattr(state, f.name) for f in fields(state)}
    plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in plain.items()}
    dumped: dict[str, Any] = _STATE.dump_python(RunState(**plain), mode="json")
    return dumped


def parse(kind: str, payload: Mapping[str, Any]) -> AnyEvent:
    """A logged event. Raises `StorageError` for one that this release doesn't know."""
    try:
        return EVENT_KINDS[kind].model_validate(payload)  # type: ignore[return-value]
    except (KeyError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "unknown"
        raise StorageError(
            f"the event log has an event {kind[:40]!r} that this release can't read ({why}). Use "
            "the release that wrote it, or restore the run folder from a copy."
        ) from None


def replay(events: Iterable[tuple[str, Mapping[str, Any]]]) -> RunState:
    """The state that logged (kind, payload) pairs add up to."""
    state = RunState()
    for kind, payload in events:
        state = apply(parse(kind, payload), state)
    return state
