# SPDX-License-Identifier: Apache-2.0
"""A run from its first node to its end, with nodes that come, go, lie and fall silent."""

import math
from collections.abc import Callable

import pytest

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.step_runner import Phase
from shoal.protocol.errors import StorageError, VersionError
from shoal.protocol.ids import Incarnation, PeerId, Stage
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.version import PROTOCOL_VERSION

from .fake_swarm import FakeNode, FakeSwarm, make_run, reference


def assert_undisturbed(swarm: FakeSwarm) -> None:
    """Records and weights are those of a run in which nothing happened."""
    expected, state = reference(swarm.run), swarm.conductor.state
    assert state.records.keys() == set(range(1, state.highest_step + 1))
    for step, record in state.records.items():
        assert record.sums_digests == expected.sums[step]
        for parts in record.contributions:
            ids = sorted(m for ids in parts.values() for m in ids)
            assert ids == list(range(swarm.run.spec.batch.microbatches))
    for step, weights in state.weights_digests.items():
        assert weights == expected.weights[step]
    assert "contradiction" not in kinds(swarm)


def kinds(swarm: FakeSwarm) -> list[str]:
    return [kind for _, kind, _ in swarm.conductor.events]


def lines(swarm: FakeSwarm) -> str:
    return "\n".join(text for *_, text in swarm.conductor.events)


def in_step(swarm: FakeSwarm, step: int = 2) -> Callable[[], bool]:
    return lambda: (
        swarm.conductor.phase is Phase.STEP
        and swarm.conductor.state.step == step - 1
        and swarm.conductor.ledger is not None
        and swarm.conductor.ledger.receipts_done() > 2
    )


# ---- undisturbed -------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_run_goes_to_its_end(stages: int) -> None:
    swarm = FakeSwarm(make_run(stages=stages, steps=5), 2 * stages)
    swarm.finish()
    state = swarm.conductor.state
    assert (state.step, state.snapshot_step) == (5, 5)
    assert state.weights_sha256 == swarm.snapshots.weights_sha256(5)
    assert all(node.done == "run run-00000000 is finished" for node in swarm.nodes.values())
    assert_undisturbed(swarm)


def test_the_first_step_waits_for_the_nodes_that_were_asked_for() -> None:
    swarm = FakeSwarm(make_run(), 3)
    swarm.settle()
    assert swarm.conductor.waiting_for == "3 of 4 nodes are ready for the first step"
    swarm.join()
    swarm.finish()
    assert_undisturbed(swarm)


def test_validation_microbatches_are_counted_where_they_are_due() -> None:
    swarm = FakeSwarm(make_run(validation_every=3), 4)
    swarm.finish()
    records = swarm.conductor.state.records
    assert [r.validation_loss is not None for _, r in sorted(records.items())] == [
        True, False, False, True,
    ]  # fmt: skip
    counted = {
        m
        for r in records.values()
        for part in r.contributions
        for ids in part.values()
        for m in ids
    }
    assert counted == {0, 1, 2, 3}


def test_another_protocol_version_is_turned_away() -> None:
    swarm = FakeSwarm(make_run())
    with pytest.raises(VersionError, match="install the same release"):
        swarm.conductor.attach(PeerId("old"), pb.Hello(protocol_version=999))
    assert not swarm.conductor.sessions


def test_a_stage_nobody_holds_is_named() -> None:
    swarm = FakeSwarm(make_run(min_nodes=1), 1)
    swarm.settle()
    assert "give the join link to" in swarm.conductor.waiting_for


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
    assert "its last holders have 10 s to come back" in swarm.conductor.waiting_for
    swarm.pass_time(5)
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
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=3), 4)
    swarm.run_until(lambda: swarm.conductor.state.step == 5 and 3 in swarm.snapshots.complete)
    before = dict(swarm.conductor.state.records)
    for node in swarm.at(1):
        node.kill()
    swarm.settle()
    swarm.pass_time(9)
    assert swarm.conductor.state.step == 5
    assert "has no node that holds step 5" in swarm.conductor.waiting_for
    swarm.run_until(lambda: "rolled_back" in kinds(swarm))
    assert swarm.conductor.state.step == 3
    assert swarm.conductor.state.highest_step == 5
    swarm.finish()
    after = swarm.conductor.state.records
    assert {step: after[step] for step in before} == before
    assert len(swarm.conductor.state.records) == 6
    assert_undisturbed(swarm)


