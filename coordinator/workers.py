# SPDX-License-Identifier: Apache-2.0
"""Nodes on their way from joiner to holder, while the run goes on.

Warming: gets the weights of a pinned step, and nobody waits. Worker: takes part, and after each
step pulls the weights, for which the run waits a bounded time. Meanwhile it gets the moments of a
pinned step and brings them forward. Promoted: it applies the next step itself; when that gives the
stage's weights, it is a holder. Only holders count as holding the stage.
"""

from shoal.coordinator.assignments import Assignments
from shoal.coordinator.members import Members
from shoal.coordinator.pull_deadline import pull_deadline_s, rest_s
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session
from shoal.coordinator.step_runner import StepRunner
from shoal.protocol.errors import FencedError
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.proto.types_pb2 import STATE_PART_MOMENTS, STATE_PART_WEIGHTS

_RECENT_STEPS = 8
_MAX_MOMENTS_PINNED = 2
"""Versions of a stage's moments that its holders keep for workers."""


class Workers:
    def __init__(
        self, log: RunLog, members: Members, runner: StepRunner, assignments: Assignments
    ) -> None:
        self._log = log
        self._members = members
        self._runner = runner
        self._assignments = assignments

    # ---- facts ---------------------------------------------------------------------------

    def _all(self) -> list[Session]:
        return [
            s
            for s in self._members.sessions.values()
            if s.tier != "holder" and (s.state in ("ready", "leaving") or s.is_warm)
        ]

    def awaited(self) -> list[str]:
        """Workers that the next step waits for."""
        return [s.name for s in self._all() if s.pull_since_s is not None]

    def _deadline_s(self, session: Session) -> float:
        records = self._log.state.records
        recent = sorted(records)[-_RECENT_STEPS:]
        steps_s = [records[step].seconds for step in recent]
        return pull_deadline_s(session.pulls_s, steps_s, setbacks=session.setbacks)

    # ---- between steps -------------------------------------------------------------------

    def tend(self) -> None:
        """Whatever workers need at the run's step. Between steps, once the weights' digests are
        recorded; call it until it changes nothing (the conductor does)."""
        step = self._log.state.step
        digests = self._log.state.weights_digests.get(step)
        if digests is None or self._members.uncovered():
            return
        for session in self._all():
            if session.step == step:
                self._begin_work(session)
                self._advance(session, digests)
            elif session.pull_since_s is None:
                self._order_weights(session)
            elif self._log.clock() - session.pull_since_s > self._deadline_s(session):
                self._set_back(session, f"it had not the weights of step {step} in time")

    def _order_weights(self, session: Session) -> None:
        # A promoted one has been told to apply; it gets as much time for that.
        if session.tier == "promoted" or self._assignments.pull(
            session, STATE_PART_WEIGHTS, urgent=True
        ):
            session.pull_since_s = self._log.clock()
        else:
            self._set_back(session, "nobody is left to give it the weights")

    def _advance(self, session: Session, digests: tuple[int, ...]) -> None:
        """It has the weights of the run's step."""
        assert session.stage is not None, "a worker has a stage"
        if session.weights_digest != digests[session.stage]:
            self._set_back(
                session,
                f"its weights of step {session.step} are {session.weights_digest:#x}; the stage's "
                f"are {digests[session.stage]:#x}",
            )
        elif session.tier == "promoted":
            if session.step > session.promoted_at:
                session.tier = "holder"
                session.setbacks = 0
                self._log.say(
                    "ready", f"{session.name} holds stage {session.stage} at step {session.step}"
                )
        elif not self._has_moments_donor(session) and self._may_pin_moments(session):
            self._assignments.pull(session, STATE_PART_MOMENTS, urgent=False)

    def _has_moments_donor(self, session: Session) -> bool:
        return any(
            transfer.version.part == STATE_PART_MOMENTS
            and any(self._members.by_incarnation(donor) for donor in transfer.donors)
            for transfer in session.transfers
        )

    def _may_pin_moments(self, session: Session) -> bool:
        """Donors keep a bounded number of versions; another worker's turn comes."""
        step = self._log.state.step
        pinned = {
            transfer.version.step
            for other in self._members.sessions.values()
            if other.stage == session.stage
            for transfer in other.transfers
            if transfer.version.part == STATE_PART_MOMENTS
        }
        return step in pinned or len(pinned) < _MAX_MOMENTS_PINNED

    def _set_back(self, session: Session, why: str) -> None:
        """The run goes on without it; after a rest it warms up again."""
        session.setbacks += 1
        session.warms_up_after_s = self._log.clock() + rest_s(session.setbacks)
        self._runner.take_out(session, why, kind="set_back")

    # ---- what they report ----------------------------------------------------------------

    def on_warm(self, session: Session, ready: coordinator_pb2.Ready) -> bool:
        """It has the weights that it was assigned. False when they are not the run's."""
        stage = session.stage
        assert stage is not None, "an incarnation has a stage"
        digests = self._log.state.weights_digests.get(ready.step)
        if ready.step != session.step or (digests and digests[stage] != ready.weights_digest):
            return False
        session.end_transfer(STATE_PART_WEIGHTS)
        session.is_warm, session.weights_digest = True, ready.weights_digest
        self._log.say("warm", f"{session.name} has weights of stage {stage}, of step {ready.step}")
        return True

    def forget(self, session: Session) -> None:
        """Its copy failed: it doesn't go on with that version, which its donors may not have."""
        self._assignments.forget_warm_up(session.peer_id)

    def on_pulled(self, session: Session, applied: coordinator_pb2.Applied) -> None:
        """Raises `FencedError` for an answer to nothing. The digest is compared in `tend`."""
        step = self._log.state.step
        if applied.step != step or (session.step == step and not session.is_warm):
            raise FencedError(f"has the weights of step {applied.step}; the run is at {step}")
        if session.pull_since_s is not None and session.tier == "worker":
            session.pulls_s.append(self._log.clock() - session.pull_since_s)
        self._begin_work(session)
        session.pull_since_s = None
        session.step, session.weights_digest = step, applied.weights_digest
        session.end_transfer(STATE_PART_WEIGHTS)

    def _begin_work(self, session: Session) -> None:
        if not session.is_warm:
            return
        session.is_warm = False
        session.state = "ready" if session.farewell is None else "leaving"
        self._log.say("ready", f"{session.name} works at stage {session.stage}")

    def on_promoted(self, session: Session, promoted: coordinator_pb2.Promoted) -> None:
        """Raises `FencedError` unless it is a worker at that step."""
        if session.tier != "worker" or session.is_warm or promoted.step != session.step:
            raise FencedError(f"is promoted at step {promoted.step}, is at {session.step}")
        session.tier, session.promoted_at = "promoted", promoted.step
        session.transfers = []
