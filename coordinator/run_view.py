# SPDX-License-Identifier: Apache-2.0
"""What people see of a run, made from the conductor's books."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from shoal.coordinator import step_row
from shoal.coordinator.conductor import Conductor
from shoal.coordinator.dashboard.views import (
    EventLine,
    NodeState,
    NodeView,
    RunState,
    RunView,
    SpecSummary,
    StageView,
    StandbyView,
    StepPoint,
    thin_history,
)
from shoal.coordinator.history import StepHistory
from shoal.coordinator.sessions import Session
from shoal.coordinator.state import RunState as DurableState
from shoal.coordinator.state import StepCommitted
from shoal.coordinator.step_row import StepRow
from shoal.coordinator.step_runner import Phase
from shoal.protocol.costs import run_parameters
from shoal.protocol.ids import PeerId
from shoal.protocol.spec import ResolvedRun, StageSpec

_SPEED_STEPS = 5
"""Tokens per second are a mean over so many steps."""

_MAX_CACHED = 10_000


def audit(run: ResolvedRun, records: Sequence[StepCommitted]) -> tuple[int, int]:
    """(missing, double): microbatches that a stage's committed gradient lacks or has twice."""
    return step_row.audit(records, run.spec.batch.microbatches)


def new_records(state: DurableState, history: StepHistory) -> list[StepCommitted]:
    """Records of steps that have no row in the history yet, ascending."""
    last = history.totals.last_step
    return [
        record for step, record in state.records.items() if step > last or history.row(step) is None
    ]


def steps_lost(state: DurableState, history: StepHistory) -> int:
    """Steps up to the highest committed one that have no record: 0, or the log has a hole."""
    return state.highest_step - history.totals.num_steps - len(new_records(state, history))


def tokens_per_s(records: Sequence[StepCommitted | StepRow]) -> float:
    seconds = sum(record.seconds for record in records)
    return sum(record.num_tokens for record in records) / seconds if seconds else 0.0


def stage_parts(stage: StageSpec) -> tuple[str, str]:
    """("0–1", "embedding + layers 0–1")."""
    last = stage.end - 1
    layers = str(last) if last == stage.start else f"{stage.start}–{last}"
    parts = [f"layer{'' if last == stage.start else 's'} {layers}"]
    if stage.is_first:
        parts.insert(0, "embedding")
    if stage.is_last:
        parts.append("head")
    return layers, " + ".join(parts)