def test_without_a_snapshot_a_run_goes_back_to_the_beginning() -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50), 4)
    swarm.run_to_step(3)
    for node in swarm.at(0):
        node.kill()
    swarm.run_until(lambda: "rolled_back" in kinds(swarm))
    assert "goes back to the beginning" in lines(swarm)
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_lost_stage_that_nobody_can_take_waits_without_rolling_back() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
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
    swarm.pass_time(5)
    assert {n.peer_id: n.incarnation for n in swarm.at(0)} == others


def test_a_recomputed_step_with_other_bits_fails_the_run() -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=50, replicas=1), 2)
    swarm.run_to_step(3)
    swarm.at(1)[0].kill()
    swarm.join().corrupt_weights = 1
    with pytest.raises(AssertionError, match="recomputed with other weights"):
        swarm.finish()
    assert all(node.done for node in swarm.nodes.values())


def test_a_recomputed_step_with_other_sums_fails_the_run() -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=50, replicas=1), 2)
    swarm.run_to_step(3)
    swarm.at(1)[0].kill()
    swarm.join().corrupt_sums = 1
    with pytest.raises(AssertionError, match="recomputed with other sums than recorded"):
        swarm.finish()
    assert swarm.conductor.state.step == 0


# ---- joining -----------------------------------------------------------------------------


def test_a_joiner_copies_its_stage_and_takes_part_from_the_next_step() -> None:
    swarm = FakeSwarm(make_run(replicas=1, steps=6), 2)
    swarm.run_until(in_step(swarm))
    joiner = swarm.join()
    swarm.finish()
    records = swarm.conductor.state.records
    counted = {who for r in records.values() for part in r.contributions for who in part}
    assert swarm.conductor.gone[joiner.peer_id].last_incarnation in counted
    assert_undisturbed(swarm)


def slow_joiner(swarm: FakeSwarm) -> FakeNode:
    """It was given a stage at step 1, and the run went on to step 3 before it was ready."""
    swarm.run_until(in_step(swarm))
    joiner = swarm.join()
    swarm.run_until(lambda: joiner.copying is not None or joiner.frozen)
    joiner.frozen = True
    session = swarm.conductor.sessions[joiner.peer_id]
    while swarm.conductor.state.step < 4:
        swarm.settle(lambda: swarm.conductor.state.step >= 4)
        session.last_heard_s = swarm.now_s
        swarm.tick()
    return joiner


def test_a_joiner_that_is_too_slow_holds_up_nobody_and_copies_again() -> None:
    swarm = FakeSwarm(make_run(replicas=1, steps=8), 2)
    joiner = slow_joiner(swarm)
    first = swarm.conductor.sessions[joiner.peer_id].incarnation
    joiner.frozen = False
    swarm.run_until(lambda: joiner.step >= 6)
    assert joiner.incarnation > first
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_copy_that_is_not_the_runs_weights_is_fetched_from_elsewhere() -> None:
    swarm = FakeSwarm(make_run(steps=12), 4)
    swarm.run_until(in_step(swarm))
    for stage in (0, 1):
        swarm.at(stage)[0].corrupt_copy = 5
    joiners = [swarm.join(), swarm.join()]
    swarm.run_until(lambda: all(j.step > 2 for j in joiners))
    assert "the run's are" in lines(swarm)
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_node_that_never_gets_a_right_copy_is_let_go() -> None:
    swarm = FakeSwarm(make_run(replicas=1, steps=12, snapshot_every=50), 2)
    swarm.run_until(in_step(swarm))
    for node in swarm.nodes.values():
        node.corrupt_copy = 5
    joiner = swarm.join()
    swarm.finish()
    assert joiner.done is not None
    assert "failed 3 times" in joiner.done
    assert_undisturbed(swarm)


