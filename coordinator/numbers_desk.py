# SPDX-License-Identifier: Apache-2.0
"""Carries out what `numbers` decides about NaN, infinity and overflows in the open step."""

from collections.abc import Iterable
from typing import Protocol

from shoal.coordinator.ledger import StepLedger
from shoal.coordinator.ledger_facts import Slot
from shoal.coordinator.members import Members
from shoal.coordinator.numbers import (
    SUMS,
    BackOff,
    Circumstances,
    Diverged,
    Finding,
    Move,
    Redo,
    Suspicions,
    TakeOut,
    diverged_reason,
    judge,
    refuted,
)
from shoal.coordinator.open_step import OpenStep
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session
from shoal.coordinator.state import NumbersBackedOff
from shoal.coordinator.step_scale import UsedScale
from shoal.protocol.errors import MalformedFrameError, NumericOverflowError
from shoal.protocol.ids import Incarnation, MicrobatchId, PeerId, Stage
from shoal.protocol.proto import coordinator_pb2

_MAX_TEXT = 120


class Runner(Protocol):
    """What the desk needs of the step runner."""

    @property
    def opened(self) -> OpenStep | None: ...
    def is_open(self, step: int, attempt: int) -> bool: ...
    def abandon(self, reason: str) -> None: ...
    def tied(self, reason: str) -> None: ...
    def take_out(
        self, session: Session, reason: str, *, kind: str = ..., still_holds: bool = ...
    ) -> None: ...
    def move(self, slot: Slot, to: Iterable[Incarnation]) -> str: ...


