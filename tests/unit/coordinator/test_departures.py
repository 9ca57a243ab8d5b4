# SPDX-License-Identifier: Apache-2.0
"""Nodes that leave in the midst of a step: nothing that they computed is lost while there is time,
and nobody waits for them when there is none."""

import pytest

from shoal.coordinator.step_runner import Phase

from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, lines


def with_sums(swarm: FakeSwarm, stage: int = 0, step: int = 2) -> FakeNode:
    """A node that has some of its microbatches in its sums and others not."""
    swarm.run_until(in_step(swarm, step))

    def halfway() -> list[FakeNode]:
        return [
            n
            for n in swarm.at(stage)
            if n.current and 0 < len(n.current.gradients) < len(n.current.work.leased)
        ]

    swarm.run_until(lambda: bool(halfway()))
    return halfway()[0]


def test_what_a_leaver_has_summed_counts_and_the_rest_is_done_by_others() -> None:
    swarm = FakeSwarm(make_run(microbatches=8), 4)
    node = with_sums(swarm)
    assert node.current is not None
    done, who = set(node.current.gradients), node.incarnation
    node.leave(grace_s=30.0)
    swarm.run_until(lambda: node.done is not None)
    record = swarm.conductor.state.records[2]
    assert set(record.contributions[0][who]) == done
    assert "redone" not in kinds(swarm)
    assert swarm.now_s < node.left_s + 5.0
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_leaver_with_nothing_summed_is_gone_before_the_step_ends() -> None:
    swarm = FakeSwarm(make_run(microbatches=8), 6)
    swarm.run_until(lambda: swarm.conductor.phase is Phase.STEP)
    node = swarm.at(0)[0]
    swarm.run_until(lambda: node.current is not None)
    node.leave(grace_s=30.0)
    swarm.run_until(lambda: node.done is not None)
    assert swarm.conductor.state.step == 0
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_step_longer_than_the_grace_is_not_waited_for() -> None:
    swarm = FakeSwarm(make_run(microbatches=12), 4)
    node = with_sums(swarm)
    for other in swarm.at(1):
        other.mute = True
        assert other.session is not None
        other.session.pace.extend([60.0] * 8)  # known to be slow
    left_s = swarm.now_s
    node.leave(grace_s=8.0)
    swarm.run_until(lambda: node.done is not None)
    assert node.left_s - left_s < 8.0
    assert node.done is not None
    assert "others compute its share again" in node.done
    assert swarm.conductor.phase is Phase.STEP, "the step goes on without it"
    for other in swarm.nodes.values():
        other.mute = False
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_stages_last_node_gives_its_state_away_before_it_finishes_a_long_step() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
    node = with_sums(swarm, stage=1)
    swarm.at(0)[0].mute = True
    node.leave(grace_s=8.0)
    left_s = swarm.now_s
    swarm.run_until(lambda: node.done is not None)
    assert node.left_s - left_s < 8.0
    assert swarm.conductor.state.snapshot_step == 1, "the state at the last commit is stored"
    assert "leaves before it would be done" in lines(swarm)
    swarm.at(0)[0].mute = False
    swarm.join()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_stages_last_node_hands_its_state_to_a_node_that_waits() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50, steps=6), 2)
    node = with_sums(swarm, stage=1)
    spare = swarm.join()
    node.leave(grace_s=30.0)
    swarm.run_until(lambda: node.done is not None)
    swarm.run_until(lambda: spare.stage == 1 and spare.step >= 3)
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


@pytest.mark.parametrize("grace_s", [0.0, 6.0, 30.0])
def test_both_nodes_of_a_stage_may_leave_at_once(grace_s: float) -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50), 4)
    with_sums(swarm)
    leavers = swarm.at(0)
    for node in leavers:
        node.leave(grace_s)
    swarm.run_until(lambda: all(node.done is not None for node in leavers))
    swarm.join()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm), "another node, or a snapshot, has the state"
    assert_undisturbed(swarm)


def test_the_replica_that_was_to_take_over_is_lost() -> None:
    swarm = FakeSwarm(make_run(microbatches=6), 4)
    node = with_sums(swarm)
    other = next(n for n in swarm.at(0) if n is not node)
    node.leave(grace_s=60.0)
    while node.events:
        node.report()
    other.kill()
    swarm.run_until(lambda: node.done is not None)
    assert node.step == 2, "it went on alone"
    assert "redone" not in kinds(swarm)
    swarm.join()
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_node_that_leaves_before_the_step_opens_begins_nothing_in_it() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    swarm.run_until(lambda: swarm.conductor.phase is Phase.STEP and swarm.conductor.state.step == 2)
    assert node.current is None or node.current.step == 2
    node.leave(grace_s=30.0)  # it has yet to hear of step 3
    swarm.run_until(lambda: node.done is not None)
    swarm.finish()
    counted = swarm.conductor.state.records[3].contributions[0]
    assert swarm.conductor.gone[node.peer_id].last_incarnation not in counted
    assert_undisturbed(swarm)


def test_a_leaver_that_meets_a_new_coordinator_says_so_again() -> None:
    swarm = FakeSwarm(make_run(), 4)
    node = with_sums(swarm)
    node.leave(grace_s=30.0)
    swarm.restart()
    swarm.run_until(lambda: node.done is not None)
    swarm.finish()
    assert_undisturbed(swarm)
