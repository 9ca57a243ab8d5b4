# SPDX-License-Identifier: Apache-2.0
"""A coordinator's term: claimed by promises, held until a node has promised a higher one.

A coordinator that may not lead yet is a claimant: it records nothing and gives out nothing. It
asks nodes for promises once enough of them are there, so that a claim that can't succeed takes
no node away from another coordinator. Once a quorum has promised, it takes over the records of
commits that its log lacks, and leads.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from shoal.coordinator.quorum import Council, is_quorum, missing
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session
from shoal.coordinator.state import RolledBack, StepCommitted, TermOpened
from shoal.protocol.authority import Authority, verify_with_certificate
from shoal.protocol.errors import FencedError, MalformedFrameError, RecordError, TermError
from shoal.protocol.ids import Incarnation, PeerId, RunId, display_name
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.spec import canonical_json
from shoal.protocol.step_record import open_step_record, sign_step_record, term_statement

FORCE = "`shoal launch --force-term`"

REST_S = 30.0
"""For so long a claimant that lacks records asks nobody: whoever has them gets its chance."""

_MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class Claim:
    """Who wants to lead, and how."""

    log_id: str = "log"
    forced: bool = False
    """The operator says that nobody else leads."""
    least_term: int = 1
    authority: Authority | None = None
    """Signs the records. Without it they aren't signed, and none is taken over: for simulations."""