def test_a_joiner_whose_donor_dies_is_not_blamed() -> None:
    swarm = FakeSwarm(make_run(steps=12), 5)
    swarm.run_until(in_step(swarm))
    joiner = swarm.join()
    swarm.run_until(lambda: joiner.copying is not None)
    assert joiner.copying is not None
    assign, _ = joiner.copying
    joiner.copying = assign, None  # the stream breaks with the donor
    donor = swarm.by_incarnation(assign.donor.incarnation)
    assert donor is not None
    donor.kill()
    swarm.run_until(lambda: joiner.step >= 0)
    assert swarm.conductor.sessions[joiner.peer_id].failures == 0
    swarm.finish()
    assert_undisturbed(swarm)


def test_five_quick_rejoins_of_one_node_leave_one_session() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    old = []
    for _ in range(5):
        old.append(node.session)
        node.detach()
        node.attach()
        assert len(swarm.conductor.sessions) == 4
    for session in old:
        assert session is not None
        swarm.conductor.detach(session)
    assert swarm.conductor.sessions[node.peer_id] is node.session
    assert node.peer_id not in swarm.conductor.gone
    swarm.finish()
    assert_undisturbed(swarm)


# ---- leaving -----------------------------------------------------------------------------


def say_farewell(node: FakeNode) -> None:
    node.say(farewell=pb.Farewell(reason="bedtime"))


def test_a_node_that_says_farewell_leaves_after_its_step() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    say_farewell(node)
    swarm.run_until(lambda: node.done is not None)
    assert node.done == "bedtime"
    assert node.step == swarm.conductor.state.records[2].step
    swarm.finish()
    assert "redone" not in kinds(swarm)
    assert "rerouted" not in lines(swarm)
    assert_undisturbed(swarm)


def test_the_last_holder_of_a_stage_leaves_once_a_snapshot_is_stored() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
    swarm.run_until(in_step(swarm))
    node = swarm.at(1)[0]
    say_farewell(node)
    swarm.run_until(lambda: node.done is not None)
    assert swarm.conductor.state.snapshot_step == swarm.conductor.state.step == 2
    assert "stage 1" in swarm.conductor.waiting_for
    swarm.pass_time(20)
    swarm.join()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_the_last_holder_of_a_stage_hands_over_to_a_spare_replica() -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=50), 4)
    swarm.run_until(in_step(swarm))
    first, second = swarm.at(1)
    first.kill()
    swarm.run_until(in_step(swarm, 3))
    say_farewell(second)
    swarm.run_until(lambda: second.done is not None)
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


@pytest.mark.parametrize("when", ["attached", "copying"])
def test_a_node_that_leaves_before_it_holds_anything_goes_at_once(when: str) -> None:
    swarm = FakeSwarm(make_run(replicas=1, steps=8), 2)
    swarm.run_until(in_step(swarm))
    joiner = swarm.join()
    if when == "copying":
        swarm.run_until(lambda: joiner.copying is not None)
    else:
        assert swarm.conductor.sessions[joiner.peer_id].state == "attached"
    say_farewell(joiner)
    joiner.report()
    assert joiner.peer_id not in swarm.conductor.sessions
    swarm.finish()
    assert_undisturbed(swarm)


def test_the_operator_can_send_a_node_away() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    assert swarm.conductor.dismiss(node.peer_id)
    assert not swarm.conductor.dismiss(PeerId("nobody"))
    swarm.finish()
    assert node.done == "the operator asked it to leave"
    assert_undisturbed(swarm)


# ---- the operator ------------------------------------------------------------------------


def test_a_pause_lets_the_step_finish_and_resume_goes_on() -> None:
    swarm = FakeSwarm(make_run(steps=6), 4)
    swarm.run_until(in_step(swarm))
    swarm.conductor.pause()
    swarm.settle()
    assert swarm.conductor.state.step == 2
    assert swarm.conductor.waiting_for.startswith("paused by the operator; resume it")
    swarm.conductor.resume()
    swarm.finish()
    assert_undisturbed(swarm)


