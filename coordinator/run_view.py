# SPDX-License-Identifier: Apache-2.0
"""What people see of a run, made from the conductor's books."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from shoal.coordinator import step_row
from shoal.coordinator.boundary_traffic import bf16_bytes, by_boundary
from shoal.coordinator.conductor import Conductor
from shoal.coordinator.dashboard.views import (
    BackOffView,
    BoundaryView,
    EventLine,
    RecoveryView,
    ReplayView,
    RunState,
    RunView,
    SpecSummary,
    StageView,
    StandbyView,
    StepPoint,
    TrafficView,
    thin_history,
)
from shoal.coordinator.history import StepHistory
from shoal.coordinator.node_views import NodeViews
from shoal.coordinator.recovered import Recovery
from shoal.coordinator.state import RunState as DurableState
from shoal.coordinator.state import StepCommitted
from shoal.coordinator.step_row import StepRow
from shoal.coordinator.step_runner import Phase
from shoal.coordinator.step_scale import ScaleHistory
from shoal.protocol.costs import run_parameters
from shoal.protocol.ids import PeerId
from shoal.protocol.spec import ResolvedRun, RunSpec, StageSpec

_SPEED_STEPS = 5
"""Tokens per second are a mean over so many steps."""


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


def boundaries(spec: RunSpec, traffic: Mapping[str, tuple[int, ...]]) -> list[BoundaryView]:
    """Of a step with this traffic (`StepCommitted`)."""
    return [
        BoundaryView(
            from_stage=boundary,
            to_stage=boundary + 1,
            traffic=[
                TrafficView(kind=kind, encoded_bytes=size, bf16_bytes=bf16_bytes(spec, kind))
                for kind, size in by_kind.items()
            ],
        )
        for boundary, by_kind in enumerate(by_boundary(traffic, spec.pipeline.stages))
        if by_kind
    ]


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
        self._nodes = NodeViews(conductor)

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
            self._compacted, self._audited = earlier.num_steps, (0, 0, 0)
        newest = records[-1] if records else None
        missing, double = self._audit(records)
        now_s = conductor.clock()
        if conductor.ended and self._ended_s is None:
            self._ended_s = now_s
        nodes = self._nodes.views(records, now_s)
        ledger = conductor.ledger
        join_link = None if conductor.ended else self._make_link()
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
            boundaries=boundaries(spec, newest.traffic) if newest else [],
            log_bytes=sum(s.heartbeat.log_bytes for s in conductor.sessions.values()),
            log_budget_bytes=spec.fault.boundary_log_mb * 10**6,
            replaying=self._replaying(now_s),
            replays=state.recovered.replays,
            replay_seconds=state.recovered.replay_seconds,
            replay_bytes=state.recovered.replay_bytes,
            rollbacks=state.recovered.rollbacks,
            rollback_seconds=state.recovered.rollback_seconds,
            recoveries=[_recovery(recovery) for recovery in state.recovered.recent],
            back_offs=_back_offs(state.scales),
            coordinator="" if join_link is None else urlsplit(join_link).netloc,
            term=conductor.terms.term,
            leads=conductor.terms.leads and conductor.deposed is None,
            standbys=self._standbys(),
            weights_digest=state.weights_sha256,
            snapshot_step=state.snapshot_step or None,
            join_link=join_link,
        )

    def _replaying(self, now_s: float) -> list[ReplayView]:
        return [
            ReplayView(
                stage=s.replay.plan.stage,
                node=s.name,
                from_step=s.replay.plan.base_step,
                to_step=s.replay.plan.to_step,
                step=s.replay.step,
                seconds=max(0.0, now_s - s.assigned_s),
                log_bytes=s.replay.log_bytes,
            )
            for s in self._conductor.sessions.values()
            if s.replay is not None
        ]

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


def _recovery(recovery: Recovery) -> RecoveryView:
    return RecoveryView(
        kind="rollback" if recovery.stage is None else "replay",
        time_s=recovery.time_s,
        stage=recovery.stage,
        from_step=recovery.from_step,
        to_step=recovery.to_step,
        seconds=recovery.seconds,
        log_bytes=recovery.log_bytes,
        reason=recovery.reason,
    )


def _back_offs(scales: ScaleHistory) -> BackOffView | None:
    if scales.last_back_off is None:
        return None
    in_fp16 = bool(scales.used) and scales.used[-1].loss_scale != 1.0
    return BackOffView(
        count=scales.back_offs,
        step=scales.last_back_off.step,
        reason=scales.last_back_off.reason,
        loss_scale=scales.next.loss_scale if in_fp16 else 1.0,
        coarser_bits=scales.next.coarsen,
    )


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
