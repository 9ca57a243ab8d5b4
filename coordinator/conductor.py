# SPDX-License-Identifier: Apache-2.0
"""Conducts a run: nodes' events in, commands out, every decision logged before it is announced.

The conductor lives on the event loop and never blocks on a node. Each event changes the books and
then calls `_advance`, which does whatever has become possible: open a step, sum up a stage, commit,
admit joiners, roll back. What can't go on has a reason in `waiting_for`.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from shoal.compression.registry import parse_boundary
from shoal.coordinator.ledger import Lease, PreparedFacts, ReceiptFacts, StepLedger, loss_of
from shoal.coordinator.planner import NodeFacts, place, stage_needs
from shoal.coordinator.sessions import Session, lease_timeout_s
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.state import (
    DURABLE,
    EVENT_KINDS,
    AnyEvent,
    NodeFenced,
    Paused,
    Resumed,
    RolledBack,
    RunCreated,
    RunFinished,
    RunState,
    SnapshotStored,
    StageAssigned,
    StepApplied,
    StepCommitted,
    StepOpened,
    apply,
)
from shoal.coordinator.store import EventStore
from shoal.protocol.costs import boundary_shape
from shoal.protocol.errors import (
    FencedError,
    ProtocolError,
    ReduceMismatchError,
    StorageError,
    VersionError,
)
from shoal.protocol.ids import Incarnation, MicrobatchId, PeerId, Stage, display_name
from shoal.protocol.learning_rate import learning_rate
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.scale import scale_exponent
from shoal.protocol.schedule import in_flight_window
from shoal.protocol.spec import ResolvedRun
from shoal.version import PROTOCOL_VERSION, __version__

log = logging.getLogger(__name__)

JOIN_DEADLINE_S = 120.0
"""A joiner that takes longer to copy its stage than this no longer holds up the next step."""

_RECLAIM_S = 10.0
"""How long a lost stage's old holders may take to come back before the run rolls back."""

_MAX_FAILURES = 3
_FP16_LOSS_SCALE = 1024.0
_CLIP_EPS = 1e-6


class Phase(Enum):
    BETWEEN = "between steps"
    STEP = "step open"
    APPLYING = "applying"
    ENDED = "ended"