@pytest.mark.parametrize("paused", [True, False])
def test_resuming_throws_no_work_away(paused: bool) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    if paused:
        swarm.conductor.pause()
    swarm.conductor.resume()
    assert swarm.conductor.phase is Phase.STEP
    swarm.finish()
    assert "redone" not in kinds(swarm)


def test_a_stopped_run_keeps_a_snapshot_and_goes_on_when_launched_again() -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=50), 4)
    swarm.run_until(in_step(swarm, 3))
    swarm.conductor.stop()
    swarm.run_until(lambda: swarm.conductor.ended)
    assert swarm.conductor.state.step == 3
    assert swarm.conductor.waiting_for == "stopped after step 3 of 6; launch it again to go on"
    assert list(swarm.snapshots.complete) == [3]
    swarm.settle()
    assert all(node.done for node in swarm.nodes.values())

    before = swarm.conductor.state
    swarm.nodes.clear()
    swarm.restart(lose_soft=False)
    assert swarm.conductor.state == before
    for _ in range(4):
        swarm.join()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_run_without_a_stage_stops_without_a_snapshot() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
    swarm.run_to_step(2)
    swarm.at(1)[0].kill()
    swarm.conductor.stop()
    swarm.run_until(lambda: swarm.conductor.ended, within_s=0)
    assert "rolled_back" not in kinds(swarm)


@pytest.mark.parametrize("paused", [True, False])
def test_a_snapshot_asked_for_is_stored_between_steps(paused: bool) -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=50), 4)
    swarm.run_until(in_step(swarm, 2))
    if paused:
        swarm.conductor.pause()
        swarm.settle()
    swarm.conductor.take_snapshot()
    swarm.run_until(lambda: swarm.conductor.state.snapshot_step == 2)
    swarm.conductor.resume()
    swarm.finish()


def test_a_snapshot_whose_sender_is_lost_is_asked_for_again() -> None:
    swarm = FakeSwarm(make_run(steps=6, snapshot_every=50), 4)
    swarm.run_until(in_step(swarm, 2))
    swarm.conductor.take_snapshot()
    swarm.run_until(lambda: any(n.uploads for n in swarm.nodes.values()))
    next(n for n in swarm.nodes.values() if n.uploads).kill()
    swarm.run_until(lambda: swarm.conductor.state.snapshot_step > 0)
    assert swarm.conductor.state.snapshot_step < 6


def test_a_finished_run_stays_as_it_is() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.finish()
    conductor, events = swarm.conductor, len(swarm.disk)
    for action in (conductor.pause, conductor.resume, conductor.stop, conductor.take_snapshot):
        action()
    late = swarm.join()
    swarm.settle()
    swarm.pass_time(30)
    assert late.done == "the run is over"
    assert not conductor.sessions
    assert len(swarm.disk) == events
    assert conductor.state.paused is None


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
        assert after == before
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


@pytest.mark.parametrize("spare_bytes", range(0, 6000, 400))
def test_a_full_disk_announces_nothing_that_is_not_in_the_log(spare_bytes: int) -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50), 4)
    swarm.run_until(in_step(swarm))
    used = sum(len(record.payload) for record in swarm.disk)
    swarm.store.capacity_bytes = used + spare_bytes
    swarm.run_until(lambda: swarm.conductor.ended)
    if not swarm.conductor.failed:
        return
    assert "full" in swarm.conductor.waiting_for
    on_disk = Conductor(swarm.run, type(swarm.store)(swarm.disk), swarm.snapshots)
    for node in swarm.nodes.values():
        assert node.step <= on_disk.state.step
        assert node.done is None
        for command in node.commands_seen:
            if command.HasField("commit"):
                assert command.commit.step in on_disk.state.records
            if command.HasField("assign"):
                assert command.assign.incarnation <= on_disk.state.last_incarnation
    swarm.settle()
    swarm.tick()
    assert not swarm.conductor.sessions
    swarm.restart()  # once there is space again
    swarm.pass_time(2)
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_disk_that_is_full_when_a_node_is_lost_fails_the_run_and_raises_nothing() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    swarm.store.capacity_bytes = 1
    silent = swarm.at(0)[0]
    silent.frozen = True
    swarm.pass_time(15)
    assert "can't write" in swarm.conductor.failed


