# SPDX-License-Identifier: Apache-2.0
"""Nodes, stages and the coordinator itself are lost; the result is the same."""

import pytest

from shoal.coordinator.step_runner import Phase

from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, lines, untermed

# ---- one node is lost --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "drop"])
@pytest.mark.parametrize("moment", range(0, 80, 4))
def test_a_node_lost_at_any_moment_changes_nothing(moment: int, how: str) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_to_step(1)
    counter = iter(range(moment))
    swarm.settle(lambda: next(counter, None) is None)
    victim = swarm.at(moment % 2)[0]
    getattr(victim, how)()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


@pytest.mark.parametrize("gradients_arrived", [True, False])
def test_a_node_lost_right_after_it_prepared_holds_nobody_up(gradients_arrived: bool) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_to_step(1)
    swarm.run_until(lambda: any(n.prepared for n in swarm.at(1)))
    victim = next(n for n in swarm.at(1) if n.prepared)
    if not gradients_arrived:
        for message in [m for m in swarm.messages if m[5] == victim.incarnation]:
            swarm.messages.remove(message)
    while victim.events:
        victim.report()
    victim.kill()
    swarm.finish()
    assert_undisturbed(swarm)


def test_two_nodes_lost_in_one_step_change_nothing() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    swarm.at(0)[0].kill()
    swarm.at(1)[0].kill()
    swarm.finish()
    assert_undisturbed(swarm)
    assert "rerouted to" in lines(swarm)


def test_a_node_lost_while_it_applies_a_step_holds_nobody_up() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(lambda: swarm.conductor.phase is Phase.APPLYING)
    next(n for n in swarm.at(0) if n.prepared).kill()
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_silent_node_is_fenced_when_its_lease_is_over() -> None:
    swarm = FakeSwarm(make_run(steps=50), 4)
    swarm.pass_time(4)
    swarm.run_until(in_step(swarm))
    silent = swarm.at(0)[0]
    silent.frozen = True
    swarm.settle()
    swarm.pass_time(4.5)
    assert silent.peer_id in swarm.conductor.sessions
    assert swarm.conductor.state.step == 1
    swarm.pass_time(1.2)
    assert silent.peer_id in swarm.conductor.gone
    assert "no sign of life for 5.0 s" in lines(swarm)
    swarm.finish()
    assert_undisturbed(swarm)


def test_slow_and_irregular_heartbeats_fence_nobody() -> None:
    swarm = FakeSwarm(make_run(min_nodes=9), 4)
    for beat_s in (0.6, 4.0, 1.0, 5.4, 2.0, 6.0, 0.6, 5.8, 3.0) * 3:
        swarm.beat_s = beat_s
        swarm.pass_time(beat_s + 0.2)
    assert len(swarm.conductor.sessions) == 4


def test_a_coordinator_that_was_suspended_blames_nobody_for_the_silence() -> None:
    swarm = FakeSwarm(make_run(steps=50), 4)
    swarm.pass_time(4)
    swarm.now_s += 3600
    swarm.conductor.tick()
    assert len(swarm.conductor.sessions) == 4
    for node in swarm.nodes.values():
        node.frozen = True
    swarm.pass_time(30)
    assert not swarm.conductor.sessions


def test_a_step_that_does_not_move_says_whom_it_waits_for() -> None:
    swarm = FakeSwarm(make_run(replicas=1), 2)
    swarm.run_until(in_step(swarm))
    hung = swarm.at(1)[0]
    hung.mute = True
    swarm.settle()
    swarm.pass_time(12)
    name = swarm.conductor.sessions[hung.peer_id].name
    assert f"of {name} at stage 1" in swarm.conductor.waiting_for
    hung.mute = False
    swarm.finish()
    assert_undisturbed(swarm)


# ---- a stage is lost ---------------------------------------------------------------------


def lose_stage(swarm: FakeSwarm, stage: int) -> list[FakeNode]:
    """Both replicas lose their connection and can't come back by themselves."""
    lost = swarm.at(stage)
    for node in lost:
        node.frozen = True
        node.drop()
    return lost


