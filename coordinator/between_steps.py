# SPDX-License-Identifier: Apache-2.0
"""What happens between two steps: weights are agreed on, nodes leave and join, snapshots are asked
for; then the next step opens, or there is a reason why not."""

from typing import Literal

from shoal.coordinator import recovery
from shoal.coordinator.assignments import Assignments
from shoal.coordinator.departures import Departures
from shoal.coordinator.members import Members
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.snapshot_requests import SnapshotRequests
from shoal.coordinator.step_runner import StepRunner
from shoal.coordinator.terms import Leadership
from shoal.coordinator.workers import Workers
from shoal.protocol.spec import RunSpec

Outcome = Literal["go on", "finished", "stopped"]


class BetweenSteps:
    def __init__(
        self,
        spec: RunSpec,
        log: RunLog,
        *,
        members: Members,
        runner: StepRunner,
        assignments: Assignments,
        workers: Workers,
        requests: SnapshotRequests,
        terms: Leadership,
    ) -> None:
        self._terms = terms
        self._spec = spec
        self._log = log
        self._members = members
        self._runner = runner
        self._assignments = assignments
        self._workers = workers
        self._requests = requests
        self._departures = Departures(
            log, members=members, runner=runner, assignments=assignments, requests=requests
        )

    def advance(self, *, stopping: bool) -> Outcome:
        """Raises `StorageError`, or `RunFailedError` when recomputed weights differ from the
        recorded ones."""
        state = self._log.state
        if state.step in state.weights_digests or not self._assignments.awaited():
            self._runner.agree()
        self.let_go()
        self._workers.tend()
        self._assignments.assign(may_roll_back=self._is_complete() or not stopping)
        if self._is_complete():
            return "finished" if self._has_final_snapshot() else "go on"
        if stopping:
            ends = not self._can_be_saved() or self._has_final_snapshot()
            return "stopped" if ends else "go on"
        self._requests.ask_if_due()
        self._open_or_wait()
        return "go on"

    def _is_complete(self) -> bool:
        return self._log.state.step >= self._spec.steps

    def let_go(self) -> None:
        """Nodes that said farewell leave, once nothing is lost with them or their time is up."""
        self._departures.see_off()

    # ---- opening -------------------------------------------------------------------------

    def _open_or_wait(self) -> None:
        reason = recovery.obstacle(self._readiness())
        if not reason:
            reason = self._terms.open_obstacle(self._members.sessions)
            if reason:
                self._terms.remind(self._members.sessions.values())
        self._log.wait(reason)
        if not reason:
            self._runner.open()
            return
        for session in self._members.sessions.values():
            if session.state == "ready":
                session.say(f"waiting: {reason}")

    def _readiness(self) -> recovery.Readiness:
        pipeline, members = self._spec.pipeline, self._members
        sessions = members.sessions.values()
        return recovery.Readiness(
            state=self._log.state,
            holders={stage: len(members.holders(stage)) for stage in members.stages},
            wanted=pipeline.min_nodes or pipeline.stages * pipeline.replicas,
            copying={s.name: s.stage for s in sessions if s.state == "copying" or s.owed_commit},
            awaited=self._assignments.awaited(),
            pulling=self._workers.awaited(),
            last_leaving=[
                (s.name, s.stage)
                for s in sessions
                if s.farewell is not None and s.stage is not None
            ],
            lost_for_s=self._assignments.lost_for_s(),
            reclaim_s=self._assignments.reclaim_s(),
            replays=self._assignments.replays(),
        )

    # ---- the end -------------------------------------------------------------------------

    def _can_be_saved(self) -> bool:
        """Whether every stage's state is there, or about to be."""
        return all(
            self._members.holders(stage) or self._assignments.is_kept(stage)
            for stage in self._members.stages
        )

    def _has_final_snapshot(self) -> bool:
        step = self._log.state.step
        if self._requests.is_stored(step):
            return True
        self._requests.ask()
        unasked = self._requests.unasked()
        if self._requests.trouble:
            self._log.wait(f"the snapshot of step {step} waits: {self._requests.trouble}")
            return False
        self._log.wait(
            self._requests.why_unasked(unasked[0])
            if unasked
            else f"the snapshot of step {step} is being stored"
        )
        return False
