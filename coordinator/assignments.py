# SPDX-License-Identifier: Apache-2.0
"""Gives stages to nodes between steps, each from the nearest source of its state; rolls the run
back when a stage's state is lost for good."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.coordinator import recovery
from shoal.coordinator.members import Members
from shoal.coordinator.planner import NodeFacts, Placement, StageNeed, place
from shoal.coordinator.replay_plan import NoReplay, ReplayPlan
from shoal.coordinator.replays import Replays
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session, sane
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.state import RolledBack, StageAssigned
from shoal.coordinator.transfers import MAX_DONORS, Part, Transfer, Version, pins, to_pin
from shoal.coordinator.warm_ups import WarmUp, chosen, kept
from shoal.protocol.ids import Incarnation, PeerId, Stage
from shoal.protocol.proto import coordinator_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Desk:
    """Whom assigning works with."""

    log: RunLog
    members: Members
    snapshots: SnapshotStore
    replays: Replays


class Assignments:
    def __init__(self, desk: Desk, needs: tuple[StageNeed, ...], *, wanted_replicas: int) -> None:
        self._log = desk.log
        self._members = desk.members
        self._snapshots = desk.snapshots
        self._replays = desk.replays
        self._to_replay: dict[Stage, ReplayPlan] = {}  # what may be given out so, just now
        self._no_replay: dict[Stage, NoReplay] = {}  # why it can't
        self._needs = needs
        self._wanted_replicas = wanted_replicas
        self._warm_ups: dict[PeerId, WarmUp] = {}
        # A restarted coordinator has lost every stage just now.
        self._lost_since_s: float | None = desk.log.clock() if desk.log.state.step else None
        self._reclaim_s = recovery.RESTART_RECLAIM_S

    # ---- facts ---------------------------------------------------------------------------

    def lost_for_s(self) -> float | None:
        if self._lost_since_s is None:
            return None
        return self._log.clock() - self._lost_since_s

    def replays(self) -> dict[Stage, str]:
        """Replays under way, in plain words."""
        return self._replays.descriptions()

    def reclaim_s(self) -> float:
        """How long the last holders of lost stages have to come back; 0 when none of them can."""
        lost = self._members.uncovered()
        return self._reclaim_s if any(self._may_return(stage) for stage in lost) else 0.0

    def missing_holders(self) -> list[Session]:
        """Whose process, if it were known to be gone, nobody would have to wait for."""
        lost_for_s = self.lost_for_s()
        if lost_for_s is None or lost_for_s >= self._reclaim_s:
            return []
        gone = self._members.gone
        return [
            gone[peer_id]
            for stage in self._members.uncovered()
            for peer_id in self._awaited(stage)
            if peer_id in gone and not self._is_gone_for_good(peer_id)
        ]

    def _awaited(self, stage: Stage) -> set[PeerId]:
        """Who would end the loss of a stage by coming back: its last holders (after a restart of
        the coordinator: who computed the last step), and those whose log a replay lacks."""
        known = self._members.last_holders.get(stage)
        holders = known or self._log.state.sources.computed_by(self._log.state.step, stage)
        no_replay = self._no_replay.get(stage)
        return holders | set(no_replay.absent if no_replay else ())

    def _is_gone_for_good(self, peer_id: PeerId) -> bool:
        session = self._members.gone.get(peer_id)
        return session is not None and (
            session.farewell is not None or session.dismissed or session.process_gone
        )

    def _may_return(self, stage: Stage) -> bool:
        sessions = self._members.sessions
        if any(s.owed_commit or (s.keeps and s.state == "copying") for s in sessions.values()):
            return True  # its log may lack the last step, until it has applied it
        expected = self._awaited(stage)
        return recovery.may_return(
            expected,
            here=sessions,
            gone_for_good={peer for peer in expected if self._is_gone_for_good(peer)},
        )

    def keepable(self, session: Session) -> Stage | None:
        return recovery.keepable(session.held(), self._log.state, len(self._members.stages))

    def is_stale(self, session: Session) -> bool:
        """Whether a node is ready with a state that the run has left behind."""
        return (
            session.tier == "holder"
            and session.state in ("ready", "leaving")
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
            and now_s - s.assigned_s < recovery.JOIN_DEADLINE_S
        ]

    def is_kept(self, stage: Stage) -> bool:
        """Whether a node is on its way that will hold this stage at the run's step."""
        step, now_s = self._log.state.step, self._log.clock()
        return any(
            (
                s.stage == stage
                and ((s.state == "copying" and s.step == step) or s.owed_commit)
                # One that hangs keeps nothing.
                and now_s - s.assigned_s < recovery.JOIN_DEADLINE_S
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

    def expect_holders(self) -> None:
        """A coordinator begins to lead: the holders of all stages are about to come."""
        self._lost_since_s = self._log.clock() if self._log.state.step else None

    def assign(self, *, may_roll_back: bool = True) -> None:
        """Call it between steps only. Raises `StorageError`."""
        lost = self._members.uncovered()
        self._held_again([stage for stage in self._members.stages if stage not in lost])
        if not lost:
            self._lost_since_s, self._reclaim_s = None, recovery.RECLAIM_S
        elif self._lost_since_s is None and self._log.state.step:
            self._lost_since_s = self._log.clock()
        decision, placement = self._decide(lost)
        if decision == "roll back" and may_roll_back:
            hopeless, no_replay = next(iter(self._no_replay.items()))
            self._roll_back(
                f"stage {hopeless} lost its last node after step {self._log.state.step} and can't "
                f"be replayed: {no_replay.reason}"
            )
            _, placement = self._decide(self._members.uncovered())
        self.pin()  # what nobody fetches any more goes
        if decision != "replay" or not may_roll_back:
            self._to_replay.clear()
        for peer_id, stage in placement.stage_of.items():
            reason = placement.reasons.get(peer_id, "")
            self._settle(self._members.sessions[peer_id], stage, reason)

    def _held_again(self, stages: list[Stage]) -> None:
        """Also a replay of such a stage ends: its node copies the state instead."""
        for stage in stages:
            self._members.last_holders.pop(stage, None)
        self._replays.forget(stages)
        for session in self._members.sessions.values():
            if session.replay is not None and session.stage in stages:
                self._members.fence([session], f"stage {session.stage} is held again")

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
        facts = [
            recovery.LostStage(
                stage,
                has_source=self._source(stage) is not None,
                is_kept=self.is_kept(stage),
                is_taken=stage in taken,
            )
            for stage in lost
        ]
        self._plan_replays([s.stage for s in facts if s.is_hopeless and s.is_taken])
        decision = recovery.lost_stages(
            [
                replace(
                    s,
                    may_return=self._may_return(s.stage),
                    can_replay=s.stage in self._to_replay,
                )
                for s in facts
            ],
            step=self._log.state.step,
            lost_for_s=self.lost_for_s() or 0.0,
            reclaim_s=self._reclaim_s,
        )
        return decision, placement

    def _plan_replays(self, stages: list[Stage]) -> None:
        plans = {stage: self._replays.plan(stage) for stage in stages if self._log.state.step}
        self._to_replay = {s: plan for s, plan in plans.items() if isinstance(plan, ReplayPlan)}
        self._no_replay = {s: plan for s, plan in plans.items() if isinstance(plan, NoReplay)}

    def _settle(self, session: Session, stage: Stage | None, reason: str) -> None:
        session.placement = reason
        if stage is None:
            session.say(f"no stage for this node: {reason}")
            return
        if session.stage is None:
            self._give(session, stage)
            return
        why = reason if session.stage != stage else ""
        if self.is_stale(session):
            why = why or f"its state is of step {session.step}"
        if session.tier != "holder" and not self._members.holders(stage):
            why = why or f"nobody else holds stage {stage}, and it has the weights only"
        if why and (self._source(stage) is not None or stage in self._to_replay):
            self._members.fence([session], why)
            self._give(session, stage)

    def _is_under_way(self) -> bool:
        """Whether there is a run to go on with, so that nobody should wait for a joiner."""
        state = self._log.state
        return state.step > 0 and state.paused is None and not self._members.uncovered()

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
        replay = self._to_replay.pop(stage, None) if source is None else None
        if replay is not None:
            source = coordinator_pb2.STATE_SOURCE_REPLAY
        if source is None:
            session.say(f"stage {stage} waits for a node that holds its state")
            return
        step, now_s = self._log.state.step, self._log.clock()
        as_worker = bool(donors) and self._is_under_way()
        if as_worker and now_s < session.warms_up_after_s:
            session.say("its copy did not keep up with the run; it tries again in a while")
            return
        warm_up = self._warm_up(session, stage) if as_worker else None
        if warm_up is not None:
            step, donors = warm_up
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
        session.assign(stage, incarnation, step=step, keeps=keeps, now_s=now_s, as_worker=as_worker)
        command = coordinator_pb2.Assign(
            stage=stage,
            incarnation=incarnation,
            step=step,
            source=source,
            tier=types_pb2.TIER_WORKER if as_worker else types_pb2.TIER_HOLDER,
        )
        if donors:
            part = types_pb2.STATE_PART_WEIGHTS if as_worker else types_pb2.STATE_PART_ALL
            self._begin(session, Version(step, part), donors, urgent=not as_worker)
            command.donors.CopyFrom(self._to_donors(donors, stage, step))
        if replay is not None:
            self._replays.began(session, replay)
            command.replay.CopyFrom(self._replays.command(replay))
        session.send(assign=command)

    def pull(self, session: Session, part: Part, *, urgent: bool) -> bool:
        """Have a worker get a part of the state at the run's step; False when nobody has it. Call
        it between steps only."""
        stage, step = session.stage, self._log.state.step
        assert stage is not None, "a worker has a stage"
        donors = self._donors(session, stage)
        if not donors:
            return False
        self._begin(session, Version(step, part), donors, urgent=urgent)
        command = coordinator_pb2.Pull(
            incarnation=session.incarnation,
            step=step,
            part=part,
            donors=self._to_donors(donors, stage, step),
        )
        session.send(pull=command)
        return True

    def _begin(
        self, session: Session, version: Version, donors: Sequence[Session], *, urgent: bool
    ) -> None:
        session.end_transfer(version.part)
        session.transfers.append(Transfer(version, tuple(d.incarnation for d in donors), urgent))
        self.pin()  # before anything that changes their state

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

    def _to_donors(
        self, donors: Sequence[Session], stage: Stage, step: int
    ) -> coordinator_pb2.Donors:
        digests = self._log.state.weights_digests.get(step)
        return coordinator_pb2.Donors(
            members=[s.member() for s in donors],
            weights_digest=digests[stage] if digests else 0,
            has_weights_digest=digests is not None,
        )

    def _warm_up(self, session: Session, stage: Stage) -> tuple[int, list[Session]] | None:
        """A version that is pinned already, and is to be preferred to the run's step: the one with
        which this node had begun before it was started again, or any when there are many."""
        transfer = chosen(self._warm_ups, session.peer_id, stage)
        if transfer is None:
            return None
        found = [self._members.by_incarnation(donor) for donor in transfer.donors]
        donors = [donor for donor in found if donor is not None]
        return (transfer.version.step, donors) if donors else None

    def forget_warm_up(self, peer_id: PeerId) -> None:
        self._warm_ups.pop(peer_id, None)

    def pin(self) -> None:
        """Tell holders which versions to serve, where that has changed. New versions are of the
        run's step: call it between steps when there are any."""
        sessions = list(self._members.sessions.values())
        now_s = self._log.clock()
        self._warm_ups.update(
            (s.peer_id, WarmUp(s.stage, s.transfers[0], now_s))
            for s in sessions
            if s.state == "warming" and s.stage is not None and s.transfers
        )
        self._warm_ups = kept(self._warm_ups, self._members.sessions, now_s)
        lingering = [warm_up.transfer for warm_up in self._warm_ups.values()]
        wanted = pins([t for s in sessions for t in s.transfers] + lingering)
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
        self._lost_since_s, self._reclaim_s = None, recovery.RECLAIM_S
        self._replays.forget(self._members.stages)
        sessions = list(self._members.sessions.values())
        self._members.fence(sessions, reason)
        self._members.last_holders.clear()
        for session in sessions:
            session.hello.ClearField("held")
