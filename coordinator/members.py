# SPDX-License-Identifier: Apache-2.0
"""Who is attached, who is in the plan, who is fenced."""

from collections import Counter
from collections.abc import Sequence

from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session, lease_timeout_s
from shoal.coordinator.state import NodeFenced
from shoal.protocol.errors import FencedError
from shoal.protocol.ids import Incarnation, PeerId, Stage
from shoal.protocol.proto import coordinator_pb2

_MAX_FENCED_TOLD = 256
_MAX_GONE = 256


class Members:
    def __init__(self, log: RunLog, num_stages: int) -> None:
        self._log = log
        self.stages = [Stage(s) for s in range(num_stages)]
        self.sessions: dict[PeerId, Session] = {}
        self.gone: dict[PeerId, Session] = {}
        """The last session of nodes that are not attached now, for display."""
        self.marks: Counter[PeerId] = Counter()
        self.last_holders: dict[Stage, set[PeerId]] = {}
        """Who was fenced while it held a stage, or had only the last commit to apply; since the
        stage was last covered."""
        self.epoch = 0
        self._planned: list[Incarnation] = []
        self._fenced: list[Incarnation] = []

    # ---- facts ---------------------------------------------------------------------------

    def is_current(self, session: Session) -> bool:
        return self.sessions.get(session.peer_id) is session

    def by_incarnation(self, incarnation: int) -> Session | None:
        if not incarnation:
            return None
        return next((s for s in self.sessions.values() if s.incarnation == incarnation), None)

    def participants(self, stage: Stage) -> list[Session]:
        """Ready nodes of a stage with the run's weights: holders, and workers, who can't apply."""
        step = self._log.state.step
        return [
            s
            for s in self.sessions.values()
            if s.stage == stage and s.state in ("ready", "leaving") and s.step == step
        ]

    def holders(self, stage: Stage) -> list[Session]:
        """Ready nodes of a stage whose whole state is the run's."""
        return [s for s in self.participants(stage) if s.tier == "holder"]

    def uncovered(self) -> list[Stage]:
        return [stage for stage in self.stages if not self.holders(stage)]

    def spares(self) -> list[Session]:
        """Nodes without a stage that could take one."""
        now_s = self._log.clock()
        return [
            s
            for s in self.sessions.values()
            if s.state == "attached" and s.farewell is None and now_s >= s.rests_until_s
        ]

    def check_own(self, session: Session, incarnation: int) -> None:
        """Raises `FencedError` when a node speaks as an incarnation that it isn't."""
        if not session.incarnation or incarnation != session.incarnation:
            raise FencedError(
                f"speaks as incarnation {incarnation}, is {session.incarnation or 'unassigned'}"
            )

    def mark(self, peer_id: PeerId) -> None:
        """Count a refusal against a node; names that nobody has are ignored."""
        if peer_id in self.sessions or peer_id in self.gone:
            self.marks[peer_id] += 1

    def expired(self, now_s: float, *, least_s: float, since_s: float) -> list[tuple[Session, str]]:
        """Nodes that gave no sign of life for their lease, and for how long in words. Silence
        counts from `since_s`: before, the coordinator itself wasn't listening."""
        found = []
        for session in self.sessions.values():
            if session.is_deaf:
                found.append((session, "it doesn't read its commands"))
                continue
            limit_s = lease_timeout_s(session.intervals, least_s=least_s)
            if min(session.silent_s(now_s), now_s - since_s) > limit_s:
                found.append((session, f"no sign of life for {limit_s:.1f} s"))
        return found

    # ---- coming and going ----------------------------------------------------------------

    def add(self, session: Session) -> None:
        self.sessions[session.peer_id] = session
        self.gone.pop(session.peer_id, None)

    def remove(self, session: Session) -> None:
        """The session is over; its incarnation is fenced separately."""
        del self.sessions[session.peer_id]
        self.gone[session.peer_id] = session
        if len(self.gone) > _MAX_GONE:
            longest = next(iter(self.gone))
            del self.gone[longest]
            self.marks.pop(longest, None)
        session.end()

    def fence(
        self, sessions: Sequence[Session], reason: str, *, still_hold: bool = False
    ) -> list[Incarnation]:
        """Take incarnations out of the run, durably. Raises `StorageError`."""
        lost = []
        for session in sessions:
            if session.incarnation:
                incarnation = session.incarnation
                self._log.record(
                    NodeFenced(time_s=self._log.clock(), incarnation=incarnation, reason=reason)
                )
                self._note_holder(session)
                session.unassign(still_holds=still_hold)
                lost.append(incarnation)
        self._fenced = (self._fenced + lost)[-_MAX_FENCED_TOLD:]
        return lost

    def _note_holder(self, session: Session) -> None:
        holds = session.tier == "holder" and (
            session.state in ("ready", "leaving") or session.keeps
        )
        if holds and session.stage is not None and session.step >= self._log.state.step - 1:
            self.last_holders.setdefault(session.stage, set()).add(session.peer_id)

    def truncate_logs(self) -> None:
        """Tell everybody what no replay will ask for any more."""
        for session in self.sessions.values():
            self.truncate_log(session)

    def truncate_log(self, session: Session) -> None:
        step = self._log.state.snapshot_step
        if step:
            session.send(truncate=coordinator_pb2.TruncateLog(through_step=step))

    def send_plan(self) -> None:
        """Tell everybody in the step who is in it, when that has changed."""
        step = self._log.state.step
        # While a step is applied, those that have yet to apply it are one step behind.
        members = [
            s
            for s in self.sessions.values()
            if s.incarnation and s.state in ("ready", "leaving") and s.step >= step - 1
        ]
        incarnations = sorted(s.incarnation for s in members)
        if incarnations == self._planned:
            return
        self._planned = incarnations
        self.epoch += 1
        plan = coordinator_pb2.Plan(
            epoch=self.epoch, members=[s.member() for s in members], fenced=self._fenced
        )
        for session in members:
            session.send(plan=plan)
