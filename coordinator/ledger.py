# SPDX-License-Identifier: Apache-2.0
"""The books of one step: leases, receipts, reduce rounds, prepares. Pure; no clock, no I/O.

Invariants (docs/architecture.md): a (microbatch, stage) has one holder at a time; a lease moves
only because its holder was fenced or gave it back; a gradient counts through the receipt of its
holder; a stage is summed up once its receipts cover every microbatch; a step commits once every
participant that is left has prepared equal sums.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.coordinator.ledger_facts import (
    Dissent,
    Lease,
    PreparedFacts,
    ReceiptFacts,
    ReduceRound,
    Slot,
)
from shoal.coordinator.router import spread
from shoal.protocol.errors import FencedError, MalformedFrameError, WrongLeaseError
from shoal.protocol.ids import NOBODY, Incarnation, MicrobatchId, Stage


@dataclass(slots=True)
class _StageBooks:
    replicas: dict[Incarnation, float]  # live participants and their speeds
    round: ReduceRound | None = None
    rounds: int = 0
    prepared: dict[Incarnation, PreparedFacts] = field(default_factory=dict)
    done: int = 0  # receipts of training microbatches
    leaving: set[Incarnation] = field(default_factory=set)  # get no work that others can do

    @property
    def takers(self) -> dict[Incarnation, float]:
        """Replicas that may be given work, and their speeds."""
        staying = {who: speed for who, speed in self.replicas.items() if who not in self.leaving}
        return staying or self.replicas

    def cancel_round(self) -> None:
        self.round = None
        self.prepared.clear()

    def all_prepared(self) -> bool:
        return self.round is not None and self.prepared.keys() >= self.replicas.keys()

    def agreed(self) -> PreparedFacts | None:
        """The prepare that most replicas share, if somebody who is left is among them."""
        votes = Counter(p.sums for p in self.prepared.values()).most_common(2)
        if not votes or (len(votes) == 2 and votes[0][1] == votes[1][1]):
            return None
        shared = (p for who, p in self.prepared.items() if who in self.replicas)
        return next((p for p in shared if p.sums == votes[0][0]), None)


class StepLedger:
    """The open step. Every method takes facts and returns what follows from them."""

    def __init__(
        self,
        replicas: Mapping[Stage, Mapping[Incarnation, float]],
        *,
        num_microbatches: int,
        num_validation: int = 0,
        workers: Collection[Incarnation] = (),
    ) -> None:
        """`replicas[stage]` maps the step's participants to their speeds; none may be empty.
        `workers` are those of them that can't apply: a stage needs another one too."""
        self._workers = frozenset(workers)
        self.num_stages = len(replicas)
        self.num_microbatches = num_microbatches
        self.num_validation = num_validation
        self._stages = {
            stage: _StageBooks(dict(sorted(replicas[stage].items()))) for stage in sorted(replicas)
        }
        self._stage_of = {who: stage for stage in replicas for who in replicas[stage]}
        self._holders: dict[Slot, Incarnation] = {}
        self.receipts: dict[Slot, ReceiptFacts] = {}
        self._withdrawn: dict[Slot, ReceiptFacts] = {}
        self.moved_last: dict[Slot, Incarnation] = {}
        """Slots that the last `fence` or `release` moved, and to whom."""
        for stage, books in self._stages.items():
            routes = spread(self._microbatches, books.replicas)
            self._holders.update({(m, stage): who for m, who in routes.items()})

    # ---- facts ---------------------------------------------------------------------------

    @property
    def _microbatches(self) -> list[MicrobatchId]:
        return [MicrobatchId(m) for m in range(self.num_microbatches + self.num_validation)]

    def is_validation(self, microbatch: int) -> bool:
        return microbatch >= self.num_microbatches

    @property
    def participants(self) -> list[Incarnation]:
        return [who for books in self._stages.values() for who in books.replicas]

    def took_part(self) -> list[Incarnation]:
        """Participants, and those that were fenced since."""
        return list(self._stage_of)

    def participates(self, incarnation: Incarnation) -> bool:
        stage = self._stage_of.get(incarnation)
        return stage is not None and incarnation in self._stages[stage].replicas

    def holder(self, microbatch: MicrobatchId, stage: Stage) -> Incarnation:
        return self._holders[microbatch, stage]

    def participants_at(self, stage: Stage) -> list[Incarnation]:
        return list(self._stages[stage].replicas)

    def takers_at(self, stage: Stage) -> list[Incarnation]:
        """Participants that may be given work."""
        return list(self._stages[stage].takers)

    def empty_stages(self) -> list[Stage]:
        """Stages where nobody is left who could apply the step."""
        return [s for s, books in self._stages.items() if books.replicas.keys() <= self._workers]

    def receipts_done(self) -> int:
        return len(self.receipts)

    def receipts_total(self) -> int:
        return self.num_microbatches * self.num_stages + self.num_validation

    def missing(self) -> list[Slot]:
        """Slots without the receipt that the step needs."""
        last = Stage(self.num_stages - 1)
        return [
            slot
            for slot in self._holders
            if slot not in self.receipts and (not self.is_validation(slot[0]) or slot[1] == last)
        ]

    # ---- leases --------------------------------------------------------------------------

    def leases_of(self, incarnation: Incarnation) -> list[Lease]:
        return [self._lease(slot) for slot, who in self._holders.items() if who == incarnation]

    def _lease(self, slot: Slot) -> Lease:
        microbatch, stage = slot
        up, down = (microbatch, Stage(stage - 1)), (microbatch, Stage(stage + 1))
        return Lease(
            microbatch=microbatch,
            upstream=self._holders.get(up, NOBODY),
            downstream=self._holders.get(down, NOBODY),
            downstream_done=down in self.receipts,
            upstream_done=up in self.receipts,
        )

    # ---- receipts ------------------------------------------------------------------------

    def contradicts(self, receipt: ReceiptFacts) -> Incarnation | None:
        """Whose withdrawn receipt of the same slot tells of other bits."""
        earlier = self._withdrawn.get((receipt.microbatch, receipt.stage))
        if earlier is None or not (earlier.digest and receipt.digest):
            return None
        return earlier.incarnation if earlier.digest != receipt.digest else None

    def record_receipt(self, receipt: ReceiptFacts) -> bool:
        """True when it counts, False for a repetition.

        Raises `FencedError` for an incarnation that doesn't take part, `WrongLeaseError` when the
        lease is somebody else's or needs no receipt, `MalformedFrameError` without the loss.
        """
        slot = (receipt.microbatch, receipt.stage)
        is_last = receipt.stage == self.num_stages - 1
        if not self.participates(receipt.incarnation):
            raise FencedError(f"incarnation {receipt.incarnation} takes no part in this step")
        if self._holders.get(slot) != receipt.incarnation:
            raise WrongLeaseError(
                f"microbatch {receipt.microbatch} at stage {receipt.stage} is not leased to "
                f"incarnation {receipt.incarnation}"
            )
        if self.is_validation(receipt.microbatch) and not is_last:
            raise WrongLeaseError(
                f"validation microbatch {receipt.microbatch} has a receipt at the last stage only"
            )
        if is_last and receipt.loss_sum is None:
            raise MalformedFrameError(f"no loss for microbatch {receipt.microbatch}")
        if slot in self.receipts:
            return False
        self.receipts[slot] = receipt
        self._stages[receipt.stage].done += not self.is_validation(receipt.microbatch)
        return True

    # ---- reduction -----------------------------------------------------------------------

    def stages_to_reduce(self) -> list[Stage]:
        """Stages whose receipts are complete and that have no round under way."""
        return [
            stage
            for stage, books in self._stages.items()
            if books.replicas and books.round is None and books.done == self.num_microbatches
        ]

    def start_round(self, stage: Stage) -> ReduceRound:
        """Freeze the manifest of a complete stage."""
        books = self._stages[stage]
        assert books.round is None, "a round is under way"
        books.rounds += 1
        books.prepared.clear()
        ids: dict[Incarnation, list[MicrobatchId]] = {who: [] for who in books.replicas}
        for m in range(self.num_microbatches):
            ids[self.receipts[MicrobatchId(m), stage].incarnation].append(MicrobatchId(m))
        books.round = ReduceRound(
            stage, books.rounds, tuple((who, tuple(ids[who])) for who in books.replicas)
        )
        return books.round

    def record_prepared(self, prepared: PreparedFacts) -> bool:
        """True when it counts, False when it belongs to a cancelled round.

        Raises `FencedError`. Whether replicas agree is for `dissents` to say.
        """
        if not self.participates(prepared.incarnation):
            raise FencedError(f"incarnation {prepared.incarnation} takes no part in this step")
        books = self._stages[self._stage_of[prepared.incarnation]]
        if books.round is None or books.round.round != prepared.round:
            return False
        books.prepared.setdefault(prepared.incarnation, prepared)
        return True

    def is_awaited(self, incarnation: Incarnation, round_number: int) -> bool:
        """Whether this participant's sums of this round are still to come."""
        books = (
            self._stages[self._stage_of[incarnation]] if self.participates(incarnation) else None
        )
        return (
            books is not None
            and books.round is not None
            and books.round.round == round_number
            and incarnation not in books.prepared
        )

    def dissents(self) -> list[Dissent]:
        """Stages where everybody has prepared, and not all the same."""
        found = []
        for stage, books in self._stages.items():
            if not books.replicas or not books.all_prepared():
                continue
            agreed = books.agreed()
            live = {who: books.prepared[who].sums for who in books.replicas}
            outvoted = [who for who, sums in live.items() if agreed and sums != agreed.sums]
            if agreed is None or outvoted:
                found.append(Dissent(stage, tuple(outvoted)))
        return found

    def committable(self) -> bool:
        """Every receipt is in and every remaining participant has prepared the same sums."""
        return (
            len(self.receipts) == self.receipts_total()
            and not self.empty_stages()
            and all(books.all_prepared() for books in self._stages.values())
            and not self.dissents()
        )

    def unprepared(self) -> list[Incarnation]:
        """Participants of a round under way that have not prepared."""
        return [
            who
            for books in self._stages.values()
            if books.round is not None
            for who in books.replicas
            if who not in books.prepared
        ]

    def sums(self) -> dict[Stage, PreparedFacts]:
        """What the replicas of each stage agreed on; only when `committable`."""
        agreed = {stage: books.agreed() for stage, books in self._stages.items()}
        return {stage: sums for stage, sums in agreed.items() if sums is not None}

    def prepares(self) -> list[PreparedFacts]:
        """Of the rounds that stand."""
        return [p for books in self._stages.values() for p in books.prepared.values()]

    def contributions(self) -> dict[Stage, dict[Incarnation, tuple[MicrobatchId, ...]]]:
        """Who computed what, by the frozen manifests; only when `committable`."""
        return {
            stage: dict(books.round.parts)
            for stage, books in self._stages.items()
            if books.round is not None
        }

    # ---- bad numbers ---------------------------------------------------------------------

    def move(self, slot: Slot, to: Iterable[Incarnation]) -> dict[Incarnation, list[Lease]]:
        """Lease a slot that its holder gave back, its gradient in nobody's sums, to whom of `to`
        has least to do; returns new leases and changed neighbours. Nothing moves when nobody of
        `to` may be given work."""
        assert slot not in self.receipts, "what is in somebody's sums stays there"
        books = self._stages[slot[1]]
        replicas = {who: books.takers[who] for who in to if who in books.takers}
        self.moved_last = {}
        if not replicas:
            return {}
        self._move([slot], books, replicas)
        self.moved_last = {slot: self._holders[slot]}
        return self._tell({slot})

    # ---- nodes that leave ----------------------------------------------------------------

    def release(
        self, who: Incarnation, microbatches: Iterable[int]
    ) -> dict[Incarnation, list[Lease]]:
        """A participant leaves and gives back what isn't in its sums; returns leases as `fence`.

        Slots that are not its own, or that have a receipt, stay where they are. Without a replica
        that stays, the releaser is told its leases again. It gets no other work from now on, unless
        nobody else is left.
        """
        stage = self._stage_of[who]
        books = self._stages[stage]
        books.leaving.add(who)
        given = [
            slot
            for slot in ((MicrobatchId(m), stage) for m in sorted(set(microbatches)))
            if self._holders.get(slot) == who and slot not in self.receipts
        ]
        self.moved_last = {}
        if who in books.takers:
            return {who: [self._lease(slot) for slot in given]} if given else {}
        self._move(given, books, books.takers)
        self.moved_last = {slot: self._holders[slot] for slot in given}
        return self._tell(set(given))

    def is_idle(self, who: Incarnation) -> bool:
        """Whether nothing of the step is with a participant: losing it costs nothing."""
        if not self.participates(who):
            return True
        books = self._stages[self._stage_of[who]]
        return books.round is None and who not in self._holders.values()

    # ---- loss of nodes -------------------------------------------------------------------

    def fence(self, lost: Iterable[Incarnation]) -> dict[Incarnation, list[Lease]]:
        """Take incarnations out; returns new leases and changed neighbours, by who must be told.

        What they held moves to live replicas, also what they had finished: their accumulators are
        gone. Except when their round is under way and they had prepared: then the survivors have,
        or will get, everything that was theirs, and it stays counted unless a neighbour still
        needs a boundary tensor that died with them. A stage without survivors keeps its slots (see
        `empty_stages`); the step can't go on.
        """
        for who in lost:
            if self.participates(who):
                del self._stages[self._stage_of[who]].replicas[who]
        for books in self._stages.values():
            if books.round is not None and not books.all_prepared():
                members = (who for who, _ in books.round.parts)
                if any(who not in books.replicas and who not in books.prepared for who in members):
                    books.cancel_round()
        moved: set[Slot] = set()
        while fresh := self._move_orphans():
            moved |= fresh
        self.moved_last = {slot: self._holders[slot] for slot in moved}
        return self._tell(moved)

    def _move_orphans(self) -> set[Slot]:
        """Slots that moved. Moving one may orphan its neighbours: call it until none does."""
        moved: set[Slot] = set()
        for stage, books in self._stages.items():
            if not books.replicas:
                continue
            held_by_lost = [
                slot
                for slot, who in self._holders.items()
                if slot[1] == stage
                and who not in books.replicas
                and not self._validation_is_over(slot)
            ]
            if any(self._neighbour_needs(slot) for slot in held_by_lost if slot in self.receipts):
                books.cancel_round()
            frozen = books.round is not None
            orphans = [s for s in held_by_lost if not (frozen and s in self.receipts)]
            self._move(orphans, books, books.takers)
            moved |= set(orphans)
        return moved

    def _neighbour_needs(self, slot: Slot) -> bool:
        """Whether a neighbour has yet to finish: what this slot's holder kept must be there."""
        microbatch, stage = slot
        return any(
            (microbatch, Stage(other)) not in self.receipts
            for other in (stage - 1, stage + 1)
            if 0 <= other < self.num_stages
        )

    def _move(
        self, orphans: Sequence[Slot], books: _StageBooks, to: Mapping[Incarnation, float]
    ) -> None:
        unfinished = dict.fromkeys(to, 0)
        for slot, who in self._holders.items():
            if who in unfinished and slot not in self.receipts:
                unfinished[who] += 1
        routes = spread([m for m, _ in orphans], to, unfinished)
        for slot in orphans:
            self._holders[slot] = routes[slot[0]]
            withdrawn = self.receipts.pop(slot, None)
            if withdrawn is not None:
                self._withdrawn[slot] = withdrawn
                books.done -= not self.is_validation(slot[0])

    def _validation_is_over(self, slot: Slot) -> bool:
        last = (slot[0], Stage(self.num_stages - 1))
        return self.is_validation(slot[0]) and last in self.receipts

    def _tell(self, moved: set[Slot]) -> dict[Incarnation, list[Lease]]:
        affected = {
            (m, Stage(stage + offset))
            for m, stage in moved
            for offset in (-1, 0, 1)
            if 0 <= stage + offset < self.num_stages
        }
        told: dict[Incarnation, list[Lease]] = {}
        for slot in sorted(affected):
            holder = self._holders[slot]
            if self.participates(holder):
                told.setdefault(holder, []).append(self._lease(slot))
        return told


def exact_sum(values: Iterable[float]) -> float:
    """Rounded once, so independent of order and grouping; infinite when out of range."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def loss_of(receipts: Mapping[Slot, ReceiptFacts], ids: Sequence[int], last: Stage) -> float:
    """The summed loss of microbatches `ids`, whenever their receipts arrived."""
    return exact_sum(receipts[MicrobatchId(m), last].loss_sum or 0.0 for m in ids)
