# SPDX-License-Identifier: Apache-2.0
"""What people see of a run: honest counts, honest states."""

import pytest

from shoal.coordinator.dashboard.views import NodeView, RunView, public
from shoal.coordinator.history import InMemoryHistory
from shoal.coordinator.run_view import ConductorView, audit, stage_parts, steps_lost, tokens_per_s
from shoal.coordinator.state import RunState
from shoal.coordinator.step_runner import Phase
from shoal.coordinator.step_scale import COARSEN_BITS
from shoal.coordinator.store import StoredEvent
from shoal.protocol.errors import StorageError
from shoal.protocol.ids import PeerId

from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import in_step, say_farewell
from .test_conductor_numbers import OVERFLOW, Hard, spoil_by
from .test_state import committed


def look(swarm: FakeSwarm) -> RunView:
    return ConductorView(swarm.conductor, lambda: "link").view()


def seen(swarm: FakeSwarm, node: FakeNode) -> NodeView:
    (view,) = (n for n in look(swarm).nodes if n.peer_id == node.peer_id)
    return view


def test_a_finished_run_shows_all_its_steps_and_nothing_lost() -> None:
    swarm = FakeSwarm(make_run(steps=5), 4)
    swarm.finish()
    view = look(swarm)
    assert (view.state, view.step, view.total_steps) == ("finished", 5, 5)
    assert [point.step for point in view.history] == [1, 2, 3, 4, 5]
    assert (view.steps_lost, view.microbatches_missing, view.microbatches_double) == (0, 0, 0)
    assert sum(n.contributed_microbatches for n in view.nodes) == 5 * 4 * 2
    assert sum(n.contributed_share for n in view.nodes) == pytest.approx(1)
    assert view.weights_digest == swarm.conductor.state.weights_sha256
    assert view.join_link is None
    assert {n.state for n in view.nodes} == {"left"}


def test_the_states_of_a_run_in_their_order() -> None:
    swarm = FakeSwarm(make_run(steps=6), 3)
    swarm.settle()
    assert look(swarm).state == "waiting"
    swarm.join()
    swarm.run_until(in_step(swarm))
    assert look(swarm).state == "training"
    swarm.conductor.pause()
    assert look(swarm).state == "training"  # until the step is over
    swarm.settle()
    assert look(swarm).state == "paused"
    swarm.conductor.resume()
    swarm.conductor.stop()
    swarm.run_until(lambda: swarm.conductor.stopping)
    assert look(swarm).state == "draining"
    swarm.run_until(lambda: swarm.conductor.ended)
    view = look(swarm)
    assert view.state == "paused"  # "finished" would say that all steps are done
    assert "launch it again" in view.waiting_for


def test_a_failed_run_says_so() -> None:
    swarm = FakeSwarm(make_run(), 4)

    def damaged(records: list[StoredEvent]) -> None:
        raise StorageError("the log is damaged.")

    swarm.store._write = damaged  # type: ignore[method-assign]
    swarm.settle()
    swarm.run_until(lambda: swarm.conductor.ended)
    assert look(swarm).state == "failed"
    assert "damaged" in look(swarm).waiting_for


def test_a_run_that_has_ended_has_no_clock_any_more() -> None:
    swarm = FakeSwarm(make_run(), 4)
    view = ConductorView(swarm.conductor, lambda: "link")
    swarm.finish()
    ended_s = view.view().now_s
    swarm.pass_time(100)
    assert view.view().now_s == ended_s


def test_a_lost_node_is_fenced_one_that_took_its_leave_has_left() -> None:
    swarm = FakeSwarm(make_run(steps=8), 4)
    swarm.run_until(in_step(swarm))
    lost, leaver = swarm.at(0)[0], swarm.at(1)[0]
    before = {n.peer_id: (n.incarnation, n.stage) for n in look(swarm).nodes}
    lost.kill()
    say_farewell(leaver)
    swarm.run_until(lambda: leaver.done is not None)
    for node, state in ((lost, "fenced"), (leaver, "left")):
        view = seen(swarm, node)
        assert view.state == state
        assert (view.incarnation, view.stage) == before[node.peer_id]
        assert view.contributed_microbatches > 0
    assert sorted(n.peer_id for s in look(swarm).stages for n in s.nodes) == sorted(
        set(swarm.nodes) - {lost.peer_id, leaver.peer_id}
    )


