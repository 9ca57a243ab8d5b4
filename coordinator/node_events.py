# SPDX-License-Identifier: Apache-2.0
"""What a node reports, checked against the books and entered there."""

import math
from typing import Literal

from shoal.coordinator import commands
from shoal.coordinator.broken_links import whom_to_fence
from shoal.coordinator.ledger_facts import PreparedFacts, ReceiptFacts
from shoal.coordinator.members import Members
from shoal.coordinator.replays import Replays
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session, sane
from shoal.coordinator.step_runner import Phase, StepRunner
from shoal.coordinator.terms import Leadership
from shoal.coordinator.workers import Workers
from shoal.protocol.errors import (
    DiskFullError,
    FencedError,
    MalformedFrameError,
    NonFiniteError,
    TruncatedStreamError,
)
from shoal.protocol.ids import Incarnation, MicrobatchId, PeerId, Stage, display_name
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.spec import FaultSpec

_MAX_FAILURES = 3
_MAX_TEXT = 200
_MAX_BYTES = 1 << 40
"""More than this in one report is a lie; sums of what is less fit the history's columns."""


class NodeEvents:
    def __init__(
        self,
        log: RunLog,
        members: Members,
        runner: StepRunner,
        fault: FaultSpec,
        replays: Replays,
        *,
        workers: Workers,
        terms: Leadership,
    ) -> None:
        self._replays = replays
        self._workers = workers
        self._terms = terms
        self._log = log
        self._members = members
        self._runner = runner
        self._fault = fault

    def handle(self, session: Session, event: coordinator_pb2.NodeEvent) -> None:
        """Raises `TermError` when another coordinator leads, `FencedError` for stale events,
        another `ProtocolError` for impossible ones."""
        match event.WhichOneof("event"):
            case "heartbeat":
                session.beat(event.heartbeat)
            case "ready":
                self._on_ready(session, event.ready)
            case "receipt":
                self._on_receipt(session, event.receipt)
            case "prepared":
                self._on_prepared(session, event.prepared)
            case "applied":
                self._on_applied(session, event.applied)
            case "promoted":
                self._members.check_own(session, event.promoted.incarnation)
                self._workers.on_promoted(session, event.promoted)
            case "trouble":
                self._on_trouble(session, event.trouble)
            case "farewell":
                self._on_farewell(session, event.farewell)
            case "release":
                self._on_release(session, event.release)
            case "replaying":
                self._members.check_own(session, event.replaying.incarnation)
                self._replays.progressed(session, event.replaying)
            case "promise":
                self._terms.hear(session.peer_id, event.promise)
            case unexpected:
                raise MalformedFrameError(f"unexpected event {unexpected}")

    # ---- state ---------------------------------------------------------------------------

    def _on_ready(self, session: Session, ready: coordinator_pb2.Ready) -> None:
        self._members.check_own(session, ready.incarnation)
        stage, state = session.stage, self._log.state
        assert stage is not None, "an incarnation has a stage"
        if session.state == "warming" and not session.is_warm:
            if not self._workers.on_warm(session, ready):
                self._bad_state(
                    session, f"has weights {ready.weights_digest:#x} of step {ready.step}"
                )
            return
        if session.state != "copying":
            raise FencedError(f"is ready as incarnation {ready.incarnation} already")
        assigned = session.step
        # It may keep the state before the last step, with the sums to apply to it.
        has_sums = session.keeps and ready.step == assigned - 1
        if ready.step != assigned and not has_sums:
            self._bad_state(session, f"holds step {ready.step} instead of {assigned}")
            return
        expected = state.weights_digests.get(ready.step)
        if expected is not None and expected[stage] != ready.weights_digest:
            self._bad_state(
                session,
                f"holds weights {ready.weights_digest:#x} of stage {stage} at step {ready.step}; "
                f"the run's are {expected[stage]:#x}",
            )
            return
        session.state = "ready" if session.farewell is None else "leaving"
        session.transfers = []
        session.step, session.weights_digest = ready.step, ready.weights_digest
        self._replays.finished(session)
        if has_sums and assigned == state.step and self._runner.phase is Phase.BETWEEN:
            session.owed_commit = True
            record = state.records[state.step]
            if state.last_record is not None and state.last_record.step == state.step:
                record = state.last_record
                self._terms.told(session.peer_id)
            session.send(
                commit=commands.commit(
                    record, stage, self._terms.seal(record), term=self._terms.term
                )
            )
        self._log.say("ready", f"{session.name} holds stage {stage} at step {ready.step}")

    def _bad_state(self, session: Session, what: str) -> None:
        """What a node got or kept is not the run's state: it gets it anew, from elsewhere."""
        self._blame_donors(session)
        self._fail(session, what, "refused", still_holds=False)

    def _blame_donors(self, session: Session) -> None:
        for transfer in session.transfers:
            for incarnation in transfer.donors:
                donor = self._members.by_incarnation(incarnation)
                if donor is not None:
                    session.bad_donors.add(donor.peer_id)

    def _on_applied(self, session: Session, applied: coordinator_pb2.Applied) -> None:
        self._members.check_own(session, applied.incarnation)
        step = self._log.state.step
        if session.tier != "holder":
            # Who took part in the step was told to commit it, and keeps the record.
            took_part = not session.is_warm and session.step == step - 1
            self._workers.on_pulled(session, applied)
            if took_part:
                self._terms.applied(session.peer_id, step)
            self._runner.progressed()
            return
        if applied.step != step or session.step != step - 1:
            raise FencedError(f"applied step {applied.step}; the run is at {step}")
        if not session.owed_commit and not self._runner.participates(session):
            raise FencedError(f"applied step {step}, in which it takes no part")
        session.step, session.weights_digest = step, applied.weights_digest
        session.owed_commit = False
        self._runner.watch.applied(session, self._log.clock())
        self._terms.applied(session.peer_id, step)
        self._runner.progressed()

    # ---- the step ------------------------------------------------------------------------

    def _on_receipt(self, session: Session, receipt: coordinator_pb2.Receipt) -> None:
        self._members.check_own(session, receipt.incarnation)
        opened = self._runner.opened
        if opened is None or not self._runner.is_open(receipt.step, receipt.attempt):
            raise FencedError(f"receipt of step {receipt.step}, attempt {receipt.attempt}")
        if receipt.boundary_bytes > _MAX_BYTES:
            raise MalformedFrameError(
                f"{receipt.boundary_bytes:,} bytes are claimed for one microbatch"
            )
        if receipt.has_loss and not math.isfinite(receipt.loss_sum):
            self._runner.numbers.on_loss(session, receipt)
            return
        facts = ReceiptFacts(
            incarnation=Incarnation(receipt.incarnation),
            microbatch=MicrobatchId(receipt.microbatch),
            stage=Stage(receipt.stage),
            loss_sum=receipt.loss_sum if receipt.has_loss else None,
            busy_s=sane(receipt.busy_s),
            boundary_bytes=receipt.boundary_bytes,
            forward_bytes=_claimed(receipt, "forward_bytes"),
            backward_bytes=_claimed(receipt, "backward_bytes"),
            digest=receipt.digest,
        )
        if opened.ledger.record_receipt(facts):
            self._compare(session, facts, opened.ledger.contradicts(facts))
            self._runner.progressed()
            session.mutes = 0
            session.moved()
            if not opened.ledger.is_validation(receipt.microbatch):
                session.busy.append(sane(receipt.busy_s))
                session.pace.append(sane(receipt.busy_s))
                self._runner.receipts_taken += 1

    def _compare(self, session: Session, receipt: ReceiptFacts, other: Incarnation | None) -> None:
        """A slot was computed again with other bits: one of the two nodes is of another kernel
        class, is broken, or lies. The result is no longer an undisturbed run's to the bit."""
        if other is None:
            return
        name = display_name(self._log.state.peers[other])
        self._log.say(
            "contradiction",
            f"{session.name} computed microbatch {receipt.microbatch} at stage {receipt.stage} "
            f"with other bits than {name} before it (docs/assumptions.md)",
        )

    def _on_prepared(self, session: Session, prepared: coordinator_pb2.Prepared) -> None:
        self._members.check_own(session, prepared.incarnation)
        opened = self._runner.opened
        if opened is None or not self._runner.is_open(prepared.step, prepared.attempt):
            raise FencedError(f"prepared step {prepared.step}, attempt {prepared.attempt}")
        if any(norm < 0 for norm in prepared.squared_norms):
            raise MalformedFrameError("a squared norm is negative")
        if prepared.reduce_bytes > _MAX_BYTES:
            raise MalformedFrameError(f"{prepared.reduce_bytes:,} bytes are claimed for one sum")
        self._check_shares(session, prepared)
        if prepared.term != self._terms.term:
            raise FencedError(f"prepared in term {prepared.term}; this is {self._terms.term}")
        if not all(math.isfinite(norm) for norm in prepared.squared_norms):
            self._on_bad_sums(session, prepared)
            return
        counts = opened.ledger.record_prepared(
            PreparedFacts(
                incarnation=Incarnation(prepared.incarnation),
                round=prepared.round,
                sums_digest=prepared.sums_digest,
                squared_norms=tuple(prepared.squared_norms),
                reduce_bytes=prepared.reduce_bytes,
                share_bytes=tuple(prepared.share_bytes.items()),
            )
        )
        if counts:
            self._runner.watch.summed(session, self._log.clock())
            self._runner.progressed()

    def _check_shares(self, session: Session, prepared: coordinator_pb2.Prepared) -> None:
        assert session.stage is not None, "an incarnation has a stage"
        for boundary, num_bytes in prepared.share_bytes.items():
            if boundary not in (session.stage - 1, session.stage) or num_bytes > _MAX_BYTES:
                raise MalformedFrameError(
                    f"{num_bytes:,} bytes of shares are claimed at boundary {boundary}"
                )

    def _on_bad_sums(self, session: Session, prepared: coordinator_pb2.Prepared) -> None:
        opened = self._runner.opened
        if opened is not None and opened.ledger.is_awaited(session.incarnation, prepared.round):
            self._runner.numbers.on_sums(session, "a gradient's norm is not finite")

    # ---- trouble and leaving -------------------------------------------------------------

    def _on_trouble(self, session: Session, trouble: coordinator_pb2.Trouble) -> None:
        what = f"{trouble.error[:_MAX_TEXT]}: {trouble.detail[:_MAX_TEXT]}"
        kind = trouble.kind
        if kind == coordinator_pb2.TROUBLE_KIND_BAD_PEER:
            self._on_bad_peer(session, trouble, what)
            return
        self._members.check_own(session, trouble.incarnation)
        if kind == coordinator_pb2.TROUBLE_KIND_PEER_UNREACHABLE:
            self._on_unreachable(session, trouble)
        elif kind == coordinator_pb2.TROUBLE_KIND_NUMBERS:
            self._runner.numbers.on_trouble(session, trouble)
        elif kind == coordinator_pb2.TROUBLE_KIND_SNAPSHOT:
            session.snapshot_failed_s, session.snapshot_trouble = self._log.clock(), what
            self._log.say(
                "snapshot_failed",
                f"{session.name} could not store the snapshot of step {trouble.step}: {what}",
            )
        elif self._replays.failed(session, trouble):
            self._runner.take_out(session, what, kind="replay-failed")
        else:
            # A failure to get the state is the donors' when one of them is gone.
            copying = bool(session.transfers) and (
                session.state in ("copying", "warming") or session.pull_since_s is not None
            )
            excused = copying and any(
                self._members.by_incarnation(donor) is None
                for transfer in session.transfers
                for donor in transfer.donors
            )
            if copying:
                self._blame_donors(session)
            # The state is whole, unless it failed while it applied a step.
            whole = session.state in ("ready", "leaving") and session.step == self._log.state.step
            if trouble.error == DiskFullError.__name__ and session.stage is not None:
                # It waits for room by itself. Where others hold the stage, nobody waits for it:
                # it warms up again.
                excused = True
                whole = whole and not set(self._members.holders(session.stage)) - {session}
            self._fail(session, what, "failed", still_holds=whole, counts=not excused)

    def _on_bad_peer(self, session: Session, trouble: coordinator_pb2.Trouble, what: str) -> None:
        peer = PeerId(trouble.peer_id)
        self._log.say("refused", f"{session.name} refused {display_name(peer)}'s data: {what}")
        if trouble.error == NonFiniteError.__name__:
            # They may be the run's, and the accuser's word is not worth more than the sender's.
            self._runner.numbers.on_refused(session, trouble)
        else:
            self._members.mark(peer)
            if session.transfers and peer in self._members.sessions:
                session.bad_donors.add(peer)

    def _fail(
        self, session: Session, what: str, kind: str, *, still_holds: bool, counts: bool = True
    ) -> None:
        session.failures += counts
        self._workers.forget(session)
        if session.failures >= _MAX_FAILURES:
            self._runner.let_go(session, f"failed {session.failures} times: {what}")
        else:
            self._runner.take_out(session, what, kind=kind, still_holds=still_holds)

    def _on_unreachable(self, session: Session, trouble: coordinator_pb2.Trouble) -> None:
        """A link is broken although both sessions live. Fence one side if it lasts."""
        peer = self._members.by_incarnation(trouble.peer_incarnation)
        if peer is None or peer is session:
            return
        now_s, links = self._log.clock(), self._runner.links
        broke = trouble.error == TruncatedStreamError.__name__  # for the first time in a row
        lasts = not broke and links.report(session.incarnation, peer.incarnation, now_s)
        if not lasts and peer.silent_s(now_s) <= 3 * self._fault.heartbeat_s:
            return
        replaceable = [
            s.incarnation
            for s in (session, peer)
            if s.stage is not None and set(self._members.holders(s.stage)) - {s}
        ]
        link = (session.incarnation, peer.incarnation)
        wrong = self._members.by_incarnation(whom_to_fence(link, links.links(), replaceable) or 0)
        if wrong is not None:
            detail = trouble.detail[:_MAX_TEXT]
            reason = f"{session.name} can't reach {peer.name} ({detail})"
            self._runner.take_out(wrong, reason, kind="unreachable", still_holds=False)

    def _on_farewell(self, session: Session, farewell: coordinator_pb2.Farewell) -> None:
        session.farewell = farewell.reason[:_MAX_TEXT] or "its owner stopped it"
        within = ""
        if grace_s := sane(farewell.grace_s):
            session.grace_s, session.leave_by_s = grace_s, self._log.clock() + grace_s
            within = f" within {grace_s:.0f} s"
        if session.state == "ready":
            session.state = "leaving"
        self._log.say("leaving", f"{session.name} leaves{within}: {session.farewell}")

    def _on_release(self, session: Session, release: coordinator_pb2.Release) -> None:
        self._members.check_own(session, release.incarnation)
        opened = self._runner.opened
        if opened is None or not self._runner.is_open(release.step, release.attempt):
            raise FencedError(f"released leases of step {release.step}, {release.attempt}")
        ledger = opened.ledger
        if len(release.microbatches) > ledger.num_microbatches + ledger.num_validation:
            raise MalformedFrameError(
                f"releases {len(release.microbatches)} microbatches of a step that has fewer"
            )
        self._runner.release(session, release.microbatches)


def _claimed(
    receipt: coordinator_pb2.Receipt, leg: Literal["forward_bytes", "backward_bytes"]
) -> int | None:
    """What a receipt says of a leg: no more than it says of both."""
    return min(getattr(receipt, leg), receipt.boundary_bytes) if receipt.HasField(leg) else None