def test_a_node_that_joins_when_the_disk_is_full_is_told_to_come_again() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    swarm.store.capacity_bytes = 1
    node = swarm.at(0)[0]
    with pytest.raises(StorageError, match="can't write"):
        swarm.conductor.attach(node.peer_id, pb.Hello(protocol_version=PROTOCOL_VERSION))


def test_a_soft_event_that_can_not_be_written_fails_the_run_at_the_next_tick() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(lambda: bool(swarm.conductor.state.weights_digests))
    swarm.store.append("step_applied", {}, durable=False)
    swarm.store.capacity_bytes = 1
    swarm.conductor.flush()
    assert not swarm.conductor.failed
    swarm.conductor.tick()
    assert "can't write" in swarm.conductor.failed


# ---- nodes that misbehave ----------------------------------------------------------------


def stale_events(node: FakeNode, swarm: FakeSwarm) -> list[pb.NodeEvent]:
    state, incarnation = swarm.conductor.state, node.incarnation
    step, attempt = state.step + 1, state.attempt
    return [
        pb.NodeEvent(receipt=pb.Receipt(incarnation=incarnation, step=step, attempt=attempt)),
        pb.NodeEvent(
            prepared=pb.Prepared(incarnation=incarnation, step=step, attempt=attempt, round=1)
        ),
        pb.NodeEvent(applied=pb.Applied(incarnation=incarnation, step=state.step)),
        pb.NodeEvent(ready=pb.Ready(incarnation=incarnation, step=state.step)),
        pb.NodeEvent(trouble=pb.Trouble(kind=pb.TROUBLE_KIND_OWN_FAILURE, incarnation=incarnation)),
    ]


def test_what_a_fenced_incarnation_still_says_changes_nothing() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    zombie = swarm.at(0)[0]
    late = stale_events(zombie, swarm)
    zombie.detach()
    zombie.attach()  # it is another incarnation now
    ledger = swarm.conductor.ledger
    assert ledger is not None
    assert zombie.session is not None
    before = dict(ledger.receipts), swarm.conductor.state
    for event in late:
        swarm.conductor.receive(zombie.session, event)
    assert (dict(ledger.receipts), swarm.conductor.state) == before
    assert swarm.conductor.marks[zombie.peer_id] == 0
    assert swarm.conductor.sessions[zombie.peer_id].failures == 0
    swarm.finish()
    assert_undisturbed(swarm)


def test_answers_to_another_attempt_do_not_count() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    ledger = swarm.conductor.ledger
    assert ledger is not None
    node = swarm.at(0)[0]
    assert node.session is not None
    before = dict(ledger.receipts)
    for m in range(4):
        receipt = pb.Receipt(incarnation=node.incarnation, step=2, attempt=9, microbatch=m)
        swarm.conductor.receive(node.session, pb.NodeEvent(receipt=receipt))
    assert ledger.receipts == before


@pytest.mark.parametrize(
    "receipt",
    [
        pb.Receipt(microbatch=4_000_000, stage=0),
        pb.Receipt(microbatch=0, stage=7),
        pb.Receipt(microbatch=0, stage=1),
    ],
)
def test_impossible_receipts_are_refused_and_marked(receipt: pb.Receipt) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    assert node.session is not None
    receipt.incarnation, receipt.step, receipt.attempt = node.incarnation, 2, 1
    swarm.conductor.receive(node.session, pb.NodeEvent(receipt=receipt))
    assert swarm.conductor.marks[node.peer_id] == 1
    assert kinds(swarm)[-1] == "refused"
    swarm.finish()
    assert_undisturbed(swarm)


def test_who_computes_a_microbatch_again_with_other_bits_is_named() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    honest, other = swarm.at(1)
    other.corrupt_bits = 1
    ledger = swarm.conductor.ledger
    assert ledger is not None
    swarm.run_until(
        lambda: any(r.incarnation == honest.incarnation for r in ledger.receipts.values())
    )
    honest.kill()
    swarm.finish()
    assert "with other bits than" in lines(swarm)


