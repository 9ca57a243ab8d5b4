# SPDX-License-Identifier: Apache-2.0
"""Carries a step from its opening to the weights that all replicas agree on, whoever is lost
meanwhile."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from shoal.coordinator import commands
from shoal.coordinator.broken_links import BrokenLinks
from shoal.coordinator.ledger import StepLedger
from shoal.coordinator.ledger_facts import Dissent, Lease, Slot
from shoal.coordinator.members import Members
from shoal.coordinator.mute import Debtor, holding_up, mute, rest_s
from shoal.coordinator.numbers_desk import NumbersDesk
from shoal.coordinator.open_step import OpenStep, num_validation, outvoted, stalled, step_record
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session
from shoal.coordinator.state import StepApplied, StepCommitted, StepOpened
from shoal.coordinator.terms import Leadership
from shoal.coordinator.watch import StepWatch
from shoal.protocol.errors import RunFailedError
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.faults import Moment
from shoal.protocol.ids import Incarnation, PeerId, Stage
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.schedule import credits_per_sender, in_flight_window
from shoal.protocol.spec import ResolvedRun

log = logging.getLogger(__name__)

_MAX_TIES = 3


class Phase(Enum):
    CLAIMING = "collecting promises"
    BETWEEN = "between steps"
    STEP = "step open"
    APPLYING = "applying"
    ENDED = "ended"


class StepRunner:
    def __init__(
        self,
        run: ResolvedRun,
        log_: RunLog,
        members: Members,
        terms: Leadership,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self.phase = Phase.BETWEEN
        self.opened: OpenStep | None = None
        """The step that is open or being applied."""
        self.links = BrokenLinks(lease_s=run.spec.fault.lease_s)
        self._run = run
        self._log = log_
        self._members = members
        self._faults = faults
        self.watch = StepWatch(log_.clock())
        self.receipts_taken = 0
        """Of training microbatches, also those that were withdrawn when their node died."""
        self._terms = terms
        self._ties = 0
        self.numbers = NumbersDesk(log_, members, self, tokens=run.spec.tokens_per_step)

    def is_open(self, step: int, attempt: int) -> bool:
        state = self._log.state
        return self.phase is Phase.STEP and (step, attempt) == (state.step + 1, state.attempt)

    def participates(self, session: Session) -> bool:
        return self.opened is not None and self.opened.ledger.participates(session.incarnation)

    def took_part(self) -> list[Incarnation]:
        """In the open step, also who was fenced since: its record may name them."""
        return self.opened.ledger.took_part() if self.opened is not None else []

    def progressed(self) -> None:
        self.watch.progressed(self._log.clock())

    # ---- opening -------------------------------------------------------------------------

    def open(self) -> None:
        """Open the next step with everybody who has the run's weights; every stage has a holder."""
        spec, state, members = self._run.spec, self._log.state, self._members
        step, attempt = state.step + 1, state.attempt + 1
        taking_part = {stage: members.participants(stage) for stage in members.stages}
        everybody = [s for group in taking_part.values() for s in group]
        fp16 = any(s.hello.hardware.compute_dtype == "fp16" for s in everybody)
        ledger = StepLedger(
            {stage: {s.incarnation: s.speed for s in g} for stage, g in taking_part.items()},
            num_microbatches=spec.batch.microbatches,
            num_validation=num_validation(spec, step, has_data=bool(self._run.data.validation)),
            workers=[s.incarnation for s in everybody if s.tier != "holder"],
        )
        self.numbers.steer(ledger)
        for session in everybody:
            if not ledger.leases_of(session.incarnation):
                session.rest()
        voters = () if state.council.voters else _voters(everybody)
        self._log.record(
            StepOpened(time_s=self._log.clock(), step=step, attempt=attempt, voters=voters)
        )
        self._faults.reach(Moment.STEP_OPENED, step)
        scale = self.numbers.scale(step, fp16=fp16)
        self.opened = OpenStep(
            step=step,
            attempt=attempt,
            ledger=ledger,
            opened_s=self._log.clock(),
            scale_exponent=scale.scale_exponent,
            loss_scale=scale.loss_scale,
        )
        self.phase = Phase.STEP
        self.links.forget_all()
        now_s = self._log.clock()
        self.watch.opened(now_s)
        members.send_plan()
        for stage, group in taking_part.items():
            for session in group:
                session.last_wait = ""
                session.asked(now_s)
                session.send(step_open=self._step_open(session.incarnation, stage, len(group)))
        self._log.changed()

    def _step_open(
        self, incarnation: Incarnation, stage: Stage, num_replicas: int
    ) -> coordinator_pb2.StepOpen:
        opened, num_stages = self.opened, len(self._members.stages)
        assert opened is not None
        return coordinator_pb2.StepOpen(
            step=opened.step,
            attempt=opened.attempt,
            epoch=self._members.epoch,
            num_microbatches=opened.ledger.num_microbatches,
            num_validation=opened.ledger.num_validation,
            scale_exponent=opened.scale_exponent,
            loss_scale=opened.loss_scale,
            leases=commands.to_protos(opened.ledger.leases_of(incarnation)),
            window=in_flight_window(stage, num_stages),
            credits=credits_per_sender(stage + 1, num_stages, num_replicas),
        )

    def abandon(self, reason: str) -> None:
        """Give the open step up; it is opened again from nothing."""
        self.opened = None
        self.phase = Phase.BETWEEN
        self._log.say("redone", f"step {self._log.state.step + 1} starts over: {reason}")

    # ---- losses --------------------------------------------------------------------------

    def fence(self, sessions: Sequence[Session], reason: str, *, still_hold: bool = False) -> str:
        """Take incarnations out of the run; their work moves at once. Returns what moved where,
        for people. Raises `StorageError`."""
        lost = self._members.fence(sessions, reason, still_hold=still_hold)
        self.links.forget(lost)
        opened = self.opened
        if opened is None or not lost:
            return ""
        told = opened.ledger.fence(lost) if self.phase is Phase.STEP else {}
        self._members.send_plan()
        if self.phase is not Phase.STEP or opened.ledger.empty_stages():
            return ""  # being applied, or about to be abandoned
        moved = self._tell(opened, told)
        return f"; {_listed(moved, 'rerouted to')}" if moved else ""

    def release(self, session: Session, microbatches: Sequence[int]) -> None:
        """A node that leaves gave leases of the open step back: others go on with them."""
        opened = self.opened
        if opened is None or not self.participates(session):
            return
        if moved := self._tell(opened, opened.ledger.release(session.incarnation, microbatches)):
            self._log.say("released", f"{session.name} hands over {_listed(moved)}")

    def is_idle(self, session: Session) -> bool:
        """Whether a participant of the open step has nothing of it."""
        opened = self.opened
        return opened is None or opened.ledger.is_idle(session.incarnation)

    def _tell(self, opened: OpenStep, told: Mapping[Incarnation, Sequence[Lease]]) -> Counter[str]:
        """Send new leases; returns how many moved to whom, for people."""
        self.progressed()
        for incarnation, leases in told.items():
            holder = self._members.by_incarnation(incarnation)
            if holder is not None:
                update = commands.lease_update(opened.step, opened.attempt, leases)
                holder.asked(self._log.clock())
                holder.send(leases=update)
        taken: Counter[str] = Counter()
        for who in opened.ledger.moved_last.values():
            holder = self._members.by_incarnation(who)
            if holder is not None:
                taken[holder.name] += 1
        return taken

    def move(self, slot: Slot, to: Iterable[Incarnation]) -> str:
        """Lease a microbatch that its holder gave back to somebody of `to`; returns to whom, empty
        when nobody of them may be given work."""
        opened = self.opened
        assert opened is not None, "leases are of an open step"
        return next(iter(self._tell(opened, opened.ledger.move(slot, to))), "")

    def take_out(
        self, session: Session, reason: str, *, kind: str = "fenced", still_holds: bool = False
    ) -> None:
        """Fence a node whose session lives. It may take a stage again."""
        moved = self.fence([session], reason, still_hold=still_holds)
        self._log.say(kind, f"{session.name} was taken out: {reason}{moved}")
        session.send(dismiss=coordinator_pb2.Dismiss(reason=reason, come_back=True))

    def end(self, session: Session, reason: str) -> None:
        """The session is over."""
        stage = session.stage
        self._members.remove(session)
        moved = self.fence([session], reason)
        where = f" stage {stage}" if stage is not None else ""
        self._log.say("left", f"{session.name} left{where}: {reason}{moved}")

    def let_go(self, session: Session, reason: str) -> None:
        """Send a node away for good."""
        session.dismissed = True
        session.send(dismiss=coordinator_pb2.Dismiss(reason=reason, come_back=False))
        self.end(session, reason)

    # ---- progress ------------------------------------------------------------------------

    def advance(self) -> None:
        """Whatever has become possible. Raises `StorageError`, or `RunFailedError` when a
        recomputed step differs from its record."""
        if self.phase is Phase.STEP:
            self._advance_step()
        elif self.phase is Phase.APPLYING:
            self._advance_applying()

    def _advance_step(self) -> None:
        opened = self.opened
        assert opened is not None
        ledger = opened.ledger
        empty = ledger.empty_stages()
        if empty:
            self.abandon(f"stage {empty[0]} lost its last node")
            return
        for dissent in ledger.dissents():
            self._settle(dissent)
            if self.opened is None:
                return
        complete = ledger.stages_to_reduce()
        if complete and ledger.receipts_done() == ledger.receipts_total():
            self._faults.reach(Moment.RECEIPTS_COMPLETE, opened.step)
        for stage in complete:
            command = commands.reduce(opened.step, opened.attempt, ledger.start_round(stage))
            for part in command.parts:
                session = self._members.by_incarnation(part.incarnation)
                if session is not None:
                    session.asked(self._log.clock())
                    session.send(reduce=command)
        if not ledger.committable():
            self._wait(stalled(opened, self._names()))
        elif obstacle := self._terms.commit_obstacle(self._members.sessions):
            self._log.wait(obstacle)
        else:
            self._commit(opened)

    def _settle(self, dissent: Dissent) -> None:
        """Replicas hold different sums: the majority stands; without one the step is redone."""
        step = self._log.state.step + 1
        reason = f"replicas of stage {dissent.stage} hold different sums of step {step}"
        for incarnation in dissent.outvoted:
            session = self._members.by_incarnation(incarnation)
            if session is not None:
                self._members.mark(session.peer_id)
                self.take_out(session, reason)
        if not dissent.outvoted:
            self.tied(reason)

    def tied(self, reason: str) -> None:
        """One replica's sums are wrong, and nobody knows whose: the step is redone, a few times."""
        self._ties += 1
        if self._ties >= _MAX_TIES:
            self._ties = 0
            self._log.pause(f"{reason}, {_MAX_TIES} times over; take one of them out")
        self.abandon(reason)

    def _commit(self, opened: OpenStep) -> None:
        record = step_record(self._run.spec, opened, now_s=self._log.clock())
        if not math.isfinite(record.grad_norm) or not math.isfinite(record.loss):
            self.numbers.diverged(f"loss {record.loss}, gradient norm {record.grad_norm}")
            return
        known = self._log.recorded(opened.step)
        if known is not None and known.sums_digests != record.sums_digests:
            raise RunFailedError(
                f"step {opened.step} was recomputed with other sums than recorded: "
                f"{record.sums_digests} instead of {known.sums_digests}; a node computes other "
                "bits than before (docs/assumptions.md)"
            )
        record = self._stamped(record)
        self._log.record(record)
        self._faults.reach(Moment.COMMIT_WRITTEN, opened.step)
        self.phase = Phase.APPLYING
        self._ties = 0
        self.numbers.committed(opened)
        self.progressed()
        for session in self._members.sessions.values():
            if session.stage is not None and self.participates(session):
                session.asked(self._log.clock())
                command = commands.commit(
                    record, session.stage, self._terms.seal(record), term=self._terms.term
                )
                session.send(commit=command)
                self._terms.told(session.peer_id)
        self._log.changed()

    def _stamped(self, record: StepCommitted) -> StepCommitted:
        takes_part = [s for s in self._members.sessions.values() if self.participates(s)]
        peers = self._log.state.peers
        counted = {who: peers[who] for stage in record.contributions for who in stage}
        return self._terms.stamp(record, _voters(takes_part), counted)

    def _advance_applying(self) -> None:
        late = [s.name for s in self._late()]
        if late:
            self._wait(f"{', '.join(late)} has yet to apply step {self._log.state.step}")
            return
        self.phase, self.opened = Phase.BETWEEN, None

    def agree(self) -> None:
        """Between steps: replicas must hold the same weights. The majority stands, a tie loses
        all; then the digests are recorded. Without a record it takes everybody to vote: call it
        when nobody is on the way. Raises as `advance` does."""
        step = self._log.state.step
        expected = self._log.state.weights_digests.get(step)
        agreed: list[int | None] = []
        for stage in self._members.stages:
            digests = {s.incarnation: s.weights_digest for s in self._members.holders(stage)}
            winner, wrong = outvoted(digests)
            if expected is not None:
                if winner is not None and expected[stage] not in digests.values():
                    raise RunFailedError(
                        f"step {step} was recomputed with other weights of stage {stage} than "
                        f"recorded: {winner:#x} instead of {expected[stage]:#x}; a node computes "
                        "other bits than before (docs/assumptions.md)"
                    )
                wrong = [who for who, digest in digests.items() if digest != expected[stage]]
            for incarnation in wrong:
                session = self._members.by_incarnation(incarnation)
                assert session is not None, "it is a holder"
                self._members.mark(session.peer_id)
                self.take_out(
                    session, f"its weights after step {step} differ from the other replicas'"
                )
            agreed.append(winner)
        digests_of_all = tuple(digest for digest in agreed if digest is not None)
        if expected is None and len(digests_of_all) == len(agreed):
            self._log.record(
                StepApplied(time_s=self._log.clock(), step=step, weights_digests=digests_of_all)
            )

    def _wait(self, reason: str) -> None:
        """Work is under way: only when it takes long is there something to say."""
        now_s = self._log.clock()
        if not self.watch.stalls(now_s):
            self._log.wait("")
            return
        debtor = holding_up(self._debtors())
        session = self._members.by_incarnation(debtor.incarnation) if debtor else None
        if debtor is not None and session is not None and session.stage is not None:
            if self._is_only(session):
                reason += f"; {session.name} goes on, or one more node joins and takes its place"
            else:
                reason += (
                    f"; {session.name} goes on, or is taken out when it has finished nothing for "
                    f"{debtor.patience_s:.0f} s"
                )
        self._log.wait(reason)

    def _is_only(self, session: Session) -> bool:
        assert session.stage is not None, "it takes part"
        return not set(self._members.holders(session.stage)) - {session}

    def take_out_mute(self) -> None:
        """Fence who holds up the step although its heart beats. A stage's only holder stays, unless
        another node is free to take its place. Raises `StorageError`."""
        for incarnation in mute(self._debtors()):
            session = self._members.by_incarnation(incarnation)
            if session is None or not self.participates(session) or session.stage is None:
                continue
            only = self._is_only(session)
            if only and not self._members.spares():
                continue
            now_s = self._log.clock()
            session.mutes += 1
            session.rests_until_s = now_s + rest_s(session.mutes)
            self.take_out(
                session,
                f"its heart beats, but it has finished nothing for {session.still_s:.0f} s; "
                f"it is tried again in {rest_s(session.mutes):.0f} s",
                kind="mute",
                still_holds=not only and self.phase is Phase.STEP,
            )
            session.placement = (
                f"it finished nothing for too long, and rests for {rest_s(session.mutes):.0f} s"
            )
            return  # the others may go on now

    def _debtors(self) -> list[Debtor]:
        if self.phase is Phase.STEP and self.opened is not None:
            return self.watch.computing(self.opened.ledger, self._members)
        return self.watch.applying(self._late()) if self.phase is Phase.APPLYING else []

    def _late(self) -> list[Session]:
        """Participants that have yet to apply the step. Workers can't: they pull the weights."""
        step = self._log.state.step
        return [
            s
            for s in self._members.sessions.values()
            if self.participates(s) and s.tier == "holder" and s.step < step
        ]

    def _names(self) -> dict[Incarnation, str]:
        return {s.incarnation: s.name for s in self._members.sessions.values() if s.incarnation}


def _voters(takes_part: Sequence[Session]) -> tuple[PeerId, ...]:
    """Who decides from here on: those that stay, or all where nobody does."""
    stays = [s for s in takes_part if s.farewell is None] or takes_part
    return tuple(sorted(s.peer_id for s in stays))


def _listed(moved: Mapping[str, int], how: str = "to") -> str:
    """ "2 microbatches to fox, 1 microbatch to owl"."""
    return ", ".join(
        f"{count} microbatch{'es' * (count > 1)} {how} {name}" for name, count in moved.items()
    )
