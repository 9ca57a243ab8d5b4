# SPDX-License-Identifier: Apache-2.0
"""Who holds up a step although its heart beats."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.mute import LEAST_S, MOST_S, Debtor, mute, patience_s, rest_s
from shoal.coordinator.run_view import ConductorView
from shoal.protocol.ids import NOBODY, Incarnation, Stage

from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, lines

A, B, C, D = (Incarnation(i) for i in (1, 2, 3, 4))


def debtor(
    who: Incarnation, waits_for: Incarnation = NOBODY, *, still_s: float = 60.0, stage: int = 0
) -> Debtor:
    return Debtor(who, Stage(stage), waits_for, still_s, patience_s=20.0)


def test_who_waits_for_another_is_not_to_blame() -> None:
    assert mute([debtor(A, B), debtor(B, C), debtor(C)]) == [C]


def test_nobody_is_blamed_within_patience() -> None:
    assert mute([debtor(A, B, still_s=500), debtor(B, still_s=19)]) == []


def test_who_waits_for_somebody_who_owes_nothing_is_to_blame_itself() -> None:
    assert mute([debtor(A, D)]) == [A]


def test_in_a_circle_the_last_stage_goes_after_twice_the_time() -> None:
    circle = [debtor(A, B, stage=0, still_s=41), debtor(B, A, stage=1, still_s=41)]
    assert mute([*circle, debtor(C, A, stage=2)]) == [B]
    assert mute([circle[0], debtor(B, A, stage=1, still_s=39)]) == []


def test_patience_grows_with_what_is_to_do_and_with_how_long_it_takes() -> None:
    assert patience_s([0.1] * 8, 2) == LEAST_S
    assert patience_s([2.0] * 8, 3) == 60.0
    assert patience_s([1.0, 3.0] * 4, 1) == 20.0
    assert patience_s([100.0] * 8, 50) == MOST_S
    assert patience_s([], 1) == MOST_S


def test_a_mute_node_rests_longer_each_time() -> None:
    assert [rest_s(n) for n in (1, 2, 3, 99)] == [30.0, 60.0, 120.0, 600.0]


others = st.lists(
    st.tuples(st.integers(0, 8), st.floats(0, 100), st.integers(0, 3)), min_size=1, max_size=8
)


@given(others)
def test_only_who_is_still_for_too_long_is_taken_out(rows: list[tuple[int, float, int]]) -> None:
    debtors = [
        debtor(Incarnation(i + 1), Incarnation(waits_for), still_s=still_s, stage=stage)
        for i, (waits_for, still_s, stage) in enumerate(rows)
    ]
    still = {d.incarnation: d.still_s for d in debtors}
    assert all(still[who] > 20.0 for who in mute(debtors))


@given(others)
def test_when_everybody_is_still_for_long_somebody_is_to_blame(
    rows: list[tuple[int, float, int]],
) -> None:
    debtors = [
        debtor(Incarnation(i + 1), Incarnation(waits_for), still_s=41, stage=stage)
        for i, (waits_for, _, stage) in enumerate(rows)
    ]
    assert mute(debtors)


# ---- in a swarm --------------------------------------------------------------------------


def slow(swarm: FakeSwarm, node: FakeNode, task_s: float) -> None:
    node.task_s, node.busy_s = task_s, 2 * task_s


def test_a_node_that_computes_nothing_is_taken_out_and_its_work_moves() -> None:
    swarm = FakeSwarm(make_run(steps=8, microbatches=8), 4)
    swarm.run_to_step(2)
    swarm.run_until(in_step(swarm, 3))
    hung = swarm.at(1)[0]
    hung.mute = True
    swarm.run_until(lambda: swarm.conductor.state.step >= 3, within_s=20)
    assert "mute" in kinds(swarm)
    assert "its heart beats, but it has finished nothing for" in lines(swarm)
    view = ConductorView(swarm.conductor, lambda: "link").view()
    (shown,) = [n for n in view.nodes if n.peer_id == hung.peer_id]
    assert shown.waiting_for == "it finished nothing for too long, and rests for 30 s"
    hung.mute = False
    swarm.conductor.pause()
    swarm.settle()
    swarm.pass_time(40)
    swarm.conductor.resume()
    swarm.finish()
    assert hung.step == 8, "it was tried again, and took part"
    assert_undisturbed(swarm)


def test_only_the_node_that_hangs_is_taken_out_not_those_who_wait_for_it() -> None:
    swarm = FakeSwarm(make_run(stages=3, steps=4, microbatches=8), 6)
    swarm.run_to_step(1)
    swarm.run_until(in_step(swarm, 2))
    hung = swarm.at(1)[0]
    name = swarm.conductor.sessions[hung.peer_id].name
    hung.mute = True
    swarm.run_until(lambda: swarm.conductor.state.step >= 3, within_s=60)
    out = [text for _, kind, text in swarm.conductor.events if kind == "mute"]
    assert out
    assert all(text.startswith(name) for text in out)
    hung.mute = False
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_stages_only_node_is_waited_for_until_another_can_take_its_place() -> None:
    swarm = FakeSwarm(make_run(replicas=1, steps=6, snapshot_every=1, microbatches=8), 2)
    swarm.run_to_step(2)
    swarm.run_until(in_step(swarm, 3))
    hung = swarm.at(1)[0]
    hung.mute = True
    swarm.settle()
    swarm.pass_time(120)
    assert "mute" not in kinds(swarm)
    assert "at stage 1" in swarm.conductor.waiting_for
    swarm.join()
    swarm.run_until(lambda: swarm.conductor.state.step >= 4)
    assert "mute" in kinds(swarm)
    swarm.finish()
    assert_undisturbed(swarm)


@settings(max_examples=30, deadline=None)
@given(
    factor=st.floats(1, 9), task_s=st.floats(0.2, 2), stages=st.integers(1, 3),
    microbatches=st.integers(1, 6), which=st.integers(0, 5),
)  # fmt: skip
def test_a_slow_node_is_not_a_dead_one(
    factor: float, task_s: float, stages: int, microbatches: int, which: int
) -> None:
    run = make_run(stages=stages, steps=3, microbatches=microbatches, snapshot_every=9)
    swarm = FakeSwarm(run, 2 * stages)
    nodes = list(swarm.nodes.values())
    for node in nodes:
        slow(swarm, node, task_s)
    slow(swarm, nodes[which % len(nodes)], task_s * factor)
    swarm.finish(within_s=36_000)
    assert "mute" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_very_slow_node_that_is_known_is_waited_for() -> None:
    swarm = FakeSwarm(make_run(steps=3, microbatches=6, snapshot_every=9), 4)
    nodes = list(swarm.nodes.values())
    for node in nodes:
        slow(swarm, node, 1.0)
    slow(swarm, nodes[0], 40.0)
    assert nodes[0].session is not None
    nodes[0].session.pace.append(80.0)
    swarm.finish(within_s=36_000)
    assert "mute" not in kinds(swarm)


def test_a_node_slower_than_anybody_expects_gets_twice_the_time_each_time() -> None:
    assert patience_s([1.0] * 8, 1, times=3) == 80.0
    assert patience_s([1.0] * 8, 1, times=99) == MOST_S
