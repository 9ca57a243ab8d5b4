# SPDX-License-Identifier: Apache-2.0
"""A stage loses its last node: its state is replayed out of the neighbours' logs, or the run rolls
back. The result is the same either way."""

import pytest

from shoal.coordinator.recovery import RECLAIM_S
from shoal.coordinator.state import StageReplayed
from shoal.protocol.ids import Stage
from shoal.protocol.proto import coordinator_pb2 as pb

from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, lines, say_farewell


def single(*, stages: int = 2, steps: int = 8, **more: int) -> FakeSwarm:
    """One node a stage, a snapshot after step 2, then none for long; step 6 is open."""
    run = make_run(stages=stages, steps=steps, snapshot_every=99, replicas=1, **more)
    swarm = FakeSwarm(run, stages)
    swarm.run_to_step(2)
    swarm.conductor.take_snapshot()
    swarm.run_until(lambda: bool(swarm.snapshots.complete))
    swarm.run_until(in_step(swarm, 6))
    return swarm


def replayed(swarm: FakeSwarm) -> list[StageReplayed]:
    return [
        StageReplayed.model_validate(event.payload)
        for event in swarm.store.read()
        if event.kind == "stage_replayed"
    ]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_lost_stage_is_replayed_from_the_snapshot_on(stage: int) -> None:
    swarm = single(stages=3)
    base = max(swarm.snapshots.complete)
    swarm.at(stage)[0].kill()
    at = swarm.conductor.state.step
    node = swarm.join()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    [event] = replayed(swarm)
    assert (event.stage, event.peer_id, event.from_step) == (stage, node.peer_id, base)
    assert event.to_step >= at
    assert event.log_bytes > 0
    assert "out of the logs of" in lines(swarm)
    recovered = swarm.conductor.state.recovered
    assert (recovered.replays, recovered.rollbacks) == (1, 0)
    assert_undisturbed(swarm)


def test_nobody_waits_for_a_process_that_is_gone() -> None:
    swarm = single()
    swarm.at(1)[0].kill()
    swarm.join()
    before_s = swarm.now_s
    assert swarm.settle(lambda: "replayed" in kinds(swarm))
    assert swarm.now_s == before_s


def test_nobody_waits_for_a_node_that_came_back_without_the_state() -> None:
    swarm = single()
    swarm.start_again(swarm.at(1)[0])
    before_s = swarm.now_s
    assert swarm.settle(lambda: "replayed" in kinds(swarm))
    assert swarm.now_s == before_s


def test_a_holder_whose_connection_broke_has_a_moment_to_come_back() -> None:
    swarm = single()
    old = swarm.at(1)[0]
    old.frozen = True
    old.drop()
    swarm.join()
    swarm.settle()
    assert "its last holders have 3 s to come back" in swarm.conductor.waiting_for
    swarm.pass_time(RECLAIM_S - 1)
    old.frozen = False
    swarm.finish()
    assert "replay" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_holder_that_comes_back_late_ends_the_replay() -> None:
    swarm = single()
    old = swarm.at(1)[0]
    old.frozen = True
    old.drop()
    new = swarm.join()
    swarm.run_until(lambda: "replay" in kinds(swarm))
    assert "is replayed by" in swarm.conductor.waiting_for
    new.frozen = True
    old.frozen = False
    swarm.run_until(lambda: bool(swarm.conductor.sessions.get(old.peer_id)))
    swarm.settle(lambda: swarm.conductor.state.step == 6 or bool(replayed(swarm)))
    new.frozen = False
    swarm.finish()
    assert not replayed(swarm)
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_replay_says_how_far_it_is() -> None:
    swarm = single()
    swarm.at(1)[0].kill()
    new = swarm.join()
    swarm.settle(lambda: any(e.HasField("replaying") for e in new.events))
    new.report()
    swarm.tick()
    name = swarm.conductor.sessions[new.peer_id].name
    base, to_step = max(swarm.snapshots.complete), swarm.conductor.state.step
    assert swarm.conductor.waiting_for == (
        f"stage 1 is replayed by {name}: step {base + 1} of {to_step} from the logs of its "
        "neighbours"
    )


def forget(node: FakeNode) -> None:
    node.log.clear()


@pytest.mark.parametrize("how", ["no log", "hole", "damaged"])
def test_where_logs_do_not_reach_the_run_rolls_back(how: str) -> None:
    swarm = single(boundary_log_mb=0 if how == "no log" else 1)
    swarm.at(1)[0].kill()
    neighbour = swarm.at(0)[0]
    if how == "hole":
        neighbour.log.pop((swarm.conductor.state.step, 0))
    elif how == "damaged":
        neighbour.corrupt_log = 1
    swarm.join()
    swarm.finish()
    assert kinds(swarm).count("rolled_back") == 1
    assert not replayed(swarm)
    assert_undisturbed(swarm)
    assert not swarm.conductor.marks, "an honest node is not marked"


def test_a_stage_lost_with_its_neighbour_rolls_back() -> None:
    swarm = single(stages=3)
    for stage in (0, 1):
        swarm.at(stage)[0].kill()
    swarm.join()
    swarm.join()
    swarm.finish()
    assert "rolled_back" in kinds(swarm)
    assert_undisturbed(swarm)


def test_neighbours_that_were_started_again_replay_from_each_others_logs() -> None:
    swarm = single(stages=2)
    for node in (swarm.at(0)[0], swarm.at(1)[0]):
        swarm.start_again(node)
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert sorted(event.stage for event in replayed(swarm)) == [0, 1]
    assert_undisturbed(swarm)