class Leadership:
    def __init__(self, log: RunLog, run_id: RunId, claim: Claim) -> None:
        self._log = log
        self._run_id = run_id
        self._claim = claim
        self.term = max(log.state.term + 1, claim.least_term)
        self.leads = False
        self.is_worth_a_promise = asyncio.Event()
        """Set while nodes should be asked: this coordinator leads, or a quorum is here."""
        self._willing: Counter[PeerId] = Counter()  # a node's next session may overlap its last
        self._learnt: dict[int, StepCommitted] = {}
        self._heard: set[PeerId] = set()  # who of them has answered the claim
        self._rests_until_s = 0.0
        self._keep: dict[PeerId, tuple[int, int]] = {}  # (number, term) of its newest record
        self._told: set[PeerId] = set()  # who was sent the newest record with its commit
        self._reminded: set[PeerId] = set()
        self._sealed: tuple[tuple[int, int], coordinator_pb2.SignedRecord] | None = None

    @property
    def log_id(self) -> str:
        return self._claim.log_id

    @property
    def num_here(self) -> int:
        """Sessions, with those that wait to be asked."""
        return self._willing.total()

    # ---- nodes come and promise ----------------------------------------------------------

    def came(self, peer_id: PeerId) -> None:
        """A node said Hello and would promise."""
        self._willing[peer_id] += 1
        self._weigh()

    def went(self, peer_id: PeerId) -> None:
        """Its session is over."""
        self._willing[peer_id] -= 1
        if self._willing[peer_id] <= 0:
            del self._willing[peer_id]
            self._heard.discard(peer_id)
        self._reminded.discard(peer_id)
        self._weigh()

    def _weigh(self) -> None:
        rests = self._log.clock() < self._rests_until_s
        if (
            self.leads
            or self._claim.forced
            or (not rests and self._decides(self._log.state.council))
        ):
            self.is_worth_a_promise.set()
        else:
            self.is_worth_a_promise.clear()

    def _decides(self, council: Council, present: Collection[PeerId] | None = None) -> bool:
        return is_quorum(
            council,
            self._willing if present is None else present,
            log_id=self.log_id,
            is_alone=self._log.state.is_alone,
        )

    def lead(self) -> coordinator_pb2.Lead:
        """What to ask a node's promise with."""
        state = self._log.state
        lead = coordinator_pb2.Lead(
            term=self.term, coordinator_id=self.log_id, commits=state.commits
        )
        if self._claim.authority is not None:
            statement = term_statement(self._run_id, self.term, self.log_id)
            lead.proof = self._claim.authority.sign(statement)
        if state.last_record is not None:
            lead.record.CopyFrom(self.seal(state.last_record))
        return lead

    def hear(self, peer_id: PeerId, promise: coordinator_pb2.Promise) -> None:
        """A node's answer. Raises `TermError` when it has promised a higher term, `FencedError`
        for an answer to another question, `ProtocolError` for records that aren't the run's."""
        if promise.refused:
            self._check_refusal(promise)
            raise TermError(
                f"{display_name(peer_id)} follows the coordinator of term {promise.term}"
                + (f" at {promise.address[:200]}" if promise.address else "")
                + f"; this one's term was {self.term}",
                term=promise.term,
                address=promise.address[:200],
            )
        if promise.term != self.term:
            raise FencedError(f"promised term {promise.term}; this is term {self.term}")
        self._keep[peer_id] = promise.commits, promise.record_term
        if not self.leads:
            if self._claim.authority is not None:
                for signed in promise.records:
                    self._learn(signed, self._claim.authority)
            self._heard.add(peer_id)

    def _check_refusal(self, promise: coordinator_pb2.Promise) -> None:
        """Raises `RecordError`: no node deposes a coordinator with a term that nobody claimed."""
        authority = self._claim.authority
        statement = term_statement(self._run_id, promise.term, promise.coordinator_id[:64])
        if promise.term < self.term or (
            authority is not None
            and not verify_with_certificate(authority.certificate_der, promise.proof, statement)
        ):
            raise RecordError(f"a refusal for term {promise.term}, which no coordinator claimed")

    def _learn(self, signed: coordinator_pb2.SignedRecord, authority: Authority) -> None:
        head = open_step_record(
            signed.record, signed.signature, self._run_id, authority.certificate_der
        )
        try:
            record = StepCommitted.model_validate_json(head.content)
        except ValidationError as error:
            raise MalformedFrameError(f"not a step record: {error.errors()[0]['msg']}") from None
        known = self._learnt.get(record.commits)
        # Two of one number differ in who computed what, never in the result.
        if known is None or known.term < record.term:
            self._learnt[record.commits] = record

    # ---- leading -------------------------------------------------------------------------

    def try_to_lead(self, promised: Collection[PeerId]) -> bool:
        """Lead, if those who have promised are enough; call it now and then. Raises
        `StorageError`."""
        self._weigh()
        if not self._may_lead(promised):
            return False
        log = self._log
        for record in self._news():
            if record.step not in (log.state.step, log.state.step + 1):
                reason = "as the records of the nodes say"
                log.record(RolledBack(time_s=log.clock(), to_step=record.step - 1, reason=reason))
            log.record(record)
            log.say("recovered", f"step {record.step} was committed in term {record.term}")
        log.record(
            TermOpened(
                time_s=log.clock(), term=self.term, log_id=self.log_id, forced=self._claim.forced
            )
        )
        self._learnt.clear()
        self._heard.clear()
        self.leads = True
        self._weigh()
        return True

    def _may_lead(self, promised: Collection[PeerId]) -> bool:
        if self._claim.forced:
            return True
        return not self._has_gap() and all(self._decides(c, promised) for c in self._councils())

    def _councils(self) -> list[Council]:
        """Whose promises are needed. The log's newest record may be one that nobody has built on,
        while another coordinator led: those who decided about it know."""
        state = self._log.state
        return [state.council_before, state.council, *(_council(r) for r in self._news()[-1:])]

    def _news(self) -> list[StepCommitted]:
        """Records that the log lacks, without a hole: those after its newest, and one of a higher
        term in place of it."""
        state = self._log.state
        found: list[StepCommitted] = []
        rival = self._learnt.get(state.commits)
        if rival is not None and rival.term > state.term_of_last_record:
            found.append(rival)
        commits = state.commits
        while (record := self._learnt.get(commits + 1)) is not None:
            found.append(record)
            commits += 1
        return found

    def _has_gap(self) -> bool:
        news = self._news()
        known = news[-1].commits if news else self._log.state.commits
        return max(self._learnt, default=0) > known

    def gives_up(self, promised: Collection[PeerId]) -> bool:
        """Whether a quorum has promised, everybody here was heard, and records are missing all the
        same: then these nodes had better look for a coordinator that has them, and are asked again
        after a while."""
        hopeless = (
            self._has_gap()
            and self._decides(self._log.state.council, promised)
            and self._heard.issuperset(self._willing)
        )
        if hopeless:
            self._rests_until_s = self._log.clock() + REST_S
            self._weigh()
        return hopeless

    def claim_obstacle(self, promised: Collection[PeerId]) -> str:
        """Why this coordinator doesn't lead yet, and what would end that."""
        state = self._log.state
        if self._has_gap():
            newest = self._learnt[max(self._learnt)]
            return (
                f"this log ends at step {state.step}, the run at step {newest.step}, and no node "
                f"that is here keeps all of the records between ({self._num_missing()} missing): "
                "start the coordinator that led last, from which this one copies them; or, if its "
                f"folder is gone for good, compute those steps again with {FORCE}"
            )
        if not state.council.voters and state.council.log_id not in ("", self.log_id):
            return (
                "no step has been opened yet, so that nobody but the coordinator that began the "
                f"run may lead it: start that one again; or, if it is gone for good, use {FORCE}"
            )
        council = next(c for c in self._councils() if not self._decides(c, promised))
        lacks = self._lacks(council, promised)
        return f"to lead in term {self.term} this coordinator needs {lacks}"

    def _num_missing(self) -> int:
        return sum(
            number not in self._learnt
            for number in range(self._log.state.commits + 1, max(self._learnt))
        )

    # ---- what needs a quorum -------------------------------------------------------------

    def commit_obstacle(self, attached: Collection[PeerId]) -> str:
        """Why a step that is ready can't be committed; empty when it can. Everybody attached has
        promised this term."""
        council = self._log.state.council
        if self._decides(council, attached):
            return ""
        return f"the commit needs {self._lacks(council, attached)}"

    def open_obstacle(self, attached: Collection[PeerId]) -> str:
        """Why the next step must not open yet; empty when it may."""
        state = self._log.state
        if not self._decides(state.council, attached):
            return f"the next step needs {self._lacks(state.council, attached)}"
        kept = self.keepers()
        for council in (state.council_before, state.council):
            if not self._decides(council, kept):
                lacks = self._lacks(council, kept)
                return f"to keep the record of step {state.step}, the run needs {lacks}"
        return ""

    def _lacks(self, council: Council, present: Collection[PeerId]) -> str:
        count, absent = missing(council, present, log_id=self.log_id)
        names = ", ".join(display_name(peer) for peer in absent[:_MAX_NAMED])
        if len(absent) > _MAX_NAMED:
            names += f" and {len(absent) - _MAX_NAMED} more"
        if count > len(absent):  # the other log's word is needed, which it can't give here
            return f"the coordinator that led last, or, if it is gone for good, {FORCE}"
        return (
            f"{count} more of the last step's nodes ({names}): they come back, or, if they are "
            f"gone for good and nobody else leads, {FORCE}"
        )

    def remind(self, sessions: Iterable[Session]) -> None:
        """Nodes that have yet to keep the newest record get it, once."""
        done = self.keepers() | self._reminded
        for session in sessions:
            if session.peer_id not in done:
                self._reminded.add(session.peer_id)
                session.send(lead=self.lead())

    def keepers(self) -> set[PeerId]:
        """Who keeps the log's newest record."""
        newest = self._log.state.last_record
        if newest is None:
            return set(self._keep)
        number = newest.commits, newest.term
        return {p for p, kept in self._keep.items() if kept[0] > number[0] or kept == number}

    # ---- records -------------------------------------------------------------------------

    def stamp(
        self, record: StepCommitted, voters: Iterable[PeerId], peers: dict[Incarnation, PeerId]
    ) -> StepCommitted:
        """The record as this term commits it; log it at once."""
        self._keep.clear()
        self._told.clear()
        self._reminded.clear()
        return record.model_copy(
            update={
                "term": self.term,
                "commits": self._log.state.commits + 1,
                "log_id": self.log_id,
                "voters": tuple(voters),
                "peers": peers,
            }
        )

    def seal(self, record: StepCommitted) -> coordinator_pb2.SignedRecord:
        """The record for nodes to keep."""
        which = record.commits, record.term
        if self._sealed is None or self._sealed[0] != which:
            content = canonical_json(record.model_dump(mode="json"))
            authority = self._claim.authority
            signature = (
                b""
                if authority is None
                else sign_step_record(content, self._run_id, authority.sign)
            )
            sealed = coordinator_pb2.SignedRecord(record=content, signature=signature)
            self._sealed = which, sealed
        return self._sealed[1]

    def told(self, peer_id: PeerId) -> None:
        """A node was sent the newest record with a commit."""
        self._told.add(peer_id)

    def applied(self, peer_id: PeerId, step: int) -> None:
        """A node has applied `step`, or pulled what comes of it: so it keeps the record, if that
        was sent to it."""
        newest = self._log.state.last_record
        if newest is not None and step == self._log.state.step and peer_id in self._told:
            self._keep[peer_id] = newest.commits, newest.term


def _council(record: StepCommitted) -> Council:
    return Council(frozenset(record.voters), record.log_id)