class Conductor:
    def __init__(
        self,
        run: ResolvedRun,
        store: EventStore,
        snapshots: SnapshotStore,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = run
        self.snapshots = snapshots
        self._store = store
        self.clock = clock
        self.state = RunState()
        for stored in store.read():
            event = EVENT_KINDS[stored.kind].model_validate(stored.payload)
            self.state = apply(event, self.state)  # type: ignore[arg-type]
        self.sessions: dict[PeerId, Session] = {}
        self.gone: dict[PeerId, Session] = {}
        """The last session of nodes that are not attached now, for display."""
        self.marks: Counter[PeerId] = Counter()
        self.phase = Phase.BETWEEN
        self.ledger: StepLedger | None = None
        self.waiting_for = ""
        self.stopping = False
        self.failed = ""
        self.events: deque[tuple[float, str, str]] = deque(maxlen=200)
        self.started_s = clock()
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None
        spec = run.spec
        boundary = parse_boundary(spec.pipeline.boundary)
        shape = boundary_shape(spec)
        assert spec.pipeline.cuts is not None
        self._needs = stage_needs(
            spec,
            spec.pipeline.cuts,
            forward_bytes=boundary.forward.encoded_bytes(shape),
            backward_bytes=boundary.backward.encoded_bytes(shape),
        )
        self._stages = [Stage(s) for s in range(spec.pipeline.stages)]
        self._epoch = 0
        self._planned: list[Incarnation] = []
        self._fenced: list[Incarnation] = []
        self._opened_s = 0.0
        self._applied: dict[Incarnation, int] = {}
        self._lost_since_s: float | None = clock() if self.state.step else None
        self._snapshot_asked: dict[int, dict[Stage, Incarnation]] = {}
        self._wants_snapshot = False
        self._unreachable: dict[Incarnation, float] = {}
        if not self.state.records and self.state.last_incarnation == 0:
            self._record(RunCreated(time_s=clock(), run_digest=run.digest))
            self._say("launched", f"run {run.run_id} is open: {spec.steps} steps")
        else:
            self._say("resumed", f"run {run.run_id} resumes after step {self.state.step}")

    # ---- books ---------------------------------------------------------------------------

    def _record(self, event: AnyEvent) -> None:
        """Log an event, durably where something follows from it, then apply it."""
        self._store.append(
            event.kind, event.model_dump(mode="json"), durable=isinstance(event, DURABLE)
        )
        self.state = apply(event, self.state)

    def _say(self, kind: str, text: str) -> None:
        log.info("%s", text)
        self.events.append((self.clock(), kind, text))
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self.on_change()

    def _by_incarnation(self, incarnation: int) -> Session | None:
        return next(
            (s for s in self.sessions.values() if s.incarnation == incarnation and incarnation),
            None,
        )

    def holders(self, stage: Stage) -> list[Session]:
        """Ready nodes of a stage whose state is the run's."""
        return [
            s
            for s in self.sessions.values()
            if s.stage == stage and s.state in ("ready", "leaving") and s.step == self.state.step
        ]

    # ---- sessions ------------------------------------------------------------------------

    def attach(self, peer_id: PeerId, hello: coordinator_pb2.Hello) -> Session:
        """A node's session begins. Raises `VersionError`."""
        if hello.protocol_version != PROTOCOL_VERSION:
            raise VersionError(
                f"protocol version {hello.protocol_version} (release {hello.release}) can't attach "
                f"to version {PROTOCOL_VERSION} (release {__version__}); install the same release"
            )
        old = self.sessions.get(peer_id)
        if old is not None:
            self._end(old, "it joined again")
        session = Session(peer_id, display_name(peer_id), hello, self.clock())
        self.sessions[peer_id] = session
        self.gone.pop(peer_id, None)
        self._say("joined", f"{session.name} joined ({hello.hardware.device_name or 'unknown'})")
        if self.phase is Phase.ENDED:
            self._dismiss(session, "the run is over", come_back=False)
        self._advance()
        return session

    def detach(self, session: Session, reason: str = "connection lost") -> None:
        """The session's stream is over."""
        if self.sessions.get(session.peer_id) is not session:
            return
        if self.ended:
            del self.sessions[session.peer_id]
            self.gone[session.peer_id] = session
            self._changed()
            return
        self._end(session, reason)
        self._advance()

    def _end(self, session: Session, reason: str) -> None:
        del self.sessions[session.peer_id]
        self.gone[session.peer_id] = session
        stage, was = session.stage, session.incarnation
        session.outbox.put_nowait(None)
        moved = self._fence([session], reason) if was else ""
        where = f" stage {stage}" if stage is not None else ""
        self._say("left", f"{session.name} left{where}: {reason}{moved}")

    def _dismiss(self, session: Session, reason: str, *, come_back: bool) -> None:
        session.send(dismiss=coordinator_pb2.Dismiss(reason=reason, come_back=come_back))
        if not come_back:
            session.outbox.put_nowait(None)

    def _fence(self, sessions: Sequence[Session], reason: str) -> str:
        """Take incarnations out of the run; their work moves at once. Returns what moved where."""
        lost = [s.incarnation for s in sessions if s.incarnation]
        for session in sessions:
            if session.incarnation:
                self._record(
                    NodeFenced(time_s=self.clock(), incarnation=session.incarnation, reason=reason)
                )
                session.unassign()
        self._fenced = (self._fenced + lost)[-256:]
        for asked in self._snapshot_asked.values():
            for stage, who in list(asked.items()):
                if who in lost:
                    del asked[stage]
        if self.phase is Phase.APPLYING:
            self._plan()
        if self.ledger is None or self.phase is not Phase.STEP:
            return ""
        told = self.ledger.fence(lost)
        self._plan()
        if self.ledger.empty_stages():
            return ""
        taken: Counter[str] = Counter()
        for incarnation, leases in told.items():
            holder = self._by_incarnation(incarnation)
            if holder is None:
                continue
            holder.send(
                leases=coordinator_pb2.LeaseUpdate(
                    step=self.state.step + 1,
                    attempt=self.state.attempt,
                    leases=[_lease(lease) for lease in leases],
                )
            )
        for (_, stage), who in self.ledger.moved_last.items():
            holder = self._by_incarnation(who)
            if holder is not None and stage == holder.stage:
                taken[holder.name] += 1
        if not taken:
            return ""
        return "; " + ", ".join(
            f"{count} microbatch{'es' * (count > 1)} rerouted to {name}"
            for name, count in taken.items()
        )

    def _plan(self) -> None:
        """Tell everybody in the step who is in it, when that has changed."""
        members = [
            s
            for s in self.sessions.values()
            if s.incarnation and s.state in ("ready", "leaving") and s.step >= self.state.step - 1
        ]
        incarnations = sorted(s.incarnation for s in members)
        if incarnations == self._planned:
            return
        self._planned = incarnations
        self._epoch += 1
        plan = coordinator_pb2.Plan(
            epoch=self._epoch, members=[s.member() for s in members], fenced=self._fenced
        )
        for session in members:
            session.send(plan=plan)

    # ---- events --------------------------------------------------------------------------

    def receive(self, session: Session, event: coordinator_pb2.NodeEvent) -> None:
        """An event of an attached node. Stale and impossible ones are refused and counted."""
        if self.sessions.get(session.peer_id) is not session:
            return
        now_s = self.clock()
        session.heard(now_s) if event.HasField("heartbeat") else None
        try:
            match event.WhichOneof("event"):
                case "heartbeat":
                    session.heartbeat = event.heartbeat
                case "ready":
                    self._on_ready(session, event.ready)
                case "receipt":
                    self._on_receipt(session, event.receipt)
                case "prepared":
                    self._on_prepared(session, event.prepared)
                case "applied":
                    self._on_applied(session, event.applied)
                case "trouble":
                    self._on_trouble(session, event.trouble)
                case "farewell":
                    self._on_farewell(session, event.farewell)
                case _:
                    raise FencedError(f"unexpected event {event.WhichOneof('event')}")
        except FencedError as error:
            log.info("%s: %s", session.name, error)
        except ProtocolError as error:
            self.marks[session.peer_id] += 1
            self._say("refused", f"{session.name}: {type(error).__name__}: {error}")
        self._advance()
        self._changed()

    def _check_own(self, session: Session, incarnation: int) -> None:
        if not session.incarnation or incarnation != session.incarnation:
            raise FencedError(
                f"speaks as incarnation {incarnation}, is {session.incarnation or 'unassigned'}"
            )

    def _on_ready(self, session: Session, ready: coordinator_pb2.Ready) -> None:
        self._check_own(session, ready.incarnation)
        assert session.stage is not None
        expected = self.state.weights_digests.get(ready.step)
        if expected is not None and expected[session.stage] != ready.weights_digest:
            raise ReduceMismatchError(
                f"holds weights {ready.weights_digest:#x} of stage {session.stage} at step "
                f"{ready.step}; the run's are {expected[session.stage]:#x}"
            )
        session.state, session.step = "ready", ready.step
        if ready.step == self.state.step - 1 and self.phase is Phase.BETWEEN:
            # It prepared the step that was committed while its session was broken.
            record = self.state.records[self.state.step]
            session.send(commit=self._commit_message(record, session.stage))
        self._say("ready", f"{session.name} holds stage {session.stage} at step {ready.step}")

    def _on_receipt(self, session: Session, receipt: coordinator_pb2.Receipt) -> None:
        self._check_own(session, receipt.incarnation)
        if not self._is_open(receipt.step, receipt.attempt):
            raise FencedError(f"receipt of step {receipt.step}, attempt {receipt.attempt}")
        assert self.ledger is not None
        counts = self.ledger.record_receipt(
            ReceiptFacts(
                incarnation=Incarnation(receipt.incarnation),
                microbatch=MicrobatchId(receipt.microbatch),
                stage=Stage(receipt.stage),
                loss_sum=receipt.loss_sum if receipt.has_loss else None,
                busy_s=receipt.busy_s,
                boundary_bytes=receipt.boundary_bytes,
            )
        )
        if counts and not self.ledger.is_validation(receipt.microbatch):
            session.busy.append(receipt.busy_s)

    def _on_prepared(self, session: Session, prepared: coordinator_pb2.Prepared) -> None:
        self._check_own(session, prepared.incarnation)
        if not self._is_open(prepared.step, prepared.attempt):
            raise FencedError(f"prepared step {prepared.step}, attempt {prepared.attempt}")
        assert self.ledger is not None
        self.ledger.record_prepared(
            PreparedFacts(
                incarnation=Incarnation(prepared.incarnation),
                round=prepared.round,
                sums_digest=prepared.sums_digest,
                squared_norms=tuple(prepared.squared_norms),
                reduce_bytes=prepared.reduce_bytes,
            )
        )

    def _is_open(self, step: int, attempt: int) -> bool:
        return (
            self.phase is Phase.STEP
            and step == self.state.step + 1
            and attempt == self.state.attempt
        )

    def _on_applied(self, session: Session, applied: coordinator_pb2.Applied) -> None:
        self._check_own(session, applied.incarnation)
        if applied.step != self.state.step:
            raise FencedError(f"applied step {applied.step}; the run is at {self.state.step}")
        session.step = applied.step
        if self.phase is Phase.APPLYING:
            self._applied[session.incarnation] = applied.weights_digest

    def _on_trouble(self, session: Session, trouble: coordinator_pb2.Trouble) -> None:
        what = f"{trouble.error}: {trouble.detail}"
        kind = trouble.kind
        if kind == coordinator_pb2.TROUBLE_KIND_BAD_PEER:
            peer = PeerId(trouble.peer_id)
            self.marks[peer] += 1
            self._say("refused", f"{session.name} refused {display_name(peer)}'s data: {what}")
        elif kind == coordinator_pb2.TROUBLE_KIND_PEER_UNREACHABLE:
            self._on_unreachable(session, trouble)
        elif kind == coordinator_pb2.TROUBLE_KIND_NUMBERS:
            self._check_own(session, trouble.incarnation)
            self._say("numbers", f"{session.name}: {what}")
            self._pause(f"the run diverged in step {self.state.step + 1}: {what}")
        else:
            self._check_own(session, trouble.incarnation)
            session.failures += 1
            again = session.failures < _MAX_FAILURES
            moved = self._fence([session], what)
            self._say("failed", f"{session.name} failed: {what}{moved}")
            self._dismiss(session, what, come_back=again)

    def _on_unreachable(self, session: Session, trouble: coordinator_pb2.Trouble) -> None:
        """A link is broken although both sessions live. Fence the unreachable side if it lasts."""
        peer = self._by_incarnation(trouble.peer_incarnation)
        if peer is None:
            return
        now_s = self.clock()
        first_s = self._unreachable.setdefault(peer.incarnation, now_s)
        fault = self.run.spec.fault
        if now_s - first_s >= fault.lease_s or peer.silent_s(now_s) > 3 * fault.heartbeat_s:
            del self._unreachable[peer.incarnation]
            reason = f"{session.name} can't reach it ({trouble.detail})"
            moved = self._fence([peer], reason)
            self._say("unreachable", f"{peer.name} was taken out: {reason}{moved}")
            self._dismiss(peer, reason, come_back=True)

    def _on_farewell(self, session: Session, farewell: coordinator_pb2.Farewell) -> None:
        session.farewell = farewell.reason[:200]
        if session.state == "ready":
            session.state = "leaving"
            self._say("leaving", f"{session.name} leaves after this step: {session.farewell}")

    def tick(self) -> None:
        """A few times a second: leases, deadlines."""
        now_s = self.clock()
        least_s = self.run.spec.fault.lease_s
        for session in list(self.sessions.values()):
            limit_s = lease_timeout_s(session.intervals, least_s=least_s)
            if session.silent_s(now_s) > limit_s:
                self._end(session, f"no sign of life for {limit_s:.1f} s")
        self._advance()

    # ---- operator ------------------------------------------------------------------------

    def pause(self, reason: str = "paused by the operator") -> None:
        self._pause(reason)
        self._advance()

    def _pause(self, reason: str) -> None:
        if self.state.paused is None:
            self._record(Paused(time_s=self.clock(), reason=reason))
            self._say("paused", f"{reason}; resume it with the dashboard's API")

    def resume(self) -> None:
        if self.state.paused is not None:
            self._record(Resumed(time_s=self.clock()))
            self._say("resumed", "the run goes on")
        if self.phase is Phase.STEP and self.ledger is not None:
            self._abandon("resumed after a pause")
        self._advance()

    def stop(self) -> None:
        """Finish the open step, store a snapshot, let the nodes go."""
        if not self.stopping:
            self.stopping = True
            self._say("stopping", "stopping after this step")
        self._advance()

    def take_snapshot(self) -> None:
        self._wants_snapshot = True
        self._advance()

    def dismiss(self, peer_id: PeerId) -> bool:
        session = self.sessions.get(peer_id)
        if session is None:
            return False
        self._dismiss(session, "the operator asked it to leave", come_back=False)
        self._end(session, "the operator asked it to leave")
        self._advance()
        return True

    # ---- what has become possible --------------------------------------------------------

    def _advance(self) -> None:
        try:
            before = None
            while before != (self.phase, self.state.step, self.state.attempt):
                before = (self.phase, self.state.step, self.state.attempt)
                if self.phase is Phase.STEP:
                    self._advance_step()
                elif self.phase is Phase.APPLYING:
                    self._advance_applying()
                elif self.phase is Phase.BETWEEN:
                    self._advance_between()
        except StorageError as error:
            # Nothing was announced that isn't in the log; nodes keep their state and wait.
            self._fail(f"the coordinator can't write its log: {error}")

    def _wait(self, reason: str) -> None:
        if reason != self.waiting_for:
            self.waiting_for = reason
            if reason:
                log.info("waiting: %s", reason)
            self._changed()

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self.phase = Phase.ENDED
        self._wait(reason)
        self._say("failed", reason)
        for session in self.sessions.values():
            self._dismiss(session, f"the run failed: {reason}", come_back=False)

    def _abandon(self, reason: str) -> None:
        """Give the open step up; it is opened again from nothing."""
        self.ledger = None
        self.phase = Phase.BETWEEN
        self._say("redone", f"step {self.state.step + 1} starts over: {reason}")

    def _advance_step(self) -> None:
        ledger = self.ledger
        assert ledger is not None
        empty = ledger.empty_stages()
        if empty:
            self._abandon(f"stage {empty[0]} lost its last node")
            return
        if self.state.paused is not None and self.state.paused.startswith("the run diverged"):
            self._abandon(self.state.paused)
            return
        self._wait("")
        for stage in ledger.stages_to_reduce():
            frozen = ledger.start_round(stage)
            command = coordinator_pb2.Reduce(
                step=self.state.step + 1,
                attempt=self.state.attempt,
                round=frozen.round,
                parts=[
                    coordinator_pb2.ReducePart(incarnation=who, microbatches=ids)
                    for who, ids in frozen.parts
                ],
            )
            for who, _ in frozen.parts:
                session = self._by_incarnation(who)
                if session is not None:
                    session.send(reduce=command)
        if ledger.committable():
            self._commit(ledger)

    def _commit(self, ledger: StepLedger) -> None:
        spec, step = self.run.spec, self.state.step + 1
        sums = ledger.sums()
        # fsum is exact: the norm does not depend on how tensors are spread over stages.
        grad_norm = math.sqrt(math.fsum(n for s in self._stages for n in sums[s].squared_norms))
        if not math.isfinite(grad_norm):
            self._pause(f"the run diverged in step {step}: the gradient norm is {grad_norm}")
            return
        clip = spec.optimizer.clip_norm
        last = self._stages[-1]
        tokens = spec.tokens_per_microbatch
        training = range(spec.batch.microbatches)
        validation = range(spec.batch.microbatches, spec.batch.microbatches + ledger.num_validation)
        contributions = ledger.contributions()
        record = StepCommitted(
            time_s=self.clock(),
            step=step,
            attempt=self.state.attempt,
            loss=loss_of(ledger.receipts, training, last) / (tokens * len(training)),
            validation_loss=(
                loss_of(ledger.receipts, validation, last) / (tokens * len(validation))
                if validation
                else None
            ),
            grad_norm=grad_norm,
            clip_scale=min(1.0, clip / (grad_norm + _CLIP_EPS)) if clip else 1.0,
            learning_rate=learning_rate(spec.optimizer, spec.steps, step),
            scale_exponent=self._scale_exponent(),
            loss_scale=self._loss_scale(),
            num_tokens=spec.tokens_per_step,
            sums_digests=tuple(sums[s].sums_digest for s in self._stages),
            contributions=tuple(
                {who: tuple(ids) for who, ids in contributions[s].items()} for s in self._stages
            ),
            boundary_bytes=sum(r.boundary_bytes for r in ledger.receipts.values()),
            reduce_bytes=ledger.reduce_bytes(),
            seconds=self.clock() - self._opened_s,
        )
        known = self.state.records.get(step)
        if known is not None and known.sums_digests != record.sums_digests:
            self._fail(
                f"step {step} was recomputed with other sums than recorded: "
                f"{record.sums_digests} instead of {known.sums_digests}; a node computes other "
                "bits than before (docs/assumptions.md)"
            )
            return
        self._record(record)
        self._applied = {}
        self.phase = Phase.APPLYING
        for session in self.sessions.values():
            if session.stage is not None and ledger.participates(session.incarnation):
                session.send(commit=self._commit_message(record, session.stage))
        self._changed()

    @staticmethod
    def _commit_message(record: StepCommitted, stage: Stage) -> coordinator_pb2.Commit:
        return coordinator_pb2.Commit(
            step=record.step,
            attempt=record.attempt,
            learning_rate=record.learning_rate,
            grad_norm=record.grad_norm,
            clip_scale=record.clip_scale,
            scale_exponent=record.scale_exponent,
            loss_scale=record.loss_scale,
            num_tokens=record.num_tokens,
            sums_digest=record.sums_digests[stage],
        )

    def _advance_applying(self) -> None:
        assert self.ledger is not None
        pending = [
            s for s in self.sessions.values()
            if self.ledger.participates(s.incarnation) and s.incarnation not in self._applied
        ]  # fmt: skip
        if pending:
            self._wait("")
            return
        digests: dict[Stage, Counter[int]] = {stage: Counter() for stage in self._stages}
        for session in self.sessions.values():
            if session.stage is not None and session.incarnation in self._applied:
                digests[session.stage][self._applied[session.incarnation]] += 1
        if self._fence_disagreeing(digests):
            return self._advance_applying()
        self.phase, self.ledger = Phase.BETWEEN, None
        if all(digests.values()):
            agreed = tuple(next(iter(digests[stage])) for stage in self._stages)
            known = self.state.weights_digests.get(self.state.step)
            if known is not None and known != agreed:
                self._fail(f"step {self.state.step} was recomputed with other weights")
                return None
            self._record(
                StepApplied(time_s=self.clock(), step=self.state.step, weights_digests=agreed)
            )
        return None

    def _fence_disagreeing(self, digests: dict[Stage, Counter[int]]) -> bool:
        """Replicas whose weights differ after a commit: the majority stands, a tie loses all."""
        wrong: list[Session] = []
        for stage, votes in digests.items():
            if len(votes) < 2:
                continue
            (winner, most), (_, second) = votes.most_common(2)
            wrong += [
                s
                for s in self.sessions.values()
                if s.stage == stage
                and s.incarnation in self._applied
                and (most == second or self._applied[s.incarnation] != winner)
            ]
        for session in wrong:
            self.marks[session.peer_id] += 1
            self._applied.pop(session.incarnation, None)
            reason = f"its weights after step {self.state.step} differ from its replicas'"
            self._fence([session], reason)
            self._say("fenced", f"{session.name} was taken out: {reason}")
            self._dismiss(session, reason, come_back=True)
        return bool(wrong)

    # ---- between steps -------------------------------------------------------------------

    def _advance_between(self) -> None:
        if self.state.step >= self.run.spec.steps:
            self._finish()
            return
        if self.stopping:
            self._stop()
            return
        self._let_go()
        self._assign()
        uncovered = [stage for stage in self._stages if not self.holders(stage)]
        if not uncovered:
            self._lost_since_s = None
        reason = self._obstacle(uncovered)
        self._wait(reason)
        if reason:
            for session in self.sessions.values():
                if session.state == "ready":
                    session.say(f"waiting: {reason}")
            return
        self._snapshot_if_due()
        self._open_step()

    def _obstacle(self, uncovered: Sequence[Stage]) -> str:
        """Why the next step can't open, in plain words; empty when it can."""
        if self.state.paused is not None:
            return f"{self.state.paused}; resume it with POST /api/run/resume"
        if uncovered:
            which = ", ".join(str(stage) for stage in uncovered)
            copying = [s.name for s in self.sessions.values() if s.state == "copying"]
            if copying:
                return f"stage {which} needs a node: {', '.join(copying)} is getting its state"
            if self._lost_since_s is not None and self.state.step:
                return (
                    f"stage {which} has no node that holds step {self.state.step}; the run goes "
                    f"on from snapshot {self.state.snapshot_step} once a node is free for it"
                )
            return f"stage {which} needs a node; give the join link to one more"
        ready = sum(len(self.holders(stage)) for stage in self._stages)
        wanted = self.run.spec.pipeline.min_nodes or (
            len(self._stages) * self.run.spec.pipeline.replicas
        )
        if self.state.highest_step == 0 and self.state.attempt == 0 and ready < wanted:
            return f"{ready} of {wanted} nodes are ready for the first step"
        now_s = self.clock()
        joining = [
            s.name
            for s in self.sessions.values()
            if s.state == "copying" and now_s - s.assigned_s < JOIN_DEADLINE_S
        ]
        behind = [
            s.name
            for s in self.sessions.values()
            if s.state == "ready" and s.step == self.state.step - 1
        ]
        if joining or behind:
            return f"{', '.join(joining + behind)} is getting the state of its stage"
        return ""

    def _let_go(self) -> None:
        """Nodes that said farewell leave now, unless they are a stage's last."""
        for session in list(self.sessions.values()):
            if session.farewell is None:
                continue
            others = [
                s for s in (self.holders(session.stage) if session.stage is not None else [])
                if s is not session and s.farewell is None
            ]  # fmt: skip
            last_holder = session.state == "leaving" and not others
            if last_holder and self.state.step and self.state.snapshot_step != self.state.step:
                self._ask_for_snapshot()
                continue
            self._dismiss(session, session.farewell, come_back=False)
            self._end(session, session.farewell)

    def _assign(self) -> None:
        """Give stages to nodes without one, each from the nearest source of its state."""
        step = self.state.step
        lost = [s for s in self._stages if not self.holders(s)]
        if lost and self._lost_since_s is None and step:
            self._lost_since_s = self.clock()
        current = {s.peer_id: s.stage for s in self.sessions.values() if s.stage is not None} | {
            s.peer_id: stage
            for s in self.sessions.values()
            if s.stage is None and (stage := self._keepable(s)) is not None
        }
        waiting_for_old = (
            lost
            and step
            and self._lost_since_s is not None
            and self.clock() - self._lost_since_s < _RECLAIM_S
            and any(self._source(stage) is None for stage in lost)
        )
        nodes = [
            NodeFacts(
                peer_id=s.peer_id,
                flops=s.hello.hardware.flops,
                memory_bytes=s.hello.hardware.memory_bytes,
            )
            for s in self.sessions.values()
            if s.farewell is None and (not waiting_for_old or s.peer_id in current)
        ]
        placement = place(
            nodes,
            self._needs,
            current=current,
            wanted_replicas=self.run.spec.pipeline.replicas,
        )
        sourceless = [
            stage
            for stage in lost
            if self._source(stage) is None
            and stage in set(placement.stage_of.values())
            and not any(
                s.stage == stage or self._keepable(s) == stage for s in self.sessions.values()
            )
        ]
        if sourceless and not waiting_for_old:
            self._roll_back(f"stage {sourceless[0]} lost its last node after step {step}")
            return
        for peer_id, stage in placement.stage_of.items():
            session = self.sessions[peer_id]
            session.placement = placement.reasons.get(peer_id, "")
            if stage is None:
                session.say(f"no stage for this node: {session.placement}")
            elif session.stage is None:
                self._assign_stage(session, stage)
            elif session.stage != stage:
                self._fence([session], session.placement)
                self._assign_stage(session, stage)

    def _keepable(self, session: Session) -> Stage | None:
        """The stage whose state a returning node still holds, if that is the run's."""
        held = session.held()
        if held is None or held.stage >= len(self._stages):
            return None
        step, stage = self.state.step, Stage(held.stage)
        if held.step == step:
            digests = self.state.weights_digests.get(step)
            if digests is None or digests[stage] == held.weights_digest:
                return stage
        record = self.state.records.get(step)
        if (
            held.step == step - 1
            and held.has_prepared
            and record is not None
            and record.sums_digests[stage] == held.prepared_digest
        ):
            return stage
        return None

    def _source(self, stage: Stage) -> coordinator_pb2.StateSource.ValueType | None:
        """Where a stage's state at the run's step can be had, beside from a node that keeps it."""
        if self.holders(stage):
            return coordinator_pb2.STATE_SOURCE_PEER
        if self.state.step == 0:
            return coordinator_pb2.STATE_SOURCE_INIT
        if self.state.step in self.snapshots.complete_steps():
            return coordinator_pb2.STATE_SOURCE_SNAPSHOT
        return None

    def _assign_stage(self, session: Session, stage: Stage) -> None:
        keeps = self._keepable(session) == stage
        source = coordinator_pb2.STATE_SOURCE_KEEP if keeps else self._source(stage)
        if source is None:
            session.say(f"stage {stage} waits for a node that holds its state")
            return
        incarnation = Incarnation(self.state.last_incarnation + 1)
        self._record(
            StageAssigned(
                time_s=self.clock(),
                incarnation=incarnation,
                peer_id=session.peer_id,
                name=session.name,
                stage=stage,
            )
        )
        session.incarnation, session.stage = incarnation, stage
        session.state, session.assigned_s = "copying", self.clock()
        command = coordinator_pb2.Assign(
            stage=stage, incarnation=incarnation, step=self.state.step, source=source
        )
        if source == coordinator_pb2.STATE_SOURCE_PEER:
            donor = min(self.holders(stage), key=lambda s: (s.heartbeat.queue_depth, s.peer_id))
            command.donor.CopyFrom(donor.member())
        session.send(assign=command)

    def _roll_back(self, reason: str) -> None:
        """Every stage goes back to the last common snapshot; committed steps are recomputed, and
        each must reproduce its record."""
        newest = self.snapshots.newest()
        target = newest if newest is not None and newest < self.state.step else 0
        self._record(RolledBack(time_s=self.clock(), to_step=target, reason=reason))
        self._say(
            "rolled_back",
            f"{reason}; every stage goes back to "
            + (f"the snapshot of step {target}" if target else "the beginning")
            + " and recomputes",
        )
        self._lost_since_s = None
        self._fence([s for s in self.sessions.values() if s.incarnation], reason)
        for session in self.sessions.values():
            session.hello.ClearField("held")
        self._assign()

    def _open_step(self) -> None:
        spec, step = self.run.spec, self.state.step + 1
        replicas = {
            stage: {s.incarnation: s.speed for s in self.holders(stage)} for stage in self._stages
        }
        validates = spec.validation.every and (step - 1) % spec.validation.every == 0
        num_validation = (
            spec.validation.microbatches if validates and self.run.data.validation else 0
        )
        self._record(StepOpened(time_s=self.clock(), step=step, attempt=self.state.attempt + 1))
        self.ledger = StepLedger(
            replicas, num_microbatches=spec.batch.microbatches, num_validation=num_validation
        )
        self._opened_s = self.clock()
        self._unreachable.clear()
        self.phase = Phase.STEP
        self._plan()
        for stage in self._stages:
            for session in self.holders(stage):
                session.last_wait = ""
                session.send(
                    step_open=coordinator_pb2.StepOpen(
                        step=step,
                        attempt=self.state.attempt,
                        epoch=self._epoch,
                        num_microbatches=spec.batch.microbatches,
                        num_validation=num_validation,
                        scale_exponent=self._scale_exponent(),
                        loss_scale=self._loss_scale(),
                        leases=[_lease(x) for x in self.ledger.leases_of(session.incarnation)],
                        window=in_flight_window(stage, len(self._stages)),
                    )
                )
        self._changed()

    def _scale_exponent(self) -> int:
        return scale_exponent(self.run.spec.tokens_per_step)

    def _loss_scale(self) -> float:
        """A power of two: undone exactly, so that fp32 nodes compute the same with and without."""
        any_fp16 = any(s.hello.hardware.compute_dtype == "fp16" for s in self.sessions.values())
        return _FP16_LOSS_SCALE if any_fp16 else 1.0

    # ---- snapshots and the end -----------------------------------------------------------

    def _snapshot_if_due(self) -> None:
        step = self.state.step
        if not step or step == self.state.snapshot_step:
            self._wants_snapshot = False
            return
        if self._wants_snapshot or step % self.run.spec.fault.snapshot_every == 0:
            self._wants_snapshot = False
            self._ask_for_snapshot()

    def _ask_for_snapshot(self) -> None:
        """One holder of every stage sends its state to the store; asked once each."""
        step = self.state.step
        asked = self._snapshot_asked.setdefault(step, {})
        for stage in self._stages:
            holders = self.holders(stage)
            if stage not in asked and holders:
                chosen = min(holders, key=lambda s: (s.heartbeat.queue_depth, s.peer_id))
                asked[stage] = chosen.incarnation
                chosen.send(snapshot=coordinator_pb2.TakeSnapshot(step=step))

    def expects_snapshot(self, peer_id: PeerId, step: int, stage: int) -> bool:
        """Whether this node was asked for this stage's snapshot and has not been fenced since."""
        session = self.sessions.get(peer_id)
        asked = self._snapshot_asked.get(step, {}).get(Stage(stage))
        return session is not None and asked is not None and asked == session.incarnation

    def snapshot_stored(self, step: int) -> None:
        """The store has every stage's state at `step`."""
        self._snapshot_asked.pop(step, None)
        if step > self.state.snapshot_step:
            self._record(SnapshotStored(time_s=self.clock(), step=step))
            self._say("snapshot", f"snapshot of step {step} is stored")
            self.snapshots.prune(keep=2)
        self._advance()

    def _has_final_snapshot(self) -> bool:
        if self.state.step in self.snapshots.complete_steps() or not self.state.step:
            return True
        self._let_go()
        self._assign()
        self._ask_for_snapshot()
        missing = [s for s in self._stages if s not in self._snapshot_asked[self.state.step]]
        self._wait(
            f"stage {missing[0]} needs a node that holds step {self.state.step} for the snapshot"
            if missing
            else f"the snapshot of step {self.state.step} is being stored"
        )
        return False

    def _finish(self) -> None:
        if not self._has_final_snapshot():
            return
        if self.state.weights_sha256 is None:
            digest = self.snapshots.weights_sha256(self.state.step)
            self._record(RunFinished(time_s=self.clock(), weights_sha256=digest))
        self._end_run("finished", f"run {self.run.run_id} is finished")

    def _stop(self) -> None:
        out_of_reach = any(not self.holders(stage) for stage in self._stages)
        if out_of_reach or self._has_final_snapshot():
            self._end_run("stopped", f"stopped after step {self.state.step}")

    def _end_run(self, kind: str, text: str) -> None:
        self.phase = Phase.ENDED
        self._wait("")
        self._say(kind, text)
        for session in list(self.sessions.values()):
            self._dismiss(session, text, come_back=False)

    def flush(self) -> None:
        """Make soft events durable too. For the daemon's timer."""
        try:
            self._store.flush()
        except StorageError as error:
            self._fail(f"the coordinator can't write its log: {error}")

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED


def _lease(lease: Lease) -> coordinator_pb2.Lease:
    return coordinator_pb2.Lease(
        microbatch=lease.microbatch,
        upstream=lease.upstream,
        downstream=lease.downstream,
        downstream_done=lease.downstream_done,
        upstream_done=lease.upstream_done,
    )


def contributions(records: Iterable[StepCommitted]) -> Counter[Incarnation]:
    """Counted (microbatch, stage) pairs by incarnation."""
    counted: Counter[Incarnation] = Counter()
    for record in records:
        for stage in record.contributions:
            for incarnation, ids in stage.items():
                counted[incarnation] += len(ids)
    return counted