class ConductorView:
    """The dashboard's `ViewSource`."""

    def __init__(self, conductor: Conductor, make_link: Callable[[], str]) -> None:
        self._conductor = conductor
        self._make_link = make_link
        self._changed = asyncio.Event()
        conductor.on_change = self._changed.set
        self._ended_s: float | None = None
        self._compacted = 0  # rows of the history when the following was begun
        self._audited = (0, 0, 0)  # (records, missing, double)
        self._counted: tuple[int, Counter[PeerId]] = (0, Counter())
        self._earlier: dict[PeerId, int] = {}  # slots in the history

    async def changed(self, after_version: int) -> int:
        while self._conductor.version <= after_version:
            self._changed.clear()
            await self._changed.wait()
        return self._conductor.version

    async def pause(self) -> None:
        self._conductor.pause()

    async def resume(self) -> None:
        self._conductor.resume()

    async def stop(self) -> None:
        self._conductor.stop()

    async def snapshot(self) -> None:
        self._conductor.take_snapshot()

    async def join_link(self) -> str:
        return self._make_link()

    async def dismiss(self, peer_id: PeerId) -> None:
        if not self._conductor.dismiss(peer_id):
            raise LookupError(peer_id)

    # ---- the view ------------------------------------------------------------------------

    def view(self) -> RunView:
        conductor = self._conductor
        state, run, spec = conductor.state, conductor.run, conductor.run.spec
        earlier = conductor.history.totals
        records = new_records(state, conductor.history)
        if self._compacted != earlier.num_steps:
            self._compacted, self._earlier = earlier.num_steps, {}
            self._audited, self._counted = (0, 0, 0), (0, Counter())
        newest = records[-1] if records else None
        missing, double = self._audit(records)
        now_s = conductor.clock()
        if conductor.ended and self._ended_s is None:
            self._ended_s = now_s
        nodes = self._nodes(records)
        ledger = conductor.ledger
        validated = [r.validation_loss for r in records if r.validation_loss is not None]
        return RunView(
            run_id=run.run_id,
            name=spec.name,
            spec_summary=SpecSummary(
                num_params=run_parameters(
                    spec, [run.stage(stage) for stage in range(spec.pipeline.stages)]
                ),
                num_layers=spec.model.num_layers,
                dim=spec.model.dim,
                seq_len=spec.model.seq_len,
                vocab_size=spec.model.vocab_size,
                num_stages=spec.pipeline.stages,
                microbatches=spec.batch.microbatches,
                tokens_per_step=spec.tokens_per_step,
                boundary=spec.pipeline.boundary,
            ),
            state=self._state(),
            waiting_for=conductor.waiting_for,
            step=state.step,
            total_steps=spec.steps,
            attempt=state.attempt,
            receipts_done=ledger.receipts_done() if ledger else 0,
            receipts_total=ledger.receipts_total() if ledger else 0,
            receipts_taken=conductor.receipts_taken,
            loss=newest.loss if newest else None,
            loss_first=records[0].loss
            if earlier.first_loss is None and records
            else earlier.first_loss,
            validation_loss=validated[-1] if validated else earlier.validation_loss,
            tokens_per_s=tokens_per_s(records[-_SPEED_STEPS:]),
            boundary_bytes_per_step=newest.boundary_bytes if newest else 0,
            reduce_bytes_per_step=newest.reduce_bytes if newest else 0,
            bytes_total=earlier.num_bytes + sum(r.boundary_bytes + r.reduce_bytes for r in records),
            steps_lost=steps_lost(state, conductor.history),
            microbatches_missing=earlier.missing + missing,
            microbatches_double=earlier.double + double,
            started_s=conductor.started_s,
            now_s=self._ended_s or now_s,
            stages=[
                StageView(
                    stage=s,
                    layers=stage_parts(run.stage(s))[0],
                    parts=stage_parts(run.stage(s))[1],
                    nodes=[n for n in nodes if n.stage == s and not n.is_gone],
                )
                for s in range(spec.pipeline.stages)
            ],
            nodes=nodes,
            history=thin_history([*map(_point, conductor.history.points()), *map(_point, records)]),
            events=[
                EventLine(time_s=time_s, kind=kind, text=text)
                for time_s, kind, text in conductor.events
            ],
            log_bytes=sum(s.heartbeat.log_bytes for s in conductor.sessions.values()),
            replays=state.recovered.replays,
            replay_seconds=state.recovered.replay_seconds,
            replay_bytes=state.recovered.replay_bytes,
            rollbacks=state.recovered.rollbacks,
            rollback_seconds=state.recovered.rollback_seconds,
            term=conductor.terms.term,
            leads=conductor.terms.leads and conductor.deposed is None,
            standbys=self._standbys(),
            weights_digest=state.weights_sha256,
            snapshot_step=state.snapshot_step or None,
            join_link=None if conductor.ended else self._make_link(),
        )

    def _standbys(self) -> list[StandbyView]:
        conductor = self._conductor
        views = []
        for log_id, standby in conductor.state.standbys.items():
            if log_id == conductor.terms.log_id:
                continue
            follower = conductor.followers.get(log_id)
            behind = conductor.last_sequence - follower.sequence if follower is not None else 0
            views.append(
                StandbyView(
                    address=standby.session,
                    connected=follower is not None,
                    events_behind=max(0, behind),
                )
            )
        return views

    def _state(self) -> RunState:
        conductor = self._conductor
        if conductor.failed:
            return "failed"
        if conductor.ended:
            # Stopped early, it goes on when it is launched again; `waiting_for` says so.
            complete = conductor.state.step >= conductor.run.spec.steps
            return "finished" if complete else "paused"
        if conductor.state.paused is not None and conductor.phase is Phase.BETWEEN:
            return "paused"
        if conductor.stopping:
            return "draining"
        return "waiting" if conductor.waiting_for else "training"

    def _audit(self, records: Sequence[StepCommitted]) -> tuple[int, int]:
        count, missing, double = self._audited
        fresh = audit(self._conductor.run, records[count:])
        self._audited = (len(records), missing + fresh[0], double + fresh[1])
        return self._audited[1:]

    def _contributions(self, records: Sequence[StepCommitted]) -> Counter[PeerId]:
        count, counted = self._counted
        peers = self._conductor.state.peers
        for record in records[count:]:
            for stage in record.contributions:
                for incarnation, ids in stage.items():
                    counted[peers[incarnation]] += len(ids)
        self._counted = (len(records), counted)
        return counted

    def _slots(self, peer_id: PeerId) -> int:
        if peer_id not in self._earlier:
            if len(self._earlier) > _MAX_CACHED:
                self._earlier.clear()
            self._earlier[peer_id] = self._conductor.history.slots_of(peer_id)
        return self._earlier[peer_id]

    def _nodes(self, records: Sequence[StepCommitted]) -> list[NodeView]:
        conductor = self._conductor
        fresh = self._contributions(records)
        total = conductor.history.totals.counted + sum(fresh.values()) or 1
        sessions = [
            *((s, False) for s in conductor.sessions.values()),
            *((s, True) for s in conductor.gone.values()),
        ]
        contributed = {s.peer_id: fresh[s.peer_id] + self._slots(s.peer_id) for s, _ in sessions}
        return [
            NodeView(
                peer_id=s.peer_id,
                name=s.name,
                incarnation=s.last_incarnation,
                stage=s.last_stage if gone else s.stage,
                state=self._node_state(s, gone=gone),
                tier=_tier(s),
                device=s.hello.hardware.device or "cpu",
                device_name=s.hello.hardware.device_name,
                pid=s.hello.pid,
                address=s.hello.address,
                queue_depth=s.heartbeat.queue_depth,
                microbatches_per_s=s.speed,
                memory_bytes=s.heartbeat.memory_bytes,
                bytes_sent=s.heartbeat.bytes_sent,
                bytes_received=s.heartbeat.bytes_received,
                waiting_for="" if gone else _waits_for(s),
                contributed_microbatches=contributed[s.peer_id],
                contributed_share=contributed[s.peer_id] / total,
                last_seen_s=s.last_heartbeat_s,
                discovered_peers=s.heartbeat.discovered_peers,
                log_bytes=s.heartbeat.log_bytes,
                marks=conductor.marks[s.peer_id],
            )
            for s, gone in sorted(sessions, key=lambda pair: pair[0].attached_s)
        ]

    def _node_state(self, session: Session, *, gone: bool) -> NodeState:
        if gone:
            went = session.farewell is not None or session.dismissed or self._conductor.ended
            return "left" if went else "fenced"
        if session.state == "attached":
            return "joining"
        if session.state == "ready" and self._conductor.phase in (Phase.STEP, Phase.APPLYING):
            ledger = self._conductor.ledger
            if ledger is not None and ledger.participates(session.incarnation):
                return "training"
        return session.state


def _waits_for(session: Session) -> str:
    leaves = session.last_wait if session.farewell is not None else ""
    return session.placement or leaves or session.heartbeat.waiting_for


def _tier(session: Session) -> Literal["", "worker", "holder"]:
    if session.state not in ("ready", "leaving"):
        return ""
    return "holder" if session.tier == "holder" else "worker"


def _point(record: StepCommitted | StepRow) -> StepPoint:
    return StepPoint(
        step=record.step,
        loss=record.loss,
        tokens_per_s=tokens_per_s([record]),
        boundary_bytes=record.boundary_bytes,
        reduce_bytes=record.reduce_bytes,
        seconds=record.seconds,
        grad_norm=record.grad_norm,
        learning_rate=record.learning_rate,
        validation_loss=record.validation_loss,
    )