def test_a_lost_stage_waits_for_its_old_holders_and_goes_on_with_what_they_kept() -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50), 4)
    swarm.run_until(in_step(swarm, 3))
    lost = lose_stage(swarm, 1)
    swarm.settle()
    assert "its last holders have 3 s to come back" in swarm.conductor.waiting_for
    swarm.pass_time(2)
    lost[0].frozen = False
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_holders_lost_before_they_applied_a_committed_step_come_back_and_apply_it() -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50), 4)
    swarm.run_to_step(1)
    swarm.run_until(
        lambda: swarm.conductor.phase is Phase.APPLYING and swarm.conductor.state.step == 2
    )
    lost = lose_stage(swarm, 1)
    assert all(node.step == 1 and node.held_sums for node in lost)
    swarm.settle()
    lost[1].frozen = False
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_stage_lost_for_good_rolls_the_run_back_and_records_are_reproduced() -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=3, boundary_log_mb=0), 4)
    swarm.run_until(lambda: swarm.conductor.state.step == 5 and 3 in swarm.snapshots.complete)
    before = dict(swarm.conductor.state.records)
    lose_stage(swarm, 1)
    swarm.settle()
    swarm.pass_time(2)
    assert swarm.conductor.state.step == 5
    assert "has no node that holds step 5" in swarm.conductor.waiting_for
    swarm.run_until(lambda: "rolled_back" in kinds(swarm))
    assert swarm.conductor.state.step == 3
    assert swarm.conductor.state.highest_step == 5
    swarm.finish()
    after = swarm.conductor.state.records
    assert {step: after[step] for step in before} == before
    assert len(swarm.conductor.state.records) == 6
    recovered = swarm.conductor.state.recovered
    assert (recovered.rollbacks, recovered.replays, recovered.recomputing_to) == (1, 0, 0)
    assert_undisturbed(swarm)


def test_without_a_snapshot_a_run_goes_back_to_the_beginning() -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50, boundary_log_mb=0), 4)
    swarm.run_to_step(3)
    for node in swarm.at(0):
        node.kill()
    swarm.run_until(lambda: "rolled_back" in kinds(swarm))
    assert "goes back to the beginning" in lines(swarm)
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_lost_stage_that_nobody_can_take_waits_without_rolling_back() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50, boundary_log_mb=0), 2)
    swarm.run_to_step(2)
    swarm.at(1)[0].kill()
    swarm.settle()
    swarm.pass_time(30)
    assert "rolled_back" not in kinds(swarm)
    assert "give the join link to one more" in swarm.conductor.waiting_for
    swarm.join()
    swarm.finish()
    assert "rolled_back" in kinds(swarm)
    assert_undisturbed(swarm)


def test_no_spare_replica_loses_its_place_while_a_lost_stage_waits_for_its_holders() -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50), 4)
    swarm.run_until(in_step(swarm, 3))
    others = {n.peer_id: n.incarnation for n in swarm.at(0)}
    lose_stage(swarm, 1)
    swarm.pass_time(2)
    assert {n.peer_id: n.incarnation for n in swarm.at(0)} == others


def test_a_recomputed_step_with_other_bits_fails_the_run() -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=50, replicas=1, boundary_log_mb=0), 2)
    swarm.run_to_step(3)
    swarm.at(1)[0].kill()
    swarm.join().corrupt_weights = 1
    with pytest.raises(AssertionError, match="recomputed with other weights"):
        swarm.finish()
    assert all(node.done for node in swarm.nodes.values())


def test_a_recomputed_step_with_other_sums_fails_the_run() -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=50, replicas=1, boundary_log_mb=0), 2)
    swarm.run_to_step(3)
    swarm.at(1)[0].kill()
    swarm.join().corrupt_sums = 1
    with pytest.raises(AssertionError, match="recomputed with other sums than recorded"):
        swarm.finish()
    assert swarm.conductor.state.step == 0


# ---- the coordinator dies ----------------------------------------------------------------


@pytest.mark.parametrize("lose_soft", [True, False])
@pytest.mark.parametrize("moment", range(0, 90, 6))
def test_a_coordinator_that_dies_at_any_moment_goes_on_from_its_log(
    moment: int, lose_soft: bool
) -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50), 4)
    swarm.run_to_step(1)
    counter = iter(range(moment))
    swarm.settle(lambda: next(counter, None) is None)
    before = swarm.conductor.state
    swarm.restart(lose_soft=lose_soft)
    after = swarm.conductor.state
    if not lose_soft:
        assert untermed(after) == untermed(before)
    assert (after.step, after.records, after.peers) == (before.step, before.records, before.peers)
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_after_a_restart_replicas_must_agree_on_weights_that_were_not_logged() -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=50, replicas=3), 6)
    swarm.run_to_step(2)
    for node in swarm.nodes.values():
        while node.session is not None and not node.session.outbox.empty():
            node.obey()  # it applies step 2, but nobody hears of it
    swarm.restart()
    assert 2 not in swarm.conductor.state.weights_digests
    liar = next(n for n in swarm.nodes.values() if n.step == 2)
    liar.weights ^= 1
    swarm.finish()
    assert "differ from the other replicas'" in lines(swarm)
    assert_undisturbed(swarm)
