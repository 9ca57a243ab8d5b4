# SPDX-License-Identifier: Apache-2.0
"""Sees off the nodes that said farewell, as `leaving.decide` says."""

import statistics

from shoal.coordinator.assignments import Assignments
from shoal.coordinator.leaving import Leaver, decide, time_left_s
from shoal.coordinator.members import Members
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session
from shoal.coordinator.snapshot_requests import SnapshotRequests
from shoal.coordinator.step_runner import Phase, StepRunner

_STEPS_LOOKED_AT = 8


class Departures:
    def __init__(
        self,
        log: RunLog,
        *,
        members: Members,
        runner: StepRunner,
        assignments: Assignments,
        requests: SnapshotRequests,
    ) -> None:
        self._log = log
        self._members = members
        self._runner = runner
        self._assignments = assignments
        self._requests = requests

    def see_off(self) -> None:
        """Call it whenever something has changed, or time has passed. Raises `StorageError`."""
        for session in list(self._members.sessions.values()):
            if session.farewell is not None:
                self._see_off(session, session.farewell)

    def _see_off(self, session: Session, why: str) -> None:
        phase = self._runner.phase
        if phase is Phase.APPLYING and self._runner.participates(session):
            return
        leaver = Leaver(
            grace_s=session.grace_s,
            left_s=time_left_s(session.leave_by_s, self._log.clock()),
            in_step=self._runner.participates(session),
            is_idle=self._runner.is_idle(session),
            is_needed=self._is_needed(session),
        )
        decision = decide(
            leaver, step_left_s=self._step_left_s(), handover_s=self._requests.handover_s()
        )
        if decision == "let go":
            in_time = not leaver.in_step or leaver.is_idle
            late = "; its grace ends before the step does, so others compute its share again"
            self._runner.let_go(session, why if in_time else why + late)
        elif decision == "stay":
            session.say(f"leaving once step {self._log.state.step + 1} is done")
        elif decision == "abandon the step":
            self._runner.abandon(
                f"{session.name}, the last node of stage {session.stage}, leaves before it would "
                "be done"
            )
        elif phase is Phase.BETWEEN:
            session.say(f"leaving once stage {session.stage} is stored, or with another node")
            self._requests.ask()

    def _is_needed(self, session: Session) -> bool:
        """Whether the run's state of a stage would be lost with this node."""
        if session.tier != "holder":
            return False
        if session.stage is None or self._requests.is_stored(self._log.state.step):
            return False
        if session.state == "copying":
            holds = session.keeps
        else:
            holds = not self._assignments.is_stale(session)
        return holds and all(
            other is session or other.farewell is not None
            for other in self._members.holders(session.stage)
        )

    def _step_left_s(self) -> float:
        """How long the open step will still take, if it is like the last ones; 0 while nothing is
        known, or when it takes longer than they did."""
        opened, records = self._runner.opened, self._log.state.records
        newest = [records[s].seconds for s in sorted(records)[-_STEPS_LOOKED_AT:]]
        if opened is None or not newest:
            return 0.0
        return statistics.median(newest) - (self._log.clock() - opened.opened_s)
