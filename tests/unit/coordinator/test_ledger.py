# SPDX-License-Identifier: Apache-2.0
"""The step's books: one holder, one receipt, one sum, whoever is lost."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.ledger import StepLedger, exact_sum, loss_of
from shoal.coordinator.ledger_facts import PreparedFacts, ReceiptFacts
from shoal.protocol.errors import FencedError, MalformedFrameError, WrongLeaseError
from shoal.protocol.ids import Incarnation, MicrobatchId, Stage

A, B, C, D = (Incarnation(i) for i in (1, 2, 3, 4))


def make(
    *stages: tuple[Incarnation, ...], microbatches: int = 4, validation: int = 0
) -> StepLedger:
    return StepLedger(
        {Stage(s): dict.fromkeys(group, 1.0) for s, group in enumerate(stages)},
        num_microbatches=microbatches,
        num_validation=validation,
    )


def receive(
    ledger: StepLedger, microbatch: int, stage: int, who: Incarnation | None = None
) -> bool:
    slot = MicrobatchId(microbatch), Stage(stage)
    loss = 1.0 if stage == ledger.num_stages - 1 else None
    return ledger.record_receipt(ReceiptFacts(who or ledger.holder(*slot), *slot, loss_sum=loss))


def finish_stage(ledger: StepLedger, stage: int) -> None:
    for m in range(ledger.num_microbatches):
        receive(ledger, m, stage)
    if stage == ledger.num_stages - 1:
        for m in range(ledger.num_validation):
            receive(ledger, ledger.num_microbatches + m, stage)


def prepare(ledger: StepLedger, who: Incarnation, digest: int = 5, round_: int = 1) -> bool:
    return ledger.record_prepared(PreparedFacts(who, round_, digest, (1.0,)))


def counted(ledger: StepLedger) -> Mapping[Stage, list[int]]:
    return {
        stage: sorted(m for ids in parts.values() for m in ids)
        for stage, parts in ledger.contributions().items()
    }


def test_every_slot_has_one_holder_of_its_stage_and_the_neighbours_know_each_other() -> None:
    ledger = make((A, B), (C, D))
    leases = {who: {x.microbatch: x for x in ledger.leases_of(who)} for who in (A, B, C, D)}
    for m in range(4):
        (up,) = (who for who in (A, B) if m in leases[who])
        (down,) = (who for who in (C, D) if m in leases[who])
        assert leases[up][MicrobatchId(m)].downstream == down
        assert leases[down][MicrobatchId(m)].upstream == up
    assert len(leases[A]) == len(leases[B]) == 2


def test_a_receipt_counts_once_and_only_from_the_holder() -> None:
    ledger = make((A, B), (C,))
    holder = ledger.holder(MicrobatchId(0), Stage(0))
    other = B if holder == A else A
    with pytest.raises(WrongLeaseError):
        receive(ledger, 0, 0, other)
    assert receive(ledger, 0, 0)
    assert not receive(ledger, 0, 0)
    with pytest.raises(FencedError):
        receive(ledger, 1, 0, Incarnation(99))
    assert ledger.receipts_done() == 1


def test_receipts_that_make_no_sense_are_refused() -> None:
    ledger = make((A,), (C,), validation=1)
    with pytest.raises(MalformedFrameError, match="no loss"):
        ledger.record_receipt(ReceiptFacts(C, MicrobatchId(0), Stage(1)))
    with pytest.raises(WrongLeaseError, match="last stage only"):
        receive(ledger, 4, 0)
    with pytest.raises(WrongLeaseError):
        receive(ledger, 400, 0, A)


def test_a_stage_is_summed_up_once_its_training_receipts_are_complete() -> None:
    ledger = make((A,), (C, D), validation=2)
    for m in range(4):
        assert ledger.stages_to_reduce() == []
        receive(ledger, m, 1)
    assert ledger.stages_to_reduce() == [1]
    manifest = ledger.start_round(Stage(1))
    assert {who for who, _ in manifest.parts} == {C, D}
    assert sorted(m for _, ids in manifest.parts for m in ids) == [0, 1, 2, 3]
    assert ledger.stages_to_reduce() == []


def test_a_step_commits_once_all_receipts_and_prepares_are_in() -> None:
    ledger = make((A,), (C, D), validation=1)
    finish_stage(ledger, 1)
    ledger.start_round(Stage(1))
    finish_stage(ledger, 0)
    ledger.start_round(Stage(0))
    for who in (A, C):
        assert prepare(ledger, who)
        assert not ledger.committable()
    assert ledger.unprepared() == [D]
    prepare(ledger, D)
    assert ledger.committable()
    assert ledger.receipts_done() == ledger.receipts_total() == 9
    assert counted(ledger) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


def test_a_step_waits_for_its_validation_losses() -> None:
    ledger = make((A,), validation=1)
    for m in range(4):
        receive(ledger, m, 0)
    ledger.start_round(Stage(0))
    prepare(ledger, A)
    assert not ledger.committable()
    receive(ledger, 4, 0)
    assert ledger.committable()


def test_what_a_lost_node_held_moves_also_what_it_had_finished() -> None:
    ledger = make((A, B), (C,))
    mine = [x.microbatch for x in ledger.leases_of(A)]
    receive(ledger, mine[0], 0)
    told = ledger.fence([A])
    assert {x.microbatch for x in ledger.leases_of(B)} == {0, 1, 2, 3}
    assert ledger.receipts_done() == 0
    assert {x.microbatch for x in told[B]} == set(mine)
    assert {x.microbatch for x in told[C]} == set(mine)
    assert all(x.upstream == B for x in told[C])
    with pytest.raises(FencedError):
        receive(ledger, mine[0], 0, A)


def test_a_node_lost_before_it_prepared_cancels_the_round() -> None:
    ledger = make((A, B))
    finish_stage(ledger, 0)
    first = ledger.start_round(Stage(0))
    ledger.fence([A])
    assert not prepare(ledger, B, round_=first.round)
    lost = dict(first.parts)[A]
    assert {m for m, _ in ledger.missing()} == set(lost)
    for m in lost:
        receive(ledger, m, 0)
    second = ledger.start_round(Stage(0))
    assert second.round == first.round + 1
    assert second.parts == ((B, (0, 1, 2, 3)),)


def test_a_node_lost_after_it_prepared_still_counts() -> None:
    ledger = make((A, B))
    finish_stage(ledger, 0)
    frozen = ledger.start_round(Stage(0))
    prepare(ledger, A)
    assert ledger.fence([A]) == {}
    prepare(ledger, B)
    assert ledger.committable()
    assert ledger.contributions() == {0: dict(frozen.parts)}


def test_a_node_lost_before_it_prepared_still_counts_when_all_others_have_prepared() -> None:
    ledger = make((A, B))
    finish_stage(ledger, 0)
    ledger.start_round(Stage(0))
    prepare(ledger, B)
    assert ledger.fence([A]) == {}
    assert ledger.committable()


def test_a_prepared_node_that_is_lost_is_replaced_where_a_neighbour_still_needs_its_gradient() -> (
    None
):
    """Its gradients for stage 0 may have died with it: without a new holder stage 0 would wait."""
    ledger = make((A,), (C, D))
    finish_stage(ledger, 1)
    ledger.start_round(Stage(1))
    prepare(ledger, C)
    lost = [x.microbatch for x in ledger.leases_of(C)]
    told = ledger.fence([C])
    assert {x.microbatch for x in told[D]} == set(lost)
    assert all(x.downstream == D for x in told[A])
    assert not prepare(ledger, D)


def test_a_prepared_node_that_is_lost_is_replaced_once_a_neighbour_starts_over() -> None:
    ledger = make((A, B), (C, D))
    for stage in (1, 0):
        finish_stage(ledger, stage)
        ledger.start_round(Stage(stage))
    prepare(ledger, C)
    prepare(ledger, D)
    assert ledger.fence([C]) == {}
    ledger.fence([A])  # not prepared: B computes everything of stage 0 again, and needs gradients
    for x in ledger.leases_of(B):
        assert ledger.participates(x.downstream)


def test_a_lost_stage_is_reported_and_keeps_its_slots() -> None:
    ledger = make((A,), (C,))
    ledger.fence([C])
    assert ledger.empty_stages() == [1]
    assert not ledger.committable()


def test_a_validation_loss_stays_counted_when_its_nodes_are_lost() -> None:
    ledger = make((A, B), (C, D), validation=2)
    receive(ledger, 4, 1)
    moved = ledger.fence([A, C])
    assert (MicrobatchId(4), Stage(1)) in ledger.receipts
    assert all(lease.microbatch != 4 for leases in moved.values() for lease in leases)


def test_two_replicas_with_different_sums_have_nobody_to_believe() -> None:
    ledger = make((A, B))
    finish_stage(ledger, 0)
    ledger.start_round(Stage(0))
    prepare(ledger, A, 5)
    assert ledger.dissents() == []
    prepare(ledger, B, 6)
    (dissent,) = ledger.dissents()
    assert dissent.outvoted == ()
    assert not ledger.committable()


def test_of_three_replicas_the_odd_one_is_outvoted() -> None:
    ledger = make((A, B, C))
    finish_stage(ledger, 0)
    ledger.start_round(Stage(0))
    for who, digest in ((A, 6), (B, 5), (C, 5)):
        prepare(ledger, who, digest)
    assert ledger.dissents()[0].outvoted == (A,)
    ledger.fence([A])
    assert ledger.committable()
    assert ledger.sums()[Stage(0)].sums_digest == 5


def test_the_summed_loss_does_not_depend_on_order() -> None:
    values = [1e16, 1.0, -1e16, 3.0, 1e-9]
    assert exact_sum(values) == exact_sum(sorted(values)) == math.fsum(values)
    assert exact_sum([1e308, 1e308]) == math.inf
    ledger = make((A,))
    finish_stage(ledger, 0)
    assert loss_of(ledger.receipts, range(4), Stage(0)) == 4.0


@settings(max_examples=1500, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    choices=st.lists(st.integers(0, 10_000), max_size=60),
    validation=st.integers(0, 2),
)
def test_whatever_the_order_every_microbatch_counts_once_and_the_step_ends(
    shape: list[int], choices: list[int], validation: int
) -> None:
    """Receipts, prepares and losses in any order; then what is left finishes the step."""
    groups, next_id = [], 1
    for size in shape:
        groups.append(tuple(Incarnation(next_id + i) for i in range(size)))
        next_id += size
    ledger = make(*groups, microbatches=3, validation=validation)

    def possible() -> list[tuple[str, int, int]]:
        found = [("receipt", m, s) for m, s in ledger.missing() if is_ready(m, s)]
        found += [("reduce", s, 0) for s in ledger.stages_to_reduce()]
        return found + [("prepare", who, 0) for who in ledger.unprepared()]

    def is_ready(microbatch: int, stage: int) -> bool:
        """A backward needs the gradient of the next stage."""
        below = (MicrobatchId(microbatch), Stage(stage + 1))
        return stage == len(shape) - 1 or below in ledger.receipts

    def do(kind: str, x: int, y: int) -> None:
        if kind == "receipt":
            assert receive(ledger, x, y)
        elif kind == "reduce":
            ledger.start_round(Stage(x))
        else:
            books = ledger._stages[ledger._stage_of[Incarnation(x)]]
            prepare(ledger, Incarnation(x), round_=books.rounds)

    for choice in choices:
        actions = possible()
        losable = [
            who
            for group in groups
            if len(live := [w for w in group if ledger.participates(w)]) > 1
            for who in live
        ]
        if losable and choice % 5 == 0:
            ledger.fence([losable[choice // 5 % len(losable)]])
        elif actions:
            do(*actions[choice % len(actions)])
        for (microbatch, stage), receipt in ledger.receipts.items():
            if not ledger.participates(receipt.incarnation):
                # Only what survivors have summed up already may be a lost node's.
                assert ledger._stages[stage].round is not None or ledger.is_validation(microbatch)
    while actions := possible():
        do(*actions[0])
    assert ledger.committable()
    assert all(ids == [0, 1, 2] for ids in counted(ledger).values())
    for slot in ledger._holders:
        if slot not in ledger.receipts:
            assert ledger.is_validation(slot[0])


def test_a_withdrawn_receipt_contradicts_another_digest_of_the_same_slot_only() -> None:
    ledger = make((A, B), (C,), microbatches=2)

    def receipt(who: Incarnation, digest: int, microbatch: int) -> ReceiptFacts:
        return ReceiptFacts(who, MicrobatchId(microbatch), Stage(0), digest=digest)

    first = ledger.holder(MicrobatchId(0), Stage(0))
    other = B if first == A else A
    assert ledger.record_receipt(receipt(first, 7, 0))
    assert ledger.contradicts(receipt(first, 7, 0)) is None
    ledger.fence([first])
    assert ledger.contradicts(receipt(other, 8, 0)) == first
    assert ledger.contradicts(receipt(other, 7, 0)) is None
    assert ledger.contradicts(receipt(other, 0, 0)) is None
    assert ledger.contradicts(receipt(other, 8, 1)) is None


# ---- leaving -----------------------------------------------------------------------------


def test_released_slots_go_to_replicas_that_stay_and_the_neighbours_hear_of_it() -> None:
    ledger = make((A, B), (C, D))
    mine = [lease.microbatch for lease in ledger.leases_of(A)]
    told = ledger.release(A, mine)
    assert ledger.leases_of(A) == []
    assert all(ledger.holder(m, Stage(0)) == B for m in mine)
    assert {lease.microbatch for lease in told[B]} == set(mine)
    assert all(lease.upstream == B for who in (C, D) for lease in told.get(who, []))
    assert ledger.is_idle(A)


def test_what_has_a_receipt_can_not_be_released() -> None:
    ledger = make((A, B), (C,))
    kept, *rest = (lease.microbatch for lease in ledger.leases_of(A))
    receive(ledger, kept, 1)
    receive(ledger, kept, 0)
    ledger.release(A, [kept, *rest])
    assert [lease.microbatch for lease in ledger.leases_of(A)] == [kept]
    assert not ledger.is_idle(A)


def test_a_stages_only_replica_gets_its_leases_back() -> None:
    ledger = make((A,), (C, D))
    told = ledger.release(A, [0, 2])
    assert list(told) == [A]
    assert [lease.microbatch for lease in told[A]] == [0, 2]
    assert len(ledger.leases_of(A)) == 4


def test_a_leaver_gets_no_work_of_the_lost_while_another_stays() -> None:
    ledger = make((A, B, D), (C,))
    ledger.release(A, [lease.microbatch for lease in ledger.leases_of(A)])
    ledger.fence([B])
    assert ledger.leases_of(A) == []
    ledger.fence([D])
    assert len(ledger.leases_of(A)) == 4


def test_others_slots_and_nonsense_are_not_released() -> None:
    ledger = make((A, B), (C,))
    before = ledger.leases_of(B)
    assert ledger.release(A, [lease.microbatch for lease in before] + [77]) == {}
    assert ledger.leases_of(B) == before


moves = st.lists(
    st.tuples(
        st.sampled_from(["receipt", "release", "fence"]),
        st.integers(0, 5),
        st.lists(st.integers(0, 6), max_size=7),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(moves)
def test_no_release_loses_or_doubles_a_slot(script: list[tuple[str, int, list[int]]]) -> None:
    names = [Incarnation(i) for i in range(1, 7)]
    ledger = make(tuple(names[:3]), tuple(names[3:]), microbatches=5, validation=1)
    for what, number, ids in script:
        who = names[number]
        if not ledger.participates(who):
            continue
        before = dict(ledger.receipts)
        if what == "release":
            told = ledger.release(who, ids)
            assert ledger.receipts == before, "a release takes no receipt away"
            for holder, leases in told.items():
                assert {x.microbatch for x in leases} <= {
                    x.microbatch for x in ledger.leases_of(holder)
                }, "nobody is told a lease that it doesn't hold"
        elif what == "fence" and sum(map(ledger.participates, names[number // 3 * 3 :][:3])) > 1:
            ledger.fence([who])
        elif what == "receipt":
            for lease in ledger.leases_of(who)[:1]:
                stage = 0 if number < 3 else 1
                if not (ledger.is_validation(lease.microbatch) and stage == 0):
                    receive(ledger, lease.microbatch, stage, who)
        held = [
            (lease.microbatch, 0 if name in names[:3] else 1)
            for name in names
            if ledger.participates(name)
            for lease in ledger.leases_of(name)
        ]
        assert len(held) == len(set(held)), "two holders"
        over = ledger.receipts.keys() & {(5, 1)}
        expected = {(m, s) for m in range(6) for s in (0, 1)}
        assert set(held) >= expected - ({(5, 0), (5, 1)} if over else set()), "nobody's slot"
