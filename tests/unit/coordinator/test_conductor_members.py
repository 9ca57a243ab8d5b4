# SPDX-License-Identifier: Apache-2.0
"""Nodes that join, join again and leave."""

import pytest

from shoal.protocol.ids import PeerId

from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, lines, say_farewell

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


def test_a_copy_that_is_not_the_runs_weights_is_fetched_from_elsewhere() -> None:
    swarm = FakeSwarm(make_run(steps=12), 4)
    swarm.run_until(in_step(swarm))
    for stage in (0, 1):
        swarm.at(stage)[0].corrupt_copy = 5
    joiners = [swarm.join(), swarm.join()]
    swarm.run_until(lambda: all(j.step > 2 for j in joiners))
    assert "'s data: FakeError" in lines(swarm)
    assert all(swarm.conductor.sessions[j.peer_id].failures == 0 for j in joiners)
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
    donors = [swarm.by_incarnation(m.incarnation) for m in joiner.copying.donors.members]
    assert len(donors) == 2
    for donor in donors:
        assert donor is not None
        donor.pins = {}  # nobody is left to copy from
    assert donors[0] is not None
    donors[0].kill()
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


def test_a_node_that_says_farewell_leaves_after_its_step() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    swarm.run_until(lambda: node.current is not None and len(node.current.gradients) > 0)
    say_farewell(node)
    swarm.run_until(lambda: node.done is not None)
    assert node.done == "bedtime"
    assert node.step == swarm.conductor.state.records[2].step
    swarm.finish()
    assert "redone" not in kinds(swarm)
    assert "rerouted" not in lines(swarm)
    assert "hands over 1 microbatch to" in lines(swarm)
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