class NumbersDesk:
    def __init__(self, log: RunLog, members: Members, runner: Runner, *, tokens: int) -> None:
        """`tokens`: per step."""
        self._log = log
        self._members = members
        self._runner = runner
        self._tokens = tokens
        self._suspicions = Suspicions()
        self._step = 0  # that they are about

    # ---- a step's scale and routes -------------------------------------------------------

    def scale(self, step: int, *, fp16: bool) -> UsedScale:
        state = self._log.state
        return state.scales.of(
            step, tokens_per_step=self._tokens, recorded=step <= state.highest_step, fp16=fp16
        )

    def steer(self, ledger: StepLedger) -> None:
        """Before a step's leases are sent: suspect microbatches go to whom they should."""
        for slot, peers in self._of_this_step().routes.items():
            to = [who for peer in sorted(peers) if (who := self._incarnation(peer, slot[1]))]
            if slot[0] != SUMS and ledger.holder(*slot) not in to:
                ledger.move(slot, to)

    def committed(self, opened: OpenStep) -> None:
        """A step is committed: what was suspected in it and not confirmed is refuted."""
        peers, dtypes = self._log.state.peers, self._dtypes()
        computed_by: dict[Slot, tuple[PeerId, str]] = {}
        for slot, found in self._of_this_step().findings.items():
            sums = slot[0] == SUMS
            who = opened.ledger.participants_at(slot[1])[0] if sums else opened.ledger.holder(*slot)
            peer = peers[who]
            computed_by[slot] = peer, dtypes.get(peer, found[0].dtype)
        for peer in refuted(self._of_this_step(), computed_by):
            self._members.mark(peer)
            session = self._members.sessions.get(peer) or self._members.gone.get(peer)
            name = session.name if session is not None else peer
            self._log.say("numbers", f"{name}'s bad numbers were its own: the others' are finite")
        self._suspicions = Suspicions()

    def diverged(self, what: str) -> None:
        """Pause the run over numbers that nothing can be done about. Raises `StorageError`."""
        self._diverge(diverged_reason(self._log.state.step + 1, what))

    # ---- reports -------------------------------------------------------------------------

    def on_trouble(self, session: Session, trouble: coordinator_pb2.Trouble) -> None:
        """A node's own task gave bad numbers. Raises `MalformedFrameError`, `StorageError`."""
        stage = session.stage
        assert stage is not None, "it speaks as its incarnation"
        overflows = trouble.error == NumericOverflowError.__name__
        if trouble.leg == coordinator_pb2.TASK_LEG_REDUCED:
            self._on_reduced(session, trouble)
            return
        if not self._is_held(session, trouble.step, trouble.attempt, trouble.microbatch):
            return
        self._found(
            session,
            (MicrobatchId(trouble.microbatch), stage),
            f"{trouble.error}: {trouble.detail}"[:_MAX_TEXT],
            overflows=overflows,
            forward=trouble.leg == coordinator_pb2.TASK_LEG_FORWARD,
            in_sums=trouble.leg
            not in (coordinator_pb2.TASK_LEG_FORWARD, coordinator_pb2.TASK_LEG_BACKWARD),
        )

    def _on_reduced(self, session: Session, trouble: coordinator_pb2.Trouble) -> None:
        opened = self._runner.opened
        is_open = self._runner.is_open(trouble.step, trouble.attempt)
        if opened is not None and is_open and opened.ledger.participates(session.incarnation):
            where = f"replicas of stage {session.stage}"
            self._runner.tied(f"{where} hold sums of step {trouble.step} that overflow together")

    def on_refused(self, session: Session, trouble: coordinator_pb2.Trouble) -> None:
        """A node got NaN or infinity from a neighbour, whose execution it puts in doubt; neither
        of the two is to blame yet. Unless no execution can be meant: then the sender is marked.
        Raises as `on_trouble` does."""
        state = self._log.state
        if (trouble.step, trouble.attempt) > (state.step + 1, state.attempt):
            self._members.mark(PeerId(trouble.peer_id))
            return
        sender = self._members.by_incarnation(trouble.peer_incarnation)
        if (
            sender is None
            or sender.peer_id != trouble.peer_id
            or sender.stage is None
            or session.stage is None
            or session.incarnation != trouble.incarnation
            or abs(sender.stage - session.stage) != 1
            or not self._is_held(session, trouble.step, trouble.attempt, trouble.microbatch)
            or not self._is_held(sender, trouble.step, trouble.attempt, trouble.microbatch)
        ):
            return
        self._found(
            sender,
            (MicrobatchId(trouble.microbatch), sender.stage),
            f"{trouble.error}: {trouble.detail}"[:_MAX_TEXT],
            forward=sender.stage < session.stage,
            in_sums=True,  # nobody can tell how far it has got
        )

    def on_loss(self, session: Session, receipt: coordinator_pb2.Receipt) -> None:
        """A receipt with a loss that is no number. Raises as `on_trouble` does."""
        if session.stage is None or receipt.stage != session.stage:
            raise MalformedFrameError(f"a receipt of stage {receipt.stage}")
        if self._is_held(session, receipt.step, receipt.attempt, receipt.microbatch):
            what = f"the loss is {receipt.loss_sum}"
            slot = MicrobatchId(receipt.microbatch), session.stage
            self._found(session, slot, what, forward=True, in_sums=True)

    def on_sums(self, session: Session, what: str) -> None:
        """A node's sums of its stage have no finite norm. Raises `StorageError`."""
        assert session.stage is not None, "it takes part"
        self._found(session, (SUMS, session.stage), what, in_sums=True)

    def _is_held(self, session: Session, step: int, attempt: int, microbatch: int) -> bool:
        """Whether this is about an execution that counts; others are late. Raises
        `MalformedFrameError` for a microbatch that the step hasn't."""
        opened = self._runner.opened
        if opened is None or not self._runner.is_open(step, attempt) or session.stage is None:
            return False
        ledger = opened.ledger
        if microbatch >= ledger.num_microbatches + ledger.num_validation:
            raise MalformedFrameError(f"bad numbers of microbatch {microbatch}; the step has none")
        holder = ledger.holder(MicrobatchId(microbatch), session.stage)
        return holder == session.incarnation and ledger.participates(holder)

    def _found(
        self,
        session: Session,
        slot: Slot,
        what: str,
        *,
        overflows: bool = False,
        forward: bool = False,
        in_sums: bool = False,
    ) -> None:
        opened = self._runner.opened
        assert opened is not None, "the step is open"
        # One that has its receipt is in somebody's sums, whatever the node says.
        in_sums = in_sums or slot in opened.ledger.receipts
        dtypes = self._dtypes()
        finding = Finding(
            slot=slot,
            peer_id=session.peer_id,
            name=session.name,
            dtype=dtypes[session.peer_id],
            what=what,
            overflows=overflows,
            forward=forward,
            in_sums=in_sums,
        )
        state = self._log.state
        live = [state.peers[who] for who in opened.ledger.takers_at(slot[1])]
        around = Circumstances(
            step=opened.step,
            scale=state.scales.next,
            replicas={peer: dtypes[peer] for peer in live if peer in dtypes},
            recomputes=opened.step <= state.highest_step,
        )
        where = "the sums" if slot[0] == SUMS else f"microbatch {slot[0]}"
        self._suspicions, verdict = judge(finding, self._of_this_step(), around)
        self._step = opened.step
        say = f"{session.name}: {where} at stage {slot[1]}: {what}"
        match verdict:
            case Move():
                to = [who for p in sorted(verdict.to) if (who := self._incarnation(p, slot[1]))]
                if other := self._runner.move(slot, to):
                    self._log.say("numbers", f"{say}; {other} computes it again")
                else:  # it has no holder any more
                    self._runner.abandon(f"{say}; nobody else may compute it")
            case TakeOut():
                self._log.say("numbers", say)
                self._runner.take_out(session, what, still_holds=True)
            case Redo():
                self._log.say("numbers", say)
                self._runner.abandon(f"{where} at stage {slot[1]} must be computed once more")
            case BackOff():
                self._log.say("numbers", say)
                self._log.record(
                    NumbersBackedOff(
                        time_s=self._log.clock(),
                        step=opened.step,
                        loss_scale=verdict.scale.loss_scale,
                        coarsen=verdict.scale.coarsen,
                        reason=verdict.reason,
                    )
                )
                self._runner.abandon(verdict.reason)
            case Diverged():
                self._log.say("numbers", say)
                self._diverge(verdict.reason)

    def _diverge(self, reason: str) -> None:
        self._suspicions = Suspicions()
        self._log.pause(reason)
        self._runner.abandon("the run diverged")

    # ---- facts ---------------------------------------------------------------------------

    def _of_this_step(self) -> Suspicions:
        opened = self._runner.opened
        step = opened.step if opened is not None else self._log.state.step + 1
        return self._suspicions if step == self._step else Suspicions()

    def _dtypes(self) -> dict[PeerId, str]:
        sessions = self._members.sessions
        return {peer: s.hello.hardware.compute_dtype or "fp32" for peer, s in sessions.items()}

    def _incarnation(self, peer: PeerId, stage: Stage) -> Incarnation | None:
        session = self._members.sessions.get(peer)
        return session.incarnation if session is not None and session.stage == stage else None