def test_a_node_that_was_slow_for_a_while_gets_work_again() -> None:
    swarm = FakeSwarm(make_run(steps=30), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    node.busy_s = 10.0
    swarm.run_to_step(8)
    who, records = Incarnation(node.incarnation), swarm.conductor.state.records
    assert records[8].contributions[0][who] == ()
    node.busy_s = 0.1
    swarm.finish()
    done = [len(r.contributions[0][who]) for r in swarm.conductor.state.records.values()]
    assert all(done[-5:])


def test_a_negative_norm_is_refused() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    assert node.session is not None
    prepared = pb.Prepared(
        incarnation=node.incarnation, step=2, attempt=1, round=1, squared_norms=[-1.0]
    )
    swarm.conductor.receive(node.session, pb.NodeEvent(prepared=prepared))
    assert "negative" in lines(swarm)
    swarm.finish()
    assert_undisturbed(swarm)


def test_an_event_without_content_is_refused() -> None:
    swarm = FakeSwarm(make_run(), 4)
    node = swarm.at(0)[0]
    assert node.session is not None
    swarm.conductor.receive(node.session, pb.NodeEvent())
    assert swarm.conductor.marks[node.peer_id] == 1


def test_complaints_about_strangers_are_not_kept() -> None:
    swarm = FakeSwarm(make_run(), 4)
    node = swarm.at(0)[0]
    for number in range(10):
        trouble = pb.Trouble(kind=pb.TROUBLE_KIND_BAD_PEER, peer_id=f"made-up-{number}")
        node.say(trouble=trouble)
    swarm.run_until(lambda: not node.events)
    assert not swarm.conductor.marks


def test_a_replica_with_other_sums_is_outvoted_by_two() -> None:
    swarm = FakeSwarm(make_run(replicas=3), 6)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.corrupt_sums = 3
    swarm.finish()
    assert swarm.conductor.marks[liar.peer_id] > 0
    assert_undisturbed(swarm)


def test_one_disagreement_of_two_replicas_redoes_the_step() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.corrupt_sums = 3
    swarm.run_until(lambda: "redone" in kinds(swarm))
    liar.corrupt_sums = 0
    swarm.finish()
    assert_undisturbed(swarm)


def test_two_replicas_that_keep_disagreeing_pause_the_run() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.corrupt_sums = 3
    swarm.run_until(lambda: swarm.conductor.state.paused is not None)
    assert "replicas of stage 1 hold different sums of step 2" in swarm.conductor.waiting_for
    swarm.conductor.dismiss(liar.peer_id)
    swarm.conductor.resume()
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_replica_with_other_weights_is_taken_out_and_copies_them() -> None:
    swarm = FakeSwarm(make_run(replicas=3), 6)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.corrupt_weights = 3
    swarm.run_until(lambda: "fenced" in kinds(swarm))
    liar.corrupt_weights = 0
    swarm.finish()
    assert swarm.conductor.marks[liar.peer_id] == 1
    assert_undisturbed(swarm)


# ---- links -------------------------------------------------------------------------------


def complain(swarm: FakeSwarm, reporter: FakeNode, peer: FakeNode, seconds: float) -> None:
    for _ in range(round(seconds)):
        if not reporter.incarnation or not peer.incarnation:
            return
        reporter.trouble(
            pb.TROUBLE_KIND_PEER_UNREACHABLE, "timeout", peer_incarnation=peer.incarnation
        )
        while reporter.events:
            reporter.report()
        swarm.pass_time(1)


def hold(swarm: FakeSwarm) -> None:
    """A step that is open and doesn't move."""
    swarm.run_until(in_step(swarm))
    for node in swarm.nodes.values():
        node.mute = True


def test_a_peer_that_stays_unreachable_is_taken_out_and_may_come_back() -> None:
    swarm = FakeSwarm(make_run(), 4)
    hold(swarm)
    reporter, peer = swarm.at(0)[0], swarm.at(1)[0]
    before = peer.incarnation
    complain(swarm, reporter, peer, 4)
    assert swarm.conductor.sessions[peer.peer_id].incarnation == before
    complain(swarm, reporter, peer, 3)
    assert swarm.conductor.sessions[peer.peer_id].incarnation != before
    assert "unreachable" in kinds(swarm)
    for node in swarm.nodes.values():
        node.mute = False
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_node_that_reaches_nobody_is_the_one_that_is_taken_out() -> None:
    swarm = FakeSwarm(make_run(replicas=3), 6)
    hold(swarm)
    reporter = swarm.at(0)[0]
    peers = [n.incarnation for n in swarm.at(1)]
    for peer in swarm.at(1)[:2] * 7:
        complain(swarm, reporter, peer, 1)
    assert [n.incarnation for n in swarm.at(1)] == peers
    assert swarm.conductor.sessions[reporter.peer_id].incarnation == 0


def test_the_only_holder_of_a_stage_is_not_taken_out_for_a_broken_link() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
    hold(swarm)
    complain(swarm, swarm.at(0)[0], swarm.at(1)[0], 14)
    assert "unreachable" not in kinds(swarm)
    assert "step 2 waits for" in swarm.conductor.waiting_for


# ---- failures and numbers ----------------------------------------------------------------


def test_a_node_that_fails_three_times_is_let_go() -> None:
    swarm = FakeSwarm(make_run(steps=20), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    for _ in range(3):
        swarm.run_until(
            lambda: (
                node.current is not None
                and node.incarnation == swarm.conductor.sessions[node.peer_id].incarnation
            )
        )
        node.trouble(pb.TROUBLE_KIND_OWN_FAILURE, "out of memory")
        while node.events:
            node.report()
    swarm.run_until(lambda: node.done is not None)
    assert node.done is not None
    assert "failed 3 times: FakeError: out of memory" in node.done
    swarm.finish()
    assert_undisturbed(swarm)


def test_the_only_holder_of_a_stage_that_fails_in_a_step_keeps_its_state() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
    swarm.run_until(in_step(swarm))
    swarm.at(1)[0].trouble(pb.TROUBLE_KIND_OWN_FAILURE, "a failed kernel")
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def numbers(node: FakeNode) -> None:
    node.trouble(pb.TROUBLE_KIND_NUMBERS, "a gradient is NaN")
    while node.events:
        node.report()


def test_numbers_that_only_one_node_finds_bad_are_computed_elsewhere() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    numbers(node)
    assert swarm.conductor.state.paused is None
    swarm.finish()
    assert swarm.conductor.marks[node.peer_id] == 1
    assert_undisturbed(swarm)


@pytest.mark.parametrize("replicas", [1, 2])
def test_numbers_that_are_bad_again_pause_the_run_as_diverged(replicas: int) -> None:
    swarm = FakeSwarm(make_run(replicas=replicas, snapshot_every=50), 2 * replicas)
    swarm.run_until(in_step(swarm))
    numbers(swarm.at(0)[0])
    swarm.run_until(in_step(swarm))
    numbers(swarm.at(0)[0])
    assert swarm.conductor.state.step == 1
    swarm.settle()
    assert "the run diverged in step 2" in swarm.conductor.waiting_for
    swarm.conductor.resume()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_a_number_is_never_recorded(loss: float) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    ledger = swarm.conductor.ledger
    assert ledger is not None
    microbatch = next(m for m, stage in ledger.missing() if stage == 1)
    node = swarm.by_incarnation(ledger.holder(microbatch, Stage(1)))
    assert node is not None
    assert node.session is not None
    receipt = pb.Receipt(
        incarnation=node.incarnation, step=2, attempt=1, microbatch=microbatch, stage=1,
        loss_sum=loss, has_loss=True,
    )  # fmt: skip
    swarm.conductor.receive(node.session, pb.NodeEvent(receipt=receipt))
    swarm.finish()
    assert swarm.conductor.marks[node.peer_id] == 1
    assert all(math.isfinite(r.loss) for r in swarm.conductor.state.records.values())
    assert_undisturbed(swarm)