def test_two_stages_that_are_no_neighbours_are_replayed_at_once() -> None:
    swarm = single(stages=4)
    for stage in (0, 2):
        swarm.at(stage)[0].kill()
    swarm.join()
    swarm.join()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert sorted(event.stage for event in replayed(swarm)) == [0, 2]
    assert_undisturbed(swarm)


def test_what_was_rebuilt_covers_the_loss_of_the_neighbour() -> None:
    swarm = single(stages=2)
    swarm.at(1)[0].kill()
    swarm.join()
    swarm.run_until(lambda: "replayed" in kinds(swarm))
    swarm.at(0)[0].kill()
    swarm.join()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert [event.stage for event in replayed(swarm)] == [1, 0]
    assert_undisturbed(swarm)


def test_a_node_that_dies_while_it_replays_is_replaced() -> None:
    swarm = single()
    swarm.at(1)[0].kill()
    first = swarm.join()
    swarm.settle(lambda: any(e.HasField("replaying") for e in first.events))
    first.kill()
    second = swarm.join()
    swarm.finish()
    assert [event.peer_id for event in replayed(swarm)] == [second.peer_id]
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_of_two_free_nodes_one_replays_and_the_other_copies_from_it() -> None:
    run = make_run(steps=8, snapshot_every=99, replicas=2)
    swarm = FakeSwarm(run, 4)
    swarm.run_to_step(4)
    for node in swarm.at(1):
        node.kill()
    swarm.join()
    swarm.join()
    swarm.run_until(lambda: len(swarm.at(1)) == 2)
    swarm.finish()
    assert len(replayed(swarm)) == 1
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_stage_of_one_is_replayed_from_the_data_alone() -> None:
    swarm = single(stages=1, boundary_log_mb=0)
    swarm.at(0)[0].kill()
    swarm.join()
    swarm.finish()
    assert len(replayed(swarm)) == 1
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_what_a_node_sent_is_in_its_log_though_it_died_before_the_commit() -> None:
    swarm = FakeSwarm(make_run(steps=8, snapshot_every=99, replicas=2), 4)
    swarm.run_until(in_step(swarm, 4))
    victim = swarm.at(1)[0]
    swarm.run_until(lambda: victim.prepared is not None and not victim.events)
    assert swarm.conductor.state.step == 3, "the step is committed already"
    again = swarm.start_again(victim)
    swarm.run_to_step(5)
    assert again.peer_id in swarm.conductor.state.sources.computed_by(4, Stage(1)), (
        "the round went on without it; else the test shows nothing"
    )
    for node in swarm.at(0):
        node.kill()
    swarm.join()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert [event.stage for event in replayed(swarm)] == [0]
    assert_undisturbed(swarm)


def test_a_step_that_is_opened_again_forgets_what_was_logged_of_it() -> None:
    swarm = FakeSwarm(make_run(steps=8, snapshot_every=99, replicas=2), 4)
    swarm.run_until(lambda: any((4, stage) in swarm.at(stage)[0].log for stage in (0, 1)))
    assert swarm.conductor.state.step == 3
    swarm.restart()
    swarm.run_until(in_step(swarm, 4))
    assert not any(step >= 4 for node in swarm.live for step, _ in node.log)
    swarm.finish()
    assert_undisturbed(swarm)


def test_logs_end_at_the_newest_snapshot() -> None:
    swarm = single()
    base = max(swarm.snapshots.complete)
    assert all(step > base for node in swarm.nodes.values() for step, _ in node.log)
    assert all(step > base for step in swarm.conductor.state.sources.computed)


def test_a_log_from_before_a_rollback_serves_a_replay_after_it() -> None:
    swarm = single(stages=3)
    forget(swarm.at(1)[0])
    swarm.at(2)[0].kill()
    swarm.join()
    swarm.run_until(lambda: "rolled_back" in kinds(swarm))
    swarm.run_to_step(5)
    swarm.at(0)[0].kill()
    swarm.join()
    swarm.finish()
    assert kinds(swarm).count("rolled_back") == 1
    assert len(replayed(swarm)) == 1
    assert swarm.conductor.state.recovered.rollback_seconds >= 0
    assert_undisturbed(swarm)


@pytest.mark.parametrize("moment", range(0, 60, 3))
def test_a_coordinator_that_dies_at_any_moment_of_a_replay_finishes_the_run(moment: int) -> None:
    swarm = single(stages=3)
    swarm.at(1)[0].kill()
    swarm.join()
    counter = iter(range(moment))
    swarm.settle(lambda: next(counter, None) is None)
    swarm.restart()
    swarm.finish()
    assert_undisturbed(swarm)


def test_the_last_node_of_a_stage_may_leave_while_its_neighbour_is_replayed() -> None:
    swarm = single(stages=3)
    swarm.at(1)[0].kill()
    swarm.join()
    swarm.settle(lambda: "replay" in kinds(swarm))
    say_farewell(swarm.at(0)[0])
    swarm.join()
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_replay_that_claims_to_lack_every_log_ends_in_a_rollback() -> None:
    swarm = single()
    swarm.at(1)[0].kill()
    liar = swarm.join()
    swarm.settle(lambda: "replay" in kinds(swarm))
    session = swarm.conductor.sessions[liar.peer_id]
    swarm.conductor.receive(
        session,
        pb.NodeEvent(
            trouble=pb.Trouble(
                kind=pb.TROUBLE_KIND_OWN_FAILURE, incarnation=session.incarnation,
                error="BoundaryHoleError", peer_id=swarm.at(0)[0].peer_id,
            )
        ),
    )  # fmt: skip
    swarm.finish()
    assert kinds(swarm).count("rolled_back") == 1
    assert_undisturbed(swarm)
