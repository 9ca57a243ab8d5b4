# SPDX-License-Identifier: Apache-2.0
"""Whose bad numbers are, and what follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.ledger_facts import Slot
from shoal.coordinator.numbers import (
    MAX_EXECUTIONS,
    MAX_REDOS,
    SUMS,
    BackOff,
    Circumstances,
    Diverged,
    Finding,
    Move,
    Redo,
    Suspicions,
    TakeOut,
    Verdict,
    judge,
    refuted,
)
from shoal.coordinator.step_scale import COARSEN_BITS, MAX_COARSEN, MAX_LOSS_SCALE, StepScale
from shoal.protocol.ids import MicrobatchId, PeerId, Stage

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
SLOT = MicrobatchId(3), Stage(1)


def finding(peer: PeerId, *, slot: Slot = SLOT, dtype: str = "fp32", **more: bool) -> Finding:
    return Finding(
        slot=slot, peer_id=peer, name=f"node {peer}", dtype=dtype, what="NaN",
        overflows=more.get("overflows", False), forward=more.get("forward", False),
        in_sums=more.get("in_sums", False),
    )  # fmt: skip


def around(
    *peers: PeerId, scale: StepScale | None = None, dtype: str = "fp32", recomputes: bool = False
) -> Circumstances:
    return Circumstances(7, scale or StepScale(), dict.fromkeys(peers, dtype), recomputes)


def judged(*findings: Finding, of: Circumstances) -> tuple[Suspicions, Verdict]:
    suspicions, verdict = judge(findings[0], Suspicions(), of)
    for one in findings[1:]:
        suspicions, verdict = judge(one, suspicions, of)
    return suspicions, verdict


def test_the_first_finding_is_checked_by_another_replica() -> None:
    suspicions, verdict = judged(finding(A), of=around(A, B))
    assert verdict == Move(frozenset({B}))
    assert suspicions.findings == {SLOT: (finding(A),)}


def test_the_only_replica_executes_it_once_more() -> None:
    suspicions, verdict = judged(finding(A), of=around(A))
    assert verdict == Redo()
    assert suspicions.routes == {SLOT: frozenset({A})}


def test_what_may_be_in_sums_is_executed_elsewhere_in_another_attempt() -> None:
    suspicions, verdict = judged(finding(A, in_sums=True), of=around(A, B))
    assert verdict == Redo()
    assert suspicions.routes == {SLOT: frozenset({B})}


def test_who_has_it_twice_in_sums_is_taken_out_rather_than_redoing_the_step_again() -> None:
    second = finding(A, slot=(MicrobatchId(0), Stage(1)), in_sums=True)
    assert judged(finding(A, in_sums=True), second, of=around(A, B))[1] == TakeOut()


def test_sums_that_are_bad_are_done_without_the_node() -> None:
    assert judged(finding(A, slot=(SUMS, Stage(1)), in_sums=True), of=around(A, B))[1] == TakeOut()


@pytest.mark.parametrize("findings", [(A, B), (A, A)])
def test_twice_bad_is_the_runs(findings: tuple[PeerId, ...]) -> None:
    suspicions, verdict = judged(*map(finding, findings), of=around(*set(findings)))
    assert isinstance(verdict, Diverged)
    assert suspicions == Suspicions()
    assert "diverged in step 7: microbatch 3 at stage 1" in verdict.reason
    assert "node a" in verdict.reason
    assert "optimizer.lr" in verdict.reason


def test_two_of_three_replicas_are_enough() -> None:
    assert isinstance(judged(finding(A), finding(B), of=around(A, B, C))[1], Diverged)


def test_a_step_is_not_opened_anew_for_ever() -> None:
    slots = [(MicrobatchId(m), Stage(1)) for m in range(MAX_REDOS + 1)]
    *redone, last = (finding(A, slot=slot) for slot in slots)
    assert judged(*redone, of=around(A))[1] == Redo()
    verdict = judged(*redone, last, of=around(A))[1]
    assert isinstance(verdict, Diverged)
    assert f"{MAX_REDOS} times over" in verdict.reason


def test_one_node_confirms_nothing_by_saying_it_twice_while_there_are_others() -> None:
    assert judged(finding(A), finding(A), of=around(A, B))[1] == Move(frozenset({B}))


def test_a_microbatch_that_nobody_else_lives_to_check_is_believed_in_the_end() -> None:
    same = [finding(A)] * MAX_EXECUTIONS
    assert isinstance(judged(*same, of=around(A, B))[1], Diverged)


def test_an_overflow_makes_the_fixed_point_coarser() -> None:
    of = around(A, B)
    verdict = judged(finding(A, overflows=True), finding(B, overflows=True), of=of)[1]
    assert isinstance(verdict, BackOff)
    assert verdict.scale == StepScale(coarsen=COARSEN_BITS)


def test_the_coarsest_fixed_point_is_the_end() -> None:
    of = around(A, scale=StepScale(coarsen=MAX_COARSEN))
    verdict = judged(finding(A, overflows=True), finding(A, overflows=True), of=of)[1]
    assert isinstance(verdict, Diverged)
    assert "coarsest" in verdict.reason


def test_a_gradient_in_fp16_halves_the_loss_scale() -> None:
    of = around(A, B, scale=StepScale(512.0, 4), dtype="fp16")
    verdict = judged(finding(A, dtype="fp16"), finding(B, dtype="fp16"), of=of)[1]
    assert isinstance(verdict, BackOff)
    assert verdict.scale == StepScale(256.0, 4)


def test_a_loss_scale_of_one_is_the_end() -> None:
    of = around(A, scale=StepScale(1.0), dtype="fp16")
    verdict = judged(finding(A, dtype="fp16"), finding(A, dtype="fp16"), of=of)[1]
    assert isinstance(verdict, Diverged)
    assert "loss scale is 1" in verdict.reason


def test_no_loss_scale_helps_a_forward() -> None:
    loss = finding(A, dtype="fp16", forward=True)
    assert isinstance(judged(loss, loss, of=around(A, dtype="fp16"))[1], Diverged)


def test_what_overflows_in_fp16_is_not_checked_in_fp32() -> None:
    of = Circumstances(7, StepScale(), {A: "fp16", B: "fp32"})
    suspicions, verdict = judged(finding(A, dtype="fp16"), of=of)
    assert verdict == Redo()
    assert suspicions.routes == {SLOT: frozenset({A})}
    assert isinstance(judge(finding(A, dtype="fp16"), suspicions, of)[1], BackOff)


def test_a_recomputed_step_never_backs_off() -> None:
    of = around(A, recomputes=True)
    verdict = judged(finding(A, overflows=True), finding(A, overflows=True), of=of)[1]
    assert isinstance(verdict, Diverged)
    assert "computes other bits" in verdict.reason


def test_who_was_alone_with_bad_numbers_is_marked_at_the_commit() -> None:
    suspicions, _ = judged(finding(A), of=around(A, B))
    assert refuted(suspicions, {SLOT: (B, "fp32")}) == [A]
    assert refuted(suspicions, {SLOT: (A, "fp32")}) == [A]
    assert refuted(suspicions, {SLOT: (B, "bf16")}) == []


def test_a_confirmed_finding_marks_nobody() -> None:
    suspicions, _ = judged(finding(A), finding(B), of=around(A, B))
    assert refuted(suspicions, {SLOT: (A, "fp32")}) == []


NUM_SLOTS = 12
findings = st.builds(
    finding,
    st.sampled_from([A, B, C]),
    slot=st.tuples(
        st.sampled_from([SUMS, *map(MicrobatchId, range(NUM_SLOTS - 1))]), st.just(Stage(0))
    ),
    dtype=st.sampled_from(["fp16", "fp32"]),
    overflows=st.booleans(),
    forward=st.booleans(),
    in_sums=st.booleans(),
)


@given(reports=st.lists(findings, max_size=400), live=st.sets(st.sampled_from([A, B, C])))
def test_every_verdict_leaves_less_room_for_the_next(
    reports: list[Finding], live: set[PeerId]
) -> None:
    """Whatever is reported by whom: findings at one scale are bounded, so are the times that a
    step is opened anew, and so are the scales."""
    scale, suspicions = StepScale(MAX_LOSS_SCALE), Suspicions()
    room = (17 + MAX_COARSEN // COARSEN_BITS, MAX_REDOS, NUM_SLOTS * MAX_EXECUTIONS)
    for report in reports:
        suspicions, verdict = judge(report, suspicions, around(*live, scale=scale))
        executions = sum(map(len, suspicions.findings.values()))
        if isinstance(verdict, Diverged):
            return
        if isinstance(verdict, BackOff):
            assert verdict.scale != scale
            assert verdict.scale.loss_scale <= scale.loss_scale
            assert verdict.scale.coarsen >= scale.coarsen
            scale = verdict.scale
        scales = int(scale.loss_scale).bit_length() + (MAX_COARSEN - scale.coarsen) // COARSEN_BITS
        left = scales, MAX_REDOS - suspicions.redos, NUM_SLOTS * MAX_EXECUTIONS - executions
        assert min(left) >= 0
        assert left < room
        room = left
