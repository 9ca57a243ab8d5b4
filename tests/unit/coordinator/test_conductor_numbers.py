# SPDX-License-Identifier: Apache-2.0
"""Bad numbers in a swarm: the run's are redone at another scale or pause it, a node's own are
computed by others."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.coordinator.numbers import MAX_REDOS
from shoal.coordinator.step_scale import COARSEN_BITS, MAX_COARSEN
from shoal.protocol.ids import Incarnation, MicrobatchId, Stage
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.scale import coarsened

from .fake_attempt import BadNumbers, Spoil, Try
from .fake_member import FakeMember
from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, lines

OVERFLOW = BadNumbers("NumericOverflowError")
GRADIENT = BadNumbers()
LOSS = BadNumbers("NonFiniteLossError", pb.TASK_LEG_FORWARD)
UNSENDABLE = BadNumbers(leg=pb.TASK_LEG_SUMMED)


@dataclass(frozen=True)
class Hard:
    """A task that gives bad numbers to everybody, until the scale suits it."""

    step: int
    microbatch: int
    stage: int
    bad: BadNumbers
    max_loss_scale: float = math.inf
    min_coarsen: int = 0

    def is_bad(self, loss_scale: float, coarsen: int) -> bool:
        return loss_scale > self.max_loss_scale or coarsen < self.min_coarsen


def spoil_by(*hard: Hard) -> Spoil:
    def spoil(node: FakeMember, microbatch: int, now: Try) -> BadNumbers | None:
        for task in hard:
            where = task.step, task.microbatch, task.stage
            if where == (now.step, microbatch, node.stage) and task.is_bad(
                now.loss_scale, now.coarsen
            ):
                return task.bad
        return None

    return spoil


NEVER = 10**6
"""A `min_coarsen` that no scale has."""


def opened(swarm: FakeSwarm) -> Counter[int]:
    """How often each step was opened."""
    return Counter(e.payload["step"] for e in swarm.store.read() if e.kind == "step_opened")


def backed_off(swarm: FakeSwarm) -> int:
    return sum(e.kind == "numbers_backed_off" for e in swarm.store.read())


def assert_nobody_is_blamed(swarm: FakeSwarm) -> None:
    assert not swarm.conductor.marks
    assert all(e.kind != "node_fenced" for e in swarm.store.read())


def holder(swarm: FakeSwarm, microbatch: int, stage: int) -> FakeNode:
    ledger = swarm.conductor.ledger
    assert ledger is not None
    node = swarm.by_incarnation(ledger.holder(MicrobatchId(microbatch), Stage(stage)))
    assert node is not None
    return node


def hold_by(swarm: FakeSwarm, stage: int) -> tuple[FakeNode, int]:
    """A node and one of its microbatches that are still to be done."""
    ledger = swarm.conductor.ledger
    assert ledger is not None
    microbatch = next(m for m, s in ledger.missing() if s == stage)
    return holder(swarm, microbatch, stage), microbatch


def report_all(*nodes: FakeNode) -> None:
    for node in nodes:
        while node.events:
            node.report()


# ---- a node's own ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_what_only_one_node_finds_bad_is_computed_by_another(stage: int) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node, _ = hold_by(swarm, stage)
    node.flaky.append(GRADIENT)
    swarm.finish()
    assert swarm.conductor.marks == {node.peer_id: 1}
    assert opened(swarm)[2] == 1, "only one microbatch had to move"
    assert all(e.kind != "node_fenced" for e in swarm.store.read())
    assert_undisturbed(swarm)


def test_a_replica_that_leaves_is_not_asked_to_check() -> None:
    swarm = FakeSwarm(make_run(steps=6), 4)
    swarm.run_until(in_step(swarm))
    node, leaver = swarm.at(0)
    node.mute = True
    ledger = swarm.conductor.ledger
    assert ledger is not None
    swarm.run_until(
        lambda: any(r.incarnation == leaver.incarnation for r in ledger.receipts.values())
    )
    leaver.leave()
    report_all(leaver)
    assert not ledger.is_idle(Incarnation(leaver.incarnation)), "it stays for what it has summed"
    node.flaky.append(GRADIENT)
    node.mute = False
    swarm.finish()
    assert swarm.conductor.marks == {node.peer_id: 1}
    assert opened(swarm)[2] == 2, "the only one that may be given work executed it once more"
    assert_undisturbed(swarm)


def test_a_node_with_bad_numbers_that_leaves_has_them_checked_by_who_stays() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node, _ = hold_by(swarm, 0)
    node.flaky.append(GRADIENT)
    swarm.run_until(lambda: not node.flaky)
    node.leave()
    swarm.finish()
    assert swarm.conductor.marks == {node.peer_id: 1}
    assert_undisturbed(swarm)


def test_the_only_node_computes_once_more_and_is_marked_when_it_was_alone_with_it() -> None:
    swarm = FakeSwarm(make_run(replicas=1), 2)
    swarm.run_until(in_step(swarm))
    node, _ = hold_by(swarm, 0)
    node.flaky.append(GRADIENT)
    swarm.finish()
    assert swarm.conductor.marks == {node.peer_id: 1}
    assert opened(swarm)[2] == 2
    assert_undisturbed(swarm)


def test_a_gradient_that_is_summed_but_can_not_be_sent_is_never_summed_twice() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node, _ = hold_by(swarm, 1)
    node.flaky.append(UNSENDABLE)
    swarm.finish()
    assert swarm.conductor.marks == {node.peer_id: 1}
    assert opened(swarm)[2] == 2
    assert_undisturbed(swarm)


def test_a_node_whose_numbers_are_always_bad_holds_nobody_up() -> None:
    swarm = FakeSwarm(make_run(steps=3), 4)
    swarm.run_until(in_step(swarm))
    broken = swarm.at(0)[0]
    swarm.spoil = lambda node, *_: GRADIENT if node is broken else None
    swarm.finish()
    assert set(swarm.conductor.marks) == {broken.peer_id}
    assert_undisturbed(swarm)


def test_a_node_that_sums_up_bad_numbers_always_holds_nobody_up() -> None:
    swarm = FakeSwarm(make_run(steps=3), 4)
    swarm.run_until(in_step(swarm))
    broken = swarm.at(0)[0]
    swarm.spoil = lambda node, *_: UNSENDABLE if node is broken else None
    swarm.finish()
    assert set(swarm.conductor.marks) == {broken.peer_id}
    assert_undisturbed(swarm)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_a_number_is_never_recorded(loss: float) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node, microbatch = hold_by(swarm, 1)
    assert node.session is not None
    receipt = pb.Receipt(
        incarnation=node.incarnation, step=2, attempt=1, microbatch=microbatch, stage=1,
        loss_sum=loss, has_loss=True,
    )  # fmt: skip
    swarm.conductor.receive(node.session, pb.NodeEvent(receipt=receipt))
    swarm.finish()
    assert swarm.conductor.marks == {node.peer_id: 1}
    assert all(math.isfinite(r.loss) for r in swarm.conductor.state.records.values())
    assert_undisturbed(swarm)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_a_number_is_never_recorded(norm: float) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.norm = norm
    swarm.run_until(lambda: swarm.conductor.state.step >= 2)
    liar.norm = None
    swarm.finish()
    assert swarm.conductor.marks == {liar.peer_id: 1}
    assert_undisturbed(swarm)


def test_norms_that_stay_bad_on_the_only_node_pause_the_run() -> None:
    swarm = FakeSwarm(make_run(replicas=1), 2)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.norm = math.inf
    swarm.run_until(lambda: swarm.conductor.state.paused is not None)
    assert "diverged in step 2: sums at stage 1" in swarm.conductor.state.paused
    liar.norm = None
    swarm.conductor.resume()
    swarm.finish()
    assert_undisturbed(swarm)


def test_sums_that_overflow_together_redo_the_step_and_cost_nobody_his_place() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    for attempt in range(1, 4):
        node = swarm.at(1)[0]
        assert swarm.conductor.state.attempt == attempt
        node.trouble(
            pb.TROUBLE_KIND_NUMBERS, "overflow", step=2, attempt=attempt, leg=pb.TASK_LEG_REDUCED
        )
        report_all(node)
        if attempt < 3:
            swarm.run_until(in_step(swarm))
    assert "overflow together, 3 times over" in (swarm.conductor.state.paused or "")
    assert_nobody_is_blamed(swarm)
    swarm.conductor.resume()
    swarm.finish()
    assert_undisturbed(swarm)


# ---- bytes that a neighbour refuses ------------------------------------------------------


def refuse(swarm: FakeSwarm, receiver: FakeNode, sender: FakeNode, microbatch: int) -> None:
    """`receiver` finds NaN in what `sender` sent; both say so."""
    state = swarm.conductor.state
    receiver.say(
        trouble=pb.Trouble(
            kind=pb.TROUBLE_KIND_BAD_PEER, incarnation=receiver.incarnation,
            peer_id=sender.peer_id, peer_incarnation=sender.incarnation, error="NonFiniteError",
            step=state.step + 1, attempt=state.attempt, microbatch=microbatch,
        )
    )  # fmt: skip
    sender.trouble(
        pb.TROUBLE_KIND_NUMBERS, "refused", step=state.step + 1, attempt=state.attempt,
        microbatch=microbatch, leg=pb.TASK_LEG_SUMMED,
    )  # fmt: skip
    receiver.report()
    sender.report()


def a_pair(swarm: FakeSwarm) -> tuple[FakeNode, FakeNode, int]:
    """The holders of a microbatch at the two stages, and which it is."""
    first, microbatch = hold_by(swarm, 0)
    second = holder(swarm, microbatch, 1)
    report_all(first, second)
    return first, second, microbatch


@pytest.mark.parametrize("forward", [True, False])
def test_who_sends_nan_is_checked_and_marked_and_who_refused_it_is_not(forward: bool) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    sender, receiver, microbatch = a_pair(swarm)
    if not forward:
        sender, receiver = receiver, sender
    refuse(swarm, receiver, sender, microbatch)
    assert not swarm.conductor.marks
    assert holder(swarm, microbatch, sender.stage) is not sender, "somebody else checks it"
    swarm.finish()
    assert swarm.conductor.marks == {sender.peer_id: 1}
    assert opened(swarm)[2] == 2
    assert_undisturbed(swarm)


def test_nan_that_every_sender_sends_is_the_runs() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    sender, receiver, microbatch = a_pair(swarm)
    refuse(swarm, receiver, sender, microbatch)
    swarm.settle(in_step(swarm))
    other, receiver_now = holder(swarm, microbatch, 0), holder(swarm, microbatch, 1)
    report_all(other, receiver_now)
    refuse(swarm, receiver_now, other, microbatch)
    assert "diverged in step 2" in (swarm.conductor.state.paused or "")
    assert_nobody_is_blamed(swarm)


def test_nan_in_a_tensor_of_no_attempt_marks_its_sender() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    sender, receiver, microbatch = a_pair(swarm)
    receiver.say(
        trouble=pb.Trouble(
            kind=pb.TROUBLE_KIND_BAD_PEER, incarnation=receiver.incarnation,
            peer_id=sender.peer_id, peer_incarnation=sender.incarnation, error="NonFiniteError",
            step=2, attempt=5, microbatch=microbatch,
        )
    )  # fmt: skip
    report_all(receiver)
    assert swarm.conductor.marks == {sender.peer_id: 1}
    swarm.finish()
    assert opened(swarm)[2] == 1
    assert_undisturbed(swarm)


def test_a_stranger_to_the_microbatch_can_accuse_nobody() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    sender, receiver, microbatch = a_pair(swarm)
    stranger = next(n for n in swarm.at(1) if n is not receiver)
    before = swarm.conductor.state.attempt
    stranger.say(
        trouble=pb.Trouble(
            kind=pb.TROUBLE_KIND_BAD_PEER, incarnation=stranger.incarnation,
            peer_id=sender.peer_id, peer_incarnation=sender.incarnation, error="NonFiniteError",
            step=2, attempt=before, microbatch=microbatch,
        )
    )  # fmt: skip
    report_all(stranger)
    assert swarm.conductor.state.attempt == before
    swarm.finish()
    assert not swarm.conductor.marks


# ---- the run's ---------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_fp16_redoes_the_same_step_with_half_the_loss_scale(replicas: int) -> None:
    swarm = FakeSwarm(make_run(replicas=replicas), 2 * replicas, dtype="fp16")
    swarm.spoil = spoil_by(Hard(2, 1, 0, GRADIENT, max_loss_scale=256.0))
    swarm.finish()
    scales = [r.loss_scale for r in swarm.conductor.state.records.values()]
    assert scales == [1024.0, 256.0, 256.0, 256.0]
    assert "the loss scale becomes 256" in lines(swarm)
    assert_nobody_is_blamed(swarm)
    assert_undisturbed(swarm)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_overflow_redoes_the_same_step_with_a_coarser_exponent(replicas: int) -> None:
    swarm = FakeSwarm(make_run(replicas=replicas), 2 * replicas)
    swarm.spoil = spoil_by(Hard(2, 1, 1, OVERFLOW, min_coarsen=6))
    swarm.finish()
    exponents = [r.scale_exponent for r in swarm.conductor.state.records.values()]
    coarse = exponents[0] - 2 * COARSEN_BITS
    assert exponents == [exponents[0], coarse, coarse, coarse]
    assert_nobody_is_blamed(swarm)
    assert_undisturbed(swarm)


def test_the_sequence_of_scales_does_not_depend_on_who_was_lost() -> None:
    hard = [
        Hard(2, 1, 0, GRADIENT, max_loss_scale=256.0),
        Hard(3, 0, 1, OVERFLOW, min_coarsen=4),
        Hard(3, 2, 0, GRADIENT, max_loss_scale=64.0),
    ]
    records = []
    for disturbed in (False, True):
        swarm = FakeSwarm(make_run(), 4, dtype="fp16")
        swarm.spoil = spoil_by(*hard)
        if disturbed:
            swarm.run_until(in_step(swarm))
            swarm.at(0)[0].kill()
            swarm.run_until(in_step(swarm, 3))
            swarm.restart()
            swarm.join()
        swarm.finish()
        assert_undisturbed(swarm)
        records.append(
            [
                (r.loss_scale, r.scale_exponent, r.sums_digests)
                for r in swarm.conductor.state.records.values()
            ]
        )
    assert records[0] == records[1]


def test_a_restarted_coordinator_goes_on_with_the_scale_that_it_had_backed_off_to() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.spoil = spoil_by(Hard(2, 1, 1, OVERFLOW, min_coarsen=4))
    swarm.run_until(lambda: swarm.conductor.state.scales.next.coarsen == 4)
    before = opened(swarm)[2]
    swarm.restart()
    swarm.run_to_step(2)
    assert opened(swarm)[2] <= before + 2, "it overflowed once more"
    swarm.finish()
    assert backed_off(swarm) == 1
    assert_undisturbed(swarm)


@pytest.mark.parametrize(("log_mb", "how"), [(0, "rolled_back"), (1, "replayed")])
def test_each_step_is_recomputed_with_the_scale_of_its_record(log_mb: int, how: str) -> None:
    run = make_run(steps=8, replicas=1, snapshot_every=50, boundary_log_mb=log_mb)
    swarm = FakeSwarm(run, 2)
    swarm.spoil = spoil_by(
        Hard(2, 1, 1, OVERFLOW, min_coarsen=4), Hard(4, 0, 0, OVERFLOW, min_coarsen=8)
    )
    swarm.run_until(in_step(swarm, 6))
    before = backed_off(swarm)
    swarm.at(0)[0].kill()
    swarm.join()
    swarm.finish()
    assert how in kinds(swarm)
    assert backed_off(swarm) == before
    assert_undisturbed(swarm)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_that_no_scale_helps_pauses_the_run_as_diverged(
    replicas: int, dtype: str
) -> None:
    swarm = FakeSwarm(make_run(replicas=replicas), 2 * replicas, dtype=dtype)
    swarm.spoil = spoil_by(Hard(2, 3, 1, GRADIENT, min_coarsen=NEVER))
    swarm.run_until(lambda: swarm.conductor.state.paused is not None)
    swarm.settle()
    reason = swarm.conductor.waiting_for
    assert "the run diverged in step 2: microbatch 3 at stage 1" in reason
    assert "NonFiniteError" in reason
    assert "resume" in reason
    assert swarm.conductor.state.step == 1
    assert_nobody_is_blamed(swarm)
    swarm.spoil = spoil_by()
    swarm.conductor.resume()
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_loss_that_is_bad_in_fp16_pauses_without_trying_smaller_scales() -> None:
    swarm = FakeSwarm(make_run(), 4, dtype="fp16")
    swarm.spoil = spoil_by(Hard(2, 3, 1, LOSS, min_coarsen=NEVER))
    swarm.run_until(lambda: swarm.conductor.state.paused is not None)
    assert opened(swarm)[2] == 1
    assert not backed_off(swarm)
    assert_nobody_is_blamed(swarm)


def test_a_validation_loss_that_is_bad_everywhere_pauses_the_run() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.spoil = spoil_by(Hard(4, 5, 1, LOSS, min_coarsen=NEVER))
    swarm.run_until(lambda: swarm.conductor.state.paused is not None)
    assert "diverged in step 4: microbatch 5 at stage 1" in swarm.conductor.state.paused
    assert_nobody_is_blamed(swarm)


def test_a_validation_loss_that_is_bad_once_is_computed_elsewhere() -> None:
    swarm = FakeSwarm(make_run(), 4)
    seen: list[FakeNode] = []

    def spoil(node: FakeMember, microbatch: int, now: Try) -> BadNumbers | None:
        if (now.step, microbatch, node.stage) == (4, 5, 1) and not seen:
            seen.append(node)
            return LOSS
        return None

    swarm.spoil = spoil
    swarm.finish()
    assert swarm.conductor.marks == {seen[0].peer_id: 1}
    assert_undisturbed(swarm)


@pytest.mark.parametrize(
    ("bad", "dtype", "attempts"),
    [(OVERFLOW, "fp32", MAX_COARSEN // COARSEN_BITS + 1), (GRADIENT, "fp16", 11)],
)
def test_backing_off_ends(bad: BadNumbers, dtype: str, attempts: int) -> None:
    swarm = FakeSwarm(make_run(), 4, dtype=dtype)
    swarm.spoil = spoil_by(Hard(2, 0, 0, bad, min_coarsen=NEVER))
    swarm.run_until(lambda: swarm.conductor.state.paused is not None)
    assert opened(swarm)[2] == attempts
    assert "diverged in step 2" in swarm.conductor.state.paused
    assert_nobody_is_blamed(swarm)


def test_one_node_alone_never_makes_the_run_diverge() -> None:
    swarm = FakeSwarm(make_run(steps=3), 4)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(0)[0]
    swarm.spoil = lambda node, *_: OVERFLOW if node is liar else None
    swarm.finish()
    assert swarm.conductor.state.scales.next.coarsen == 0
    assert_undisturbed(swarm)


# ---- any order, any faults ---------------------------------------------------------------

hards = st.builds(
    Hard,
    st.integers(1, 3), st.integers(0, 3), st.integers(0, 1),
    st.sampled_from([OVERFLOW, GRADIENT, UNSENDABLE]),
    max_loss_scale=st.sampled_from([math.inf, 1024.0, 300.0, 1.0, 0.5]),
    min_coarsen=st.sampled_from([0, 0, 3, 24, NEVER]),
)  # fmt: skip
glitches = st.tuples(st.integers(0, 3), st.sampled_from([OVERFLOW, GRADIENT, LOSS, UNSENDABLE]))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    hard=st.lists(hards, max_size=4),
    glitch=st.lists(st.tuples(st.integers(0, 600), glitches), max_size=6),
    order=st.lists(st.integers(0, 1 << 16), max_size=400),
    replicas=st.integers(1, 3),
    dtype=st.sampled_from(["fp16", "fp32"]),
)
def test_whatever_goes_wrong_a_step_ends_in_a_commit_or_in_a_pause(
    hard: Sequence[Hard],
    glitch: Sequence[tuple[int, tuple[int, BadNumbers]]],
    order: Sequence[int],
    replicas: int,
    dtype: str,
) -> None:
    """In few attempts; and only who had bad numbers of his own is ever marked."""
    swarm = FakeSwarm(make_run(steps=3, replicas=replicas), 2 * replicas, dtype=dtype)
    swarm.spoil = spoil_by(*hard)
    nodes = list(swarm.nodes.values())
    culprits = set()
    for number in range(3000):
        for at, (who, bad) in glitch:
            if at == number:
                node = nodes[who % len(nodes)]
                node.flaky.append(bad)
                culprits.add(node.peer_id)
        state = swarm.conductor.state
        if swarm.conductor.ended or state.paused is not None:
            break
        actions = list(swarm.actions())
        if actions:
            choice = order[number] if number < len(order) else number * 7919
            actions[choice % len(actions)]()
        else:
            swarm.tick()
    assert swarm.conductor.ended or swarm.conductor.state.paused is not None
    scales = 11 if dtype == "fp16" else 1
    bound = (scales + MAX_COARSEN // COARSEN_BITS) * (MAX_REDOS + 1)
    assert all(attempts <= bound for attempts in opened(swarm).values())
    assert set(swarm.conductor.marks) <= culprits
    tokens = swarm.run.spec.tokens_per_step
    for step, record in swarm.conductor.state.records.items():
        scale = record.loss_scale, coarsened(tokens, record.scale_exponent)
        assert not any(h.step == step and h.is_bad(*scale) for h in hard), "a bad sum counted"
    assert_undisturbed(swarm)


def test_a_report_of_another_attempt_changes_nothing() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node, microbatch = hold_by(swarm, 0)
    node.trouble(
        pb.TROUBLE_KIND_NUMBERS, "NaN", step=2, attempt=9, microbatch=microbatch,
        leg=pb.TASK_LEG_BACKWARD,
    )  # fmt: skip
    report_all(node)
    assert holder(swarm, microbatch, 0) is node
    assert not swarm.conductor.marks


def test_bad_numbers_of_a_microbatch_that_no_step_has_are_refused() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node, _ = hold_by(swarm, 0)
    node.trouble(pb.TROUBLE_KIND_NUMBERS, "NaN", step=2, attempt=1, microbatch=4_000_000)
    report_all(node)
    assert swarm.conductor.marks == {node.peer_id: 1}
