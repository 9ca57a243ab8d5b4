# SPDX-License-Identifier: Apache-2.0
"""Conducts a run: nodes' events in, commands out, every decision logged before it is announced.

The conductor lives on the event loop and never blocks on a node. Each event changes the books and
then calls `_advance`, which does whatever has become possible: sum up a stage, commit, let nodes
go, give out stages, roll back, open a step. What can't go on has a reason in `waiting_for`.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from shoal.coordinator.assembly import assemble
from shoal.coordinator.compaction import MAX_STEPS, WORTHWHILE_STEPS
from shoal.coordinator.followers import Follower
from shoal.coordinator.history import StepHistory
from shoal.coordinator.ledger import StepLedger
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.state import (
    Resumed,
    RunCreated,
    RunFinished,
    RunState,
    StandbyRegistered,
)
from shoal.coordinator.step_runner import Phase
from shoal.coordinator.store import EventStore
from shoal.coordinator.terms import Claim, Leadership
from shoal.protocol.errors import (
    DiskFullError,
    FencedError,
    ProtocolError,
    RunFailedError,
    StorageError,
    TermError,
)
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.identity import require_protocol
from shoal.protocol.ids import PeerId, display_name
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.spec import ResolvedRun
from shoal.version import __version__

log = logging.getLogger(__name__)

_DEAF_S = 1.0
"""Two ticks further apart than this: the coordinator was suspended or blocked, so that silence
in that time says nothing about the nodes."""


class Conductor:
    def __init__(
        self,
        run: ResolvedRun,
        store: EventStore,
        snapshots: SnapshotStore,
        claim: Claim | None = None,
        *,
        clock: Callable[[], float] = time.time,
        faults: Faults = NO_FAULTS,
    ) -> None:
        """A log that is new, or that led alone until now, leads at once; any other collects
        promises first."""
        self.run = run
        self._store = store
        self.snapshots = snapshots
        self.clock = clock
        self.started_s = clock()
        self.stopping = False
        self._log = RunLog(store, clock)
        self.terms = Leadership(self._log, run.run_id, claim or Claim())
        parts = assemble(run, self._log, snapshots, self.terms, faults)
        self._members = parts.members
        self._runner = parts.runner
        self._requests = parts.requests
        self._assignments = parts.assignments
        self._events = parts.events
        self._between = parts.between
        self._standbys = parts.standbys
        self._ending = parts.ending
        self._flush_error: StorageError | None = None
        self._ticked_s = self._listening_s = self.started_s
        is_new = not self.state.records and self.state.last_incarnation == 0
        if is_new and not self.state.term:
            self._log.record(RunCreated(time_s=clock(), run_digest=run.digest))
            if self._log.blocked:
                raise DiskFullError(self._log.blocked)
        self._runner.phase = Phase.CLAIMING
        self._claim_term()
        if is_new:
            self._log.say("launched", f"run {run.run_id} is open: {run.spec.steps} steps")
        else:
            self._log.say("resumed", f"run {run.run_id} resumes after step {self.state.step}")
            if self.terms.leads:
                self._compact()

    # ---- facts ---------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        return self._log.state

    @property
    def sessions(self) -> dict[PeerId, Session]:
        return self._members.sessions

    @property
    def gone(self) -> dict[PeerId, Session]:
        """The last session of nodes that are not attached now, for display."""
        return self._members.gone

    @property
    def marks(self) -> Counter[PeerId]:
        return self._members.marks

    @property
    def phase(self) -> Phase:
        return self._runner.phase

    @property
    def ended(self) -> bool:
        return self._ending.is_reached

    @property
    def failed(self) -> str:
        """Why, when the end is a bad one."""
        return self._ending.failed

    @property
    def deposed(self) -> TermError | None:
        """Why it leads no more, once another coordinator does."""
        return self._ending.deposed

    @property
    def can_write(self) -> bool:
        return self._ending.can_write

    @property
    def followers(self) -> dict[str, Follower]:
        """Standbys that are connected, by log id."""
        return self._standbys.connected

    @property
    def last_sequence(self) -> int:
        """Of the newest logged event."""
        return self._store.last_sequence

    def say_changed(self) -> None:
        """Something that people see has changed."""
        self._log.changed()

    @property
    def ledger(self) -> StepLedger | None:
        opened = self._runner.opened
        return opened.ledger if opened is not None else None

    @property
    def receipts_taken(self) -> int:
        return self._runner.receipts_taken

    @property
    def waiting_for(self) -> str:
        return self._log.blocked or self._log.waiting_for

    @property
    def events(self) -> deque[tuple[float, str, str]]:
        """(time, kind, text), newest last; for people."""
        return self._log.lines

    @property
    def history(self) -> StepHistory:
        """Of the steps that `state.records` has no more."""
        return self._log.history

    @property
    def can_announce(self) -> asyncio.Event:
        """Set while everything that commands follow from is in the log. Whoever delivers a
        session's commands waits for it before each."""
        return self._log.can_announce

    @property
    def version(self) -> int:
        """Counts changes that people may see; `on_change` is called at each."""
        return self._log.version

    @property
    def on_change(self) -> Callable[[], None]:
        return self._log.on_change

    @on_change.setter
    def on_change(self, callback: Callable[[], None]) -> None:
        self._log.on_change = callback

    # ---- nodes ---------------------------------------------------------------------------

    def greet(self, peer_id: PeerId, hello: coordinator_pb2.Hello) -> None:
        """A node is here. Once `terms.is_worth_a_promise`, ask it with `terms.lead()`, and give
        the answer to `attach`; call `terms.went` when it is gone.

        Raises `VersionError`, or what sends the node elsewhere, as `attach` does.
        """
        self._require_room()
        require_protocol(hello.protocol_version, hello.release)
        self.terms.came(peer_id)

    def attach(
        self, peer_id: PeerId, hello: coordinator_pb2.Hello, promise: coordinator_pb2.Promise
    ) -> Session:
        """A node's session begins, with its promise. Raises `StorageError` when the coordinator
        can't write: the node should come again when it can; `TermError` when another coordinator
        leads, or the node has promised a higher term, which ends this coordinator's;
        `UnreachableError` when it has given its claim up; `ProtocolError` for a bad answer."""
        self._require_room()
        try:
            self.terms.hear(peer_id, promise)
        except TermError as error:
            self._ending.depose(error)
            raise
        session = Session(peer_id, display_name(peer_id), hello, self.clock())
        with self._acting():
            old = self.sessions.get(peer_id)
            if old is not None and not self.ended:
                self._runner.end(old, "it joined again")
            elif old is not None:
                self._members.remove(old)
            self._members.add(session)
            self._members.truncate_log(session)
            self._standbys.tell(session)
            told = hello.hardware.device_name or "unknown"
            if hello.release != __version__:
                told += f"; release {hello.release[:32]!r}, this is {__version__}"
            self._log.say("joined", f"{session.name} joined ({told})")
            if self.ended:
                self._ending.send_away(session, self.failed or "the run is over")
        self._ending.require_room()
        return session

    def _require_room(self) -> None:
        self._ending.require_room()
        if self._log.blocked:
            raise DiskFullError(self._log.blocked)

    def detach(self, session: Session, reason: str = "connection lost") -> None:
        """The session's stream is over."""
        if not self._members.is_current(session):
            return
        if self.ended:
            self._members.remove(session)
            self._log.changed()
            return
        with self._acting():
            self._runner.end(session, reason)

    def missing_holders(self) -> dict[PeerId, str]:
        """Nodes that are gone, and whose return a lost stage waits for; and their addresses."""
        if self.phase is not Phase.BETWEEN:
            return {}
        return {s.peer_id: s.hello.address for s in self._assignments.missing_holders()}

    def process_gone(self, peer_id: PeerId) -> None:
        """Nobody listens at a gone node's address any more: its process has ended, and the state
        with it. Nothing is lost by a mistake here but time."""
        session = self._members.gone.get(peer_id)
        if session is not None and not self.ended:
            with self._acting():
                session.process_gone = True

    def receive(self, session: Session, event: coordinator_pb2.NodeEvent) -> None:
        """An event of an attached node. Stale and impossible ones are refused and counted."""
        if not self._members.is_current(session) or self.ended:
            return
        session.heard(self.clock(), heartbeat=event.HasField("heartbeat"))
        with self._acting():
            try:
                self._events.handle(session, event)
            except TermError as error:
                self._ending.depose(error)
            except FencedError as error:
                log.info("%s: %s", session.name, error)
            except ProtocolError as error:
                self._members.mark(session.peer_id)
                self._log.say("refused", f"{session.name}: {type(error).__name__}: {error}")
        self._log.changed()

    def tick(self) -> None:
        """A few times a second: leases, deadlines."""
        now_s = self.clock()
        if now_s - self._ticked_s > _DEAF_S:
            self._listening_s = now_s
        self._ticked_s = now_s
        if self.ended:
            return
        with self._acting():
            error, self._flush_error = self._flush_error, None
            if isinstance(error, DiskFullError):
                self._log.block(error)
            elif error is not None:
                raise error
            self._log.unblock()
            for session, reason in self._members.expired(
                now_s, least_s=self.run.spec.fault.lease_s, since_s=self._listening_s
            ):
                self._runner.end(session, reason)
                if session.is_deaf:
                    session.cut()
            self._runner.take_out_mute()

    # ---- operator ------------------------------------------------------------------------

    def pause(self, reason: str = "paused by the operator") -> None:
        """The open step is finished; the next one waits for `resume`."""
        self._require_leading()
        if not self.ended:
            with self._acting():
                self._log.pause(reason)

    def resume(self) -> None:
        self._require_leading()
        if self.state.paused is not None and not self.ended:
            with self._acting():
                self._log.record(Resumed(time_s=self.clock()))
                self._log.say("resumed", "the run goes on")

    def stop(self) -> None:
        """Finish the open step, store a snapshot, let the nodes go."""
        if not self.ended:
            with self._acting():
                if not self.stopping:
                    self.stopping = True
                    self._log.say("stopping", "stopping after this step")

    def take_snapshot(self) -> None:
        """Store one between this step and the next."""
        if not self.ended:
            with self._acting():
                self._requests.wanted = True

    def _require_leading(self) -> None:
        """Raises `TermError` while this coordinator has no say."""
        if not self.terms.leads and not self.ended:
            raise TermError(f"this coordinator doesn't lead the run yet: {self.waiting_for}")

    def register_standby(self, standby: StandbyRegistered) -> None:
        """From now on a majority decides who leads. Raises `TermError` while another coordinator
        may lead. Once the run is over, nobody is registered any more."""
        if self.deposed is not None:
            raise self.deposed
        self._require_leading()
        if not self.ended:
            with self._acting():
                self._standbys.register(standby)

    def dismiss(self, peer_id: PeerId) -> bool:
        session = self.sessions.get(peer_id)
        if session is None or self.ended:
            return False
        with self._acting():
            self._runner.let_go(session, "the operator asked it to leave")
        return True

    def flush(self) -> None:
        """Make soft events durable too. For the daemon's timer; may run in another thread, so that
        the next `tick` acts on a failure."""
        try:
            self._log.flush()
        except StorageError as error:
            self._flush_error = error

    # ---- snapshots -----------------------------------------------------------------------

    def expects_snapshot(self, peer_id: PeerId, step: int, stage: int) -> bool:
        """Whether this node was asked for this stage's snapshot and has not been fenced since."""
        return self._requests.expects(peer_id, step, stage)

    def snapshot_refused(self, step: int, reason: str) -> None:
        """The store had no room for it, or other trouble of its own."""
        if not self.ended:
            with self._acting():
                self._requests.refused(step, reason)

    def snapshot_stored(self, step: int) -> None:
        """The store has every stage's state at `step`."""
        if not self.ended:
            with self._acting():
                self._requests.stored(step)
                self._compact()

    # ---- what has become possible --------------------------------------------------------

    @contextlib.contextmanager
    def _acting(self) -> Iterator[None]:
        """Around every change: what it makes possible follows at once."""
        with self._failing():
            yield
            self._advance()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self._ending.fail(f"the coordinator can't write: {error}", can_write=False)
        except RunFailedError as error:
            self._ending.fail(str(error))

    def _advance(self) -> None:
        before = None
        while before != (now := (self.phase, self.state.step, self.state.attempt)):
            if self._log.blocked:
                return  # what was decided is written first
            before = now
            if self.phase is Phase.CLAIMING:
                self._claim_term()
            elif self.phase is Phase.BETWEEN:
                self._advance_between()
            elif self.phase is not Phase.ENDED:
                self._between.let_go()
                self._runner.advance()

    def _compact(self) -> None:
        """Raises `StorageError` for a damaged log."""
        self._log.compact(
            oldest_snapshot=min(self.snapshots.complete_steps(), default=0),
            live=[*(s.incarnation for s in self.sessions.values()), *self._runner.took_part()],
            num_microbatches=self.run.spec.batch.microbatches,
        )

    def _claim_term(self) -> None:
        if self.stopping:
            self._ending.depart(f"stopped before it led: {self.waiting_for}")
        elif self.terms.try_to_lead(self.sessions):
            self._runner.phase = Phase.BETWEEN
            self._assignments.expect_holders()
            self._log.wait("")
            self._log.say("leads", f"this coordinator leads in term {self.terms.term}")
        else:
            self._log.wait(self.terms.claim_obstacle(self.sessions))
            if self.terms.gives_up(self.sessions):
                self._ending.let_sessions_go()

    def withdraw(self, reason: str) -> None:
        """Give the claim up: another coordinator leads, or is back to lead."""
        if not self.terms.leads and not self.ended:
            self._ending.depart(reason)

    def _advance_between(self) -> None:
        if len(self.state.records) > MAX_STEPS + 4 * WORTHWHILE_STEPS:
            self._compact()  # snapshots are rare
        outcome = self._between.advance(stopping=self.stopping)
        if outcome == "finished":
            self._finish()
        elif outcome == "stopped":
            done = f"stopped after step {self.state.step} of {self.run.spec.steps}"
            self._ending.complete("stopped", done)
            self._log.wait(f"{done}; launch it again to go on")

    def _finish(self) -> None:
        if self.state.weights_sha256 is None:
            digest = self.snapshots.weights_sha256(self.state.step)
            self._log.record(RunFinished(time_s=self.clock(), weights_sha256=digest))
            if self._log.blocked:
                return
        self._ending.complete("finished", f"run {self.run.run_id} is finished")
