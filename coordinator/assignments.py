# SPDX-License-Identifier: Apache-2.0
"""Gives stages to nodes between steps, each from the nearest source of its state; rolls the run
back when a stage's state is lost for good."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.coordinator import recovery
from shoal.coordinator.members import Members
from shoal.coordinator.planner import NodeFacts, Placement, StageNeed, place
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session, sane
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.state import RolledBack, StageAssigned
from shoal.coordinator.transfers import MAX_DONORS, Transfer, Version, pins, to_pin
from shoal.protocol.ids import Incarnation, Stage
from shoal.protocol.proto import coordinator_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Desk:
    """Whom assigning works with."""

    log: RunLog
    members: Members
    snapshots: SnapshotStore


class Assignments:
    def __init__(self, desk: Desk, needs: tuple[StageNeed, ...], *, wanted_replicas: int) -> None:
        self._log = desk.log
        self._members = desk.members
        self._snapshots = desk.snapshots
        self._needs = needs
        self._wanted_replicas = wanted_replicas
        # A restarted coordinator has lost every stage just now.
        self._lost_since_s: float | None = desk.log.clock() if desk.log.state.step else None

    # ---- facts ---------------------------------------------------------------------------

    def lost_for_s(self) -> float | None:
        if self._lost_since_s is None:
            return None
        return self._log.clock() - self._lost_since_s

    def keepable(self, session: Session) -> Stage | None:
        return recovery.keepable(session.held(), self._log.state, len(self._members.stages))

    def is_stale(self, session: Session) -> bool:
        """Whether a node is ready with a state that the run has left behind."""
        return (
            session.state in ("ready", "leaving")
            and session.step != self._log.state.step
            and not (session.owed_commit and session.step == self._log.state.step - 1)
        )

    def awaited(self) -> list[str]:
        """Nodes that the next step waits for: those that have not been copying for too long."""
        now_s = self._log.clock()
        return [
            s.name
            for s in self._members.sessions.values()
            if (s.state == "copying" or s.owed_commit)
            and now_s - s.assigned_s < recovery.join_deadline_s(s.copies)
        ]

    def is_kept(self, stage: Stage) -> bool:
        """Whether a node is on its way that will hold this stage at the run's step."""
        step, now_s = self._log.state.step, self._log.clock()
        return any(
            (
                s.stage == stage
                and ((s.state == "copying" and s.step == step) or s.owed_commit)
                # One that hangs keeps nothing.
                and now_s - s.assigned_s < recovery.join_deadline_s(s.copies)
            )
            or (s.stage is None and self.keepable(s) == stage)
            for s in self._members.sessions.values()
        )

    def _source(self, stage: Stage) -> coordinator_pb2.StateSource.ValueType | None:
        return recovery.source(
            has_donor=bool(self._members.holders(stage)),
            step=self._log.state.step,
            complete_steps=self._snapshots.complete_steps(),
        )

    # ---- effects -------------------------------------------------------------------------

    def assign(self, *, may_roll_back: bool = True) -> None:
        """Call it between steps only. Raises `StorageError`."""
        lost = self._members.uncovered()
        if not lost:
            self._lost_since_s = None
        elif self._lost_since_s is None and self._log.state.step:
            self._lost_since_s = self._log.clock()
        decision, placement = self._decide(lost)
        if decision == "roll back" and may_roll_back:
            hopeless = next(s for s in lost if self._source(s) is None and not self.is_kept(s))
            self._roll_back(
                f"stage {hopeless} lost its last node after step {self._log.state.step}"
            )
            _, placement = self._decide(self._members.uncovered())
        self.pin()  # what nobody fetches any more goes
        for peer_id, stage in placement.stage_of.items():
            reason = placement.reasons.get(peer_id, "")
            self._settle(self._members.sessions[peer_id], stage, reason)

    def _decide(self, lost: list[Stage]) -> tuple[recovery.Decision, Placement]:
        current = {
            s.peer_id: stage
            for s in self._members.sessions.values()
            if (stage := s.stage if s.stage is not None else self.keepable(s)) is not None
        }
        nodes = [
            NodeFacts(
                peer_id=s.peer_id,
                flops=sane(s.hello.hardware.flops),
                memory_bytes=s.hello.hardware.memory_bytes,
            )
            for s in self._members.sessions.values()
            if s.farewell is None and self._log.clock() >= s.rests_until_s
        ]
        placement = place(
            nodes, self._needs, current=current, wanted_replicas=self._wanted_replicas
        )
        taken = set(placement.stage_of.values())
        decision = recovery.lost_stages(
            [
                recovery.LostStage(
                    stage,
                    has_source=self._source(stage) is not None,
                    is_kept=self.is_kept(stage),
                    is_taken=stage in taken,
                )
                for stage in lost
            ],
            step=self._log.state.step,
            lost_for_s=self.lost_for_s() or 0.0,
        )
        return decision, placement

    def _settle(self, session: Session, stage: Stage | None, reason: str) -> None:
        session.placement = reason
        if stage is None:
            session.say(f"no stage for this node: {reason}")
            return
        if session.stage is None:
            self._give(session, stage)
            return
        moves, stale = session.stage != stage, self.is_stale(session)
        if (moves or stale) and self._source(stage) is not None:
            self._members.fence(
                [session], reason if moves else f"its state is of step {session.step}"
            )
            self._give(session, stage)

    def _give(self, session: Session, stage: Stage) -> None:
        keeps = self.keepable(session) == stage
        donors = [] if keeps else self._donors(session, stage)
        source = (
            coordinator_pb2.STATE_SOURCE_KEEP
            if keeps
            else recovery.source(
                has_donor=bool(donors),
                step=self._log.state.step,
                complete_steps=self._snapshots.complete_steps(),
            )
        )
        if source is None:
            session.say(f"stage {stage} waits for a node that holds its state")
            return
        step, now_s = self._log.state.step, self._log.clock()
        incarnation = Incarnation(self._log.state.last_incarnation + 1)
        self._log.record(
            StageAssigned(
                time_s=now_s,
                incarnation=incarnation,
                peer_id=session.peer_id,
                name=session.name,
                stage=stage,
            )
        )
        session.assign(stage, incarnation, step=step, keeps=keeps, now_s=now_s)
        command = coordinator_pb2.Assign(
            stage=stage, incarnation=incarnation, step=step, source=source
        )
        if donors:
            version = Version(step, types_pb2.STATE_PART_ALL)
            session.transfers = [Transfer(version, tuple(d.incarnation for d in donors), True)]
            command.donors.CopyFrom(self._to_donors(donors, stage))
            self.pin()  # before anything that changes their state
        session.send(assign=command)

    def _donors(self, session: Session, stage: Stage) -> list[Session]:
        """The least busy holders whose copies have not turned out wrong; the others only when the
        state is to be had nowhere else."""
        holders = self._members.holders(stage)
        good = [s for s in holders if s.peer_id not in session.bad_donors]
        step = self._log.state.step
        if not good and (step == 0 or step in self._snapshots.complete_steps()):
            return []
        by_load = sorted(good or holders, key=lambda s: (s.heartbeat.queue_depth, s.peer_id))
        return by_load[:MAX_DONORS]

    def _to_donors(self, donors: Sequence[Session], stage: Stage) -> coordinator_pb2.Donors:
        digests = self._log.state.weights_digests.get(self._log.state.step)
        return coordinator_pb2.Donors(
            members=[s.member() for s in donors],
            weights_digest=digests[stage] if digests else 0,
            has_weights_digest=digests is not None,
        )

    def pin(self) -> None:
        """Tell holders which versions to serve, where that has changed. New versions are of the
        run's step: call it between steps when there are any."""
        sessions = list(self._members.sessions.values())
        wanted = pins(transfer for s in sessions for transfer in s.transfers)
        for session in sessions:
            versions = wanted.get(session.incarnation, {}) if session.incarnation else {}
            if session.pinned != versions.keys():
                session.pinned = frozenset(versions)
                session.send(pin=to_pin(versions))

    def _roll_back(self, reason: str) -> None:
        """Every stage goes back to the last common snapshot; committed steps are recomputed, and
        each must reproduce its record."""
        log = self._log
        target = recovery.rollback_target(self._snapshots.complete_steps(), log.state.step)
        log.record(RolledBack(time_s=log.clock(), to_step=target, reason=reason))
        log.say(
            "rolled_back",
            f"{reason}; every stage goes back to "
            + (f"the snapshot of step {target}" if target else "the beginning")
            + " and recomputes",
        )
        self._lost_since_s = None
        sessions = list(self._members.sessions.values())
        self._members.fence(sessions, reason)
        for session in sessions:
            session.hello.ClearField("held")
