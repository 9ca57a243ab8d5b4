# SPDX-License-Identifier: Apache-2.0
"""Replays of lost stages: planned from the books, followed, and logged when they are done."""

from collections import defaultdict

from shoal.coordinator import commands
from shoal.coordinator.members import Members
from shoal.coordinator.replay_plan import (
    Missing,
    NoReplay,
    ReplayPlan,
    ReplayProgress,
    plan_replay,
)
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.state import StageReplayed
from shoal.protocol.errors import BoundaryHoleError, ReplayMismatchError
from shoal.protocol.ids import PeerId, Stage, display_name
from shoal.protocol.learned import learned_codec
from shoal.protocol.learned_tensors import has_projection
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.spec import RunSpec

_MAX_PLAN_BYTES = 6 << 20
"""Of 8 MiB that a message may have (protocol/rpc.py)."""


class Replays:
    def __init__(
        self, spec: RunSpec, log: RunLog, *, members: Members, snapshots: SnapshotStore
    ) -> None:
        self._spec = spec
        self._log = log
        self._members = members
        self._snapshots = snapshots
        self._has_shares = has_projection(learned_codec(spec.pipeline.boundary))
        # What has turned out not to work, until the stage is held again or the run has gone back.
        self._holes: defaultdict[Stage, set[PeerId]] = defaultdict(set)
        self._refused: dict[Stage, str] = {}

    # ---- plans ---------------------------------------------------------------------------

    def plan(self, stage: Stage) -> ReplayPlan | NoReplay:
        """How the stage's state at the run's step can be computed again, or why it can't."""
        if stage in self._refused:
            return NoReplay(self._refused[stage])
        state, pipeline = self._log.state, self._spec.pipeline
        base_step = max((s for s in self._snapshots.complete_steps() if s < state.step), default=0)
        plan = plan_replay(
            stage,
            num_stages=pipeline.stages,
            num_microbatches=self._spec.batch.microbatches,
            base_step=base_step,
            to_step=state.step,
            sources=state.sources,
            logs=self._logs(stage),
            has_shares=self._has_shares,
        )
        if isinstance(plan, Missing):
            here = self._members.sessions
            return NoReplay(
                self._why(plan), tuple(peer for peer in plan.logged_by if peer not in here)
            )
        if isinstance(plan, ReplayPlan) and any(s.step not in state.records for s in plan.steps):
            return NoReplay("the log of the run lacks a step's record")
        if isinstance(plan, ReplayPlan) and self.command(plan).ByteSize() > _MAX_PLAN_BYTES:
            return NoReplay(f"the plan for {len(plan.steps)} steps is too large for a message")
        return plan

    def _logs(self, stage: Stage) -> dict[PeerId, int]:
        """The oldest step of each log within reach. An empty log may have been filled since the
        last heartbeat."""
        if not self._spec.fault.boundary_log_mb:
            return {}
        return {
            s.peer_id: s.heartbeat.log_oldest_step
            for s in self._members.sessions.values()
            if s.peer_id not in self._holes[stage]
        }

    def _why(self, missing: Missing) -> str:
        if not self._spec.fault.boundary_log_mb:
            return "fault.boundary_log_mb is 0, so that no logs are kept"
        names = " and ".join(display_name(peer_id) for peer_id in missing.logged_by) or "nobody"
        what = f"what stage {missing.stage} sent for microbatch {missing.microbatch} in step"
        if missing.microbatch is None:
            what = f"stage {missing.stage}'s share of its boundary codec's gradient in step"
        return f"{what} {missing.step} is in no log within reach (logged by {names})"

    def command(self, plan: ReplayPlan) -> coordinator_pb2.Replay:
        """What the node is told."""
        state, logs = self._log.state, plan.logs
        index = {peer_id: number for number, peer_id in enumerate(logs)}

        def sources(parts: dict[PeerId, tuple[int, ...]]) -> list[coordinator_pb2.BoundarySource]:
            return [
                coordinator_pb2.BoundarySource(log=index[peer_id], microbatches=ids)
                for peer_id, ids in sorted(parts.items())
            ]

        replay = coordinator_pb2.Replay(
            base_step=plan.base_step,
            logs=[self._members.sessions[peer_id].member() for peer_id in logs],
        )
        for step in plan.steps:
            digests = state.weights_digests.get(step.step)
            replay.steps.add(
                commit=commands.commit(state.records[step.step], plan.stage),
                weights_digest=digests[plan.stage] if digests else 0,
                has_weights_digest=digests is not None,
                inputs=sources(dict(step.inputs)),
                gradients=sources(dict(step.gradients)),
                shares=[
                    coordinator_pb2.ShareSource(boundary=boundary, log=index[peer_id])
                    for boundary, peer_id in step.shares.items()
                ],
            )
        return replay

    # ---- a replay's life -----------------------------------------------------------------

    def began(self, session: Session, plan: ReplayPlan) -> None:
        session.replay = ReplayProgress(plan, step=plan.base_step)
        where = f"the snapshot of step {plan.base_step}" if plan.base_step else "the beginning"
        self._log.say(
            "replay",
            f"{session.name} replays stage {plan.stage} from {where} to step {plan.to_step}, out "
            f"of the logs of {self._names(plan)}",
        )

    def _names(self, plan: ReplayPlan) -> str:
        return ", ".join(display_name(peer_id) for peer_id in plan.logs) or "nobody but the data"

    def progressed(self, session: Session, event: coordinator_pb2.Replaying) -> None:
        replay = session.replay
        if replay is not None and replay.step < event.step <= replay.plan.to_step:
            replay.step, replay.log_bytes = event.step, event.log_bytes

    def finished(self, session: Session) -> None:
        """The replaying node holds the stage. Raises `StorageError`."""
        replay, session.replay = session.replay, None
        if replay is None:
            return
        plan, now_s = replay.plan, self._log.clock()
        seconds = max(0.0, now_s - session.assigned_s)
        self._log.record(
            StageReplayed(
                time_s=now_s,
                stage=plan.stage,
                peer_id=session.peer_id,
                from_step=plan.base_step,
                to_step=plan.to_step,
                seconds=seconds,
                log_bytes=replay.log_bytes,
            )
        )
        self._log.say(
            "replayed",
            f"{session.name} replayed stage {plan.stage}: {len(plan.steps)} steps in "
            f"{seconds:.1f} s, out of {replay.log_bytes:,} bytes of logs",
        )

    def failed(self, session: Session, trouble: coordinator_pb2.Trouble) -> bool:
        """A replay broke off; the next plan does without what failed. False when the cause is the
        node's own."""
        replay = session.replay
        if replay is None:
            return False
        stage = replay.plan.stage
        if trouble.error == BoundaryHoleError.__name__ and trouble.peer_id in replay.plan.logs:
            self._holes[stage].add(PeerId(trouble.peer_id))
            return True
        if trouble.error == ReplayMismatchError.__name__:
            self._refused[stage] = "a replay gave other bits than the record"
            return True
        return False

    def forget(self, stages: list[Stage]) -> None:
        """These stages are held again: a later loss begins anew."""
        for stage in stages:
            self._holes.pop(stage, None)
            self._refused.pop(stage, None)

    def descriptions(self) -> dict[Stage, str]:
        """Replays under way, in plain words."""
        return {
            s.replay.plan.stage: (
                f"stage {s.replay.plan.stage} is replayed by {s.name}: step {s.replay.step} of "
                f"{s.replay.plan.to_step} from the logs of its neighbours"
            )
            for s in self._members.sessions.values()
            if s.replay is not None
        }
