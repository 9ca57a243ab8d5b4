# SPDX-License-Identifier: Apache-2.0
"""A run from its first node to its end, and what its operator does with it."""

import pytest

from shoal.coordinator.step_runner import Phase
from shoal.protocol.errors import VersionError
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2 as pb

from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, untermed

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
    with pytest.raises(VersionError, match="install the coordinator's release"):
        swarm.conductor.greet(PeerId("old"), pb.Hello(protocol_version=999))
    assert not swarm.conductor.sessions


def test_a_stage_nobody_holds_is_named() -> None:
    swarm = FakeSwarm(make_run(min_nodes=1), 1)
    swarm.settle()
    assert "give the join link to" in swarm.conductor.waiting_for


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
    after = swarm.conductor.state
    assert after.term == before.term + 1
    assert untermed(after) == untermed(before)
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