def test_a_node_the_operator_sent_away_has_left() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    swarm.conductor.dismiss(node.peer_id)
    assert seen(swarm, node).state == "left"


def test_a_nodes_states_from_joining_to_training() -> None:
    swarm = FakeSwarm(make_run(min_nodes=3), 2)
    joiner = swarm.join()
    assert seen(swarm, joiner).state == "copying"
    swarm.run_until(lambda: swarm.conductor.sessions[joiner.peer_id].state == "ready")
    assert seen(swarm, joiner).state in ("ready", "training")
    swarm.run_until(lambda: swarm.conductor.phase is Phase.STEP)
    assert seen(swarm, joiner).state == "training"
    late = swarm.join()
    assert seen(swarm, late).state == "joining"


def test_five_quick_rejoins_are_one_node_whose_counts_add_up() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_to_step(2)
    node = swarm.at(0)[0]
    for _ in range(5):
        node.detach()
        node.attach()
        assert len(look(swarm).nodes) == 4
    swarm.finish()
    view = look(swarm)
    assert len(view.nodes) == 4
    assert sum(n.contributed_microbatches for n in view.nodes) == 4 * 4 * 2
    assert (view.microbatches_missing, view.microbatches_double) == (0, 0)


def test_recomputed_steps_are_counted_once() -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50, boundary_log_mb=0), 4)
    swarm.run_to_step(3)
    for node in swarm.at(1):
        node.kill()
    swarm.finish()
    view = look(swarm)
    assert (view.rollbacks, view.replays) == (1, 0)
    assert any(event.kind == "rolled_back" for event in view.events)
    assert sum(n.contributed_microbatches for n in view.nodes) == 4 * 4 * 2
    assert view.receipts_taken >= 3 * 4 * 2 + 4 * 4 * 2  # three steps twice, and the fourth
    assert len(view.history) == 4


def test_replays_and_logs_are_shown() -> None:
    swarm = FakeSwarm(make_run(steps=8, snapshot_every=50, replicas=1), 2)
    swarm.run_to_step(4)
    swarm.pass_time(1)
    view = look(swarm)
    assert view.log_bytes == sum(node.log_bytes for node in view.nodes) > 0
    swarm.at(1)[0].kill()
    swarm.join()
    swarm.finish()
    view = look(swarm)
    assert (view.rollbacks, view.replays) == (0, 1)
    assert view.replay_bytes > 0


def test_bytes_are_shown_by_boundary_and_kind_as_the_nodes_measured_them() -> None:
    swarm = FakeSwarm(make_run(stages=3, steps=2), 6)
    assert look(swarm).boundaries == []
    swarm.finish()
    values = 2 * swarm.conductor.run.spec.tokens_per_step * swarm.conductor.run.spec.model.dim
    assert [b.model_dump() for b in look(swarm).boundaries] == [
        {
            "from_stage": s,
            "to_stage": s + 1,
            "traffic": [
                {"kind": "forward", "encoded_bytes": 4 * 6, "bf16_bytes": values},
                {"kind": "backward", "encoded_bytes": 4 * 4, "bf16_bytes": values},
            ],
        }
        for s in range(2)
    ]


def test_a_run_of_one_stage_has_no_boundaries() -> None:
    swarm = FakeSwarm(make_run(stages=1, steps=2), 2)
    swarm.finish()
    assert look(swarm).boundaries == []


def test_a_replay_is_shown_under_way_and_afterwards() -> None:
    swarm = FakeSwarm(make_run(steps=8, snapshot_every=50, replicas=1), 2)
    swarm.run_to_step(4)
    swarm.at(1)[0].kill()
    joiner = swarm.join()
    swarm.run_until(lambda: bool(look(swarm).replaying))
    (under_way,) = look(swarm).replaying
    assert (under_way.stage, under_way.node) == (1, seen(swarm, joiner).name)
    assert (under_way.from_step, under_way.to_step) == (0, 4)
    swarm.finish()
    view = look(swarm)
    assert view.replaying == []
    (done,) = view.recoveries
    assert (done.kind, done.stage, done.from_step, done.to_step) == ("replay", 1, 0, 4)
    assert (done.at_step, done.log_bytes) == (4, view.replay_bytes)
    assert done.seconds == view.replay_seconds


def test_a_rollback_tells_from_where_to_where_and_why() -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50, boundary_log_mb=0), 4)
    swarm.run_to_step(3)
    for node in swarm.at(1):
        node.kill()
    swarm.finish()
    view = look(swarm)
    (back,) = view.recoveries
    assert (back.kind, back.stage, back.from_step, back.to_step) == ("rollback", None, 3, 0)
    assert "boundary_log_mb is 0" in back.reason
    assert back.seconds == view.rollback_seconds
    assert view.log_budget_bytes == 0


def test_a_leaving_node_shows_what_is_left_of_its_grace() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    assert seen(swarm, node).leaves_within_s is None
    node.leave(grace_s=30.0)
    swarm.run_until(lambda: seen(swarm, node).state == "leaving")
    before = seen(swarm, node).leaves_within_s
    assert before is not None
    swarm.now_s += 1.5
    assert seen(swarm, node).leaves_within_s == pytest.approx(before - 1.5)


def test_back_offs_of_numbers_are_shown_once_there_was_one() -> None:
    hard = Hard(step=2, microbatch=1, stage=0, bad=OVERFLOW, min_coarsen=COARSEN_BITS)
    swarm = FakeSwarm(make_run(steps=3), 4)
    swarm.spoil = spoil_by(hard)
    swarm.run_to_step(1)
    assert look(swarm).back_offs is None
    swarm.finish()
    back_offs = look(swarm).back_offs
    assert back_offs is not None
    assert (back_offs.count, back_offs.step, back_offs.coarser_bits) == (1, 2, COARSEN_BITS)
    assert back_offs.loss_scale == 1.0
    assert "microbatch 1" in back_offs.reason


def test_the_coordinators_address_is_shown_and_the_link_only_beside_it() -> None:
    swarm = FakeSwarm(make_run(), 4)
    link = "shoal://10.0.0.7:7600/run-1a2b?fp=00&token=secret"
    view = ConductorView(swarm.conductor, lambda: link).view()
    assert view.coordinator == "10.0.0.7:7600"
    assert "secret" not in public(view).model_dump_json()


def test_a_hole_in_the_log_is_a_lost_step() -> None:
    state = RunState(step=4, highest_step=4, records={s: committed(s) for s in (1, 2, 4)})
    assert steps_lost(state, InMemoryHistory()) == 1


def test_what_is_missing_or_double_in_a_record_is_counted() -> None:
    run = make_run()
    complete = {1: (0, 1), 2: (2, 3)}
    record = committed(1, contributions=(complete, {3: (0, 1), 4: (1, 2)}))
    assert audit(run, [record]) == (1, 1)


def test_speed_is_tokens_over_seconds() -> None:
    assert tokens_per_s([committed(1), committed(2, seconds=6.0)]) == 8.0
    assert tokens_per_s([]) == 0.0


def test_stages_are_described_in_words() -> None:
    run = make_run(stages=3)
    assert [stage_parts(run.stage(s)) for s in range(3)] == [
        ("0", "embedding + layer 0"),
        ("1", "layer 1"),
        ("2", "layer 2 + head"),
    ]


async def test_who_waits_for_a_change_hears_of_it() -> None:
    swarm = FakeSwarm(make_run())
    view = ConductorView(swarm.conductor, lambda: "link")
    before = swarm.conductor.version
    swarm.join()
    assert await view.changed(before) > before


async def test_the_operators_levers_reach_the_conductor() -> None:
    swarm = FakeSwarm(make_run(), 4)
    view = ConductorView(swarm.conductor, lambda: "link")
    swarm.run_until(in_step(swarm))
    await view.pause()
    assert swarm.conductor.state.paused is not None
    await view.resume()
    assert swarm.conductor.state.paused is None
    await view.dismiss(swarm.at(0)[0].peer_id)
    with pytest.raises(LookupError):
        await view.dismiss(PeerId("nobody"))
    await view.snapshot()
    await view.stop()
    swarm.run_until(lambda: swarm.conductor.ended)
    assert swarm.snapshots.complete
    assert await view.join_link() == "link"
