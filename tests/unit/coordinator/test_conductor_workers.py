# SPDX-License-Identifier: Apache-2.0
"""Joiners while the run goes on: warming up, worker, promoted, holder; and what if one is lost."""

import pytest

from shoal.coordinator import workers
from shoal.coordinator.pull_deadline import LEAST_S
from shoal.coordinator.run_view import ConductorView
from shoal.coordinator.sessions import Session
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto.types_pb2 import STATE_PART_MOMENTS, STATE_PART_WEIGHTS

from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import TICK_S, FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, lines, say_farewell


def session_of(swarm: FakeSwarm, node: FakeNode) -> Session:
    return swarm.conductor.sessions[node.peer_id]


def is_tier(swarm: FakeSwarm, node: FakeNode, tier: str) -> bool:
    session = swarm.conductor.sessions.get(node.peer_id)
    return session is not None and session.state == "ready" and session.tier == tier


def counted(swarm: FakeSwarm, incarnation: Incarnation) -> list[int]:
    """Steps in which its gradients counted."""
    records = swarm.conductor.state.records
    return [s for s, r in records.items() if any(part.get(incarnation) for part in r.contributions)]


def joined(swarm: FakeSwarm, *slow: int) -> FakeNode:
    """A node that comes while the second step is open; these parts don't reach it."""
    swarm.run_until(in_step(swarm))
    joiner = swarm.join()
    joiner.slow_parts = set(slow)
    return joiner


def worker(swarm: FakeSwarm) -> FakeNode:
    """A joiner whose moments don't arrive."""
    joiner = joined(swarm, STATE_PART_MOMENTS)
    swarm.run_until(lambda: is_tier(swarm, joiner, "worker"))
    return joiner


def run_of(steps: int, **changes: int) -> FakeSwarm:
    return FakeSwarm(make_run(steps=steps, replicas=1, **changes), 2)


# ---- the usual way -----------------------------------------------------------------------


def test_steps_are_committed_while_a_joiner_warms_up() -> None:
    swarm = run_of(30)
    joiner = joined(swarm, STATE_PART_WEIGHTS)
    swarm.run_until(lambda: swarm.conductor.state.step == 6)
    session = session_of(swarm, joiner)
    assert (session.state, swarm.conductor.waiting_for) == ("warming", "")
    joiner.slow_parts = set()
    swarm.run_until(lambda: is_tier(swarm, joiner, "holder"))
    assert counted(swarm, session.incarnation)[0] > 6
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_worker_takes_part_and_becomes_a_holder_when_its_moments_are_there() -> None:
    swarm = run_of(30)
    joiner = worker(swarm)
    swarm.run_until(lambda: swarm.conductor.state.step == 8)
    session = session_of(swarm, joiner)
    assert is_tier(swarm, joiner, "worker")
    assert len(counted(swarm, session.incarnation)) > 3
    assert len(joiner.catch_up) > 3
    view = ConductorView(swarm.conductor, lambda: "link").view()
    assert {n.tier for n in view.nodes} == {"worker", "holder"}
    joiner.slow_parts = set()
    swarm.run_until(lambda: is_tier(swarm, joiner, "holder"))
    assert joiner.moments_step is not None
    swarm.finish()
    assert joiner.weights in swarm.conductor.state.weights_digests[30]
    assert_undisturbed(swarm)


def test_a_worker_counts_among_those_that_keep_the_records_of_its_steps() -> None:
    swarm = run_of(30)
    joiner = worker(swarm)
    swarm.run_until(in_step(swarm, swarm.conductor.state.step + 2))
    assert joiner.peer_id in swarm.conductor.state.council.voters
    assert joiner.peer_id in swarm.conductor.terms.keepers()


def test_a_holder_that_joined_may_be_the_last_one() -> None:
    swarm = run_of(30, snapshot_every=50)
    joiner = joined(swarm)
    swarm.run_until(lambda: is_tier(swarm, joiner, "holder"))
    stage = session_of(swarm, joiner).stage
    assert stage is not None
    swarm.run_until(in_step(swarm, swarm.conductor.state.step + 2))
    next(n for n in swarm.at(stage) if n is not joiner).kill()
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_pause_gives_the_whole_state_at_once() -> None:
    swarm = run_of(8)
    swarm.run_until(in_step(swarm))
    swarm.conductor.pause()
    joiner = swarm.join()
    swarm.settle()
    assert is_tier(swarm, joiner, "holder")
    swarm.conductor.resume()
    swarm.finish()
    assert_undisturbed(swarm)


def test_many_joiners_share_what_their_donors_keep() -> None:
    swarm = run_of(40)
    joiners = []
    for step in range(2, 12):
        swarm.run_until(in_step(swarm, step))
        joiners.append(swarm.join())
        joiners[-1].slow_parts = {STATE_PART_WEIGHTS}
    for node in swarm.nodes.values():
        assert len(node.pins) <= 4
    for joiner in joiners:
        joiner.slow_parts = set()
    swarm.run_until(lambda: all(is_tier(swarm, j, "holder") for j in joiners))
    assert all(not node.pins for node in swarm.nodes.values())
    swarm.finish()
    assert_undisturbed(swarm)


# ---- losses ------------------------------------------------------------------------------


def test_a_worker_that_dies_costs_its_share_only() -> None:
    swarm = run_of(12)
    joiner = worker(swarm)
    swarm.run_until(in_step(swarm, swarm.conductor.state.step + 2))
    joiner.kill()
    swarm.finish()
    assert not {"rolled_back", "redone"} & set(kinds(swarm))
    assert_undisturbed(swarm)


@pytest.mark.parametrize(("log_mb", "comes_back"), [(0, "rolled_back"), (1, "replayed")])
def test_a_stage_whose_last_holder_dies_is_lost_although_a_worker_remains(
    log_mb: int, comes_back: str
) -> None:
    swarm = run_of(12, snapshot_every=3, boundary_log_mb=log_mb)
    joiner = worker(swarm)
    stage = session_of(swarm, joiner).stage
    assert stage is not None
    swarm.run_until(lambda: swarm.conductor.state.snapshot_step == 3)
    swarm.run_until(in_step(swarm, 5))
    next(n for n in swarm.at(stage) if n is not joiner).kill()
    swarm.finish()
    assert comes_back in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_worker_takes_the_stage_from_a_snapshot_of_the_runs_step() -> None:
    swarm = run_of(12, snapshot_every=1)
    joiner = worker(swarm)
    stage = session_of(swarm, joiner).stage
    assert stage is not None
    swarm.run_until(in_step(swarm, 6))
    swarm.settle(lambda: 5 in swarm.snapshots.complete)
    next(n for n in swarm.at(stage) if n is not joiner).kill()
    swarm.run_until(lambda: is_tier(swarm, joiner, "holder"))
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_moments_are_fetched_anew_when_all_their_donors_are_gone() -> None:
    swarm = FakeSwarm(make_run(steps=30, replicas=2), 4)
    swarm.run_until(in_step(swarm))
    joiner = swarm.join()
    joiner.slow_parts = {STATE_PART_MOMENTS}
    swarm.run_until(lambda: is_tier(swarm, joiner, "worker") and bool(joiner.pulls))
    stage = session_of(swarm, joiner).stage
    assert stage is not None
    first = joiner.pulls[STATE_PART_MOMENTS].step
    holders = [n for n in swarm.at(stage) if n is not joiner]
    # One after the other, each with a successor, so that the stage is never lost.
    for donor in holders:
        successor = swarm.join()
        while session_of(swarm, successor).stage != stage:
            swarm.run_until(lambda s=successor: session_of(swarm, s).stage is not None)  # type: ignore[misc]
            if session_of(swarm, successor).stage != stage:
                successor = swarm.join()
        swarm.run_until(lambda s=successor: is_tier(swarm, s, "holder"))  # type: ignore[misc]
        donor.kill()
    swarm.run_until(
        lambda: STATE_PART_MOMENTS in joiner.pulls and joiner.pulls[STATE_PART_MOMENTS].step > first
    )
    joiner.slow_parts = set()
    swarm.run_until(lambda: is_tier(swarm, joiner, "holder"))
    swarm.finish()
    assert_undisturbed(swarm)


def test_wrong_moments_are_found_by_the_first_step_that_they_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "rest_s", lambda setbacks: 0.0)
    swarm = run_of(60, snapshot_every=100)
    for node in swarm.nodes.values():
        node.corrupt_moments = 5
    joiner = joined(swarm)
    swarm.run_until(lambda: "set_back" in kinds(swarm))
    assert "the stage's are" in lines(swarm)
    for node in swarm.nodes.values():
        node.corrupt_moments = 0
    swarm.run_until(lambda: is_tier(swarm, joiner, "holder"))
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)


def test_a_worker_that_does_not_keep_up_is_set_back_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "rest_s", lambda setbacks: 1.0)
    swarm = run_of(60)
    joiner = worker(swarm)
    joiner.slow_parts.add(STATE_PART_WEIGHTS)
    swarm.run_until(lambda: "the weights of step" in swarm.conductor.waiting_for)
    waiting_since_s = swarm.now_s
    swarm.run_until(lambda: "set_back" in kinds(swarm))
    assert swarm.now_s - waiting_since_s < LEAST_S + 10 * TICK_S
    before = swarm.conductor.state.step
    swarm.run_until(lambda: swarm.conductor.state.step == before + 5)
    joiner.slow_parts = set()
    swarm.pass_time(1.2)
    swarm.run_until(lambda: is_tier(swarm, joiner, "holder"))
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_joiner_that_is_started_again_goes_on_with_the_version_that_it_had() -> None:
    swarm = run_of(60)
    joiner = joined(swarm, STATE_PART_WEIGHTS)
    swarm.run_until(lambda: joiner.copying is not None)
    assert joiner.copying is not None
    step = joiner.copying.step
    swarm.run_until(lambda: swarm.conductor.state.step == step + 3)
    joiner.drop()
    swarm.run_until(lambda: swarm.conductor.state.step == step + 4)
    joiner.attach()
    swarm.run_until(lambda: joiner.copying is not None)
    assert joiner.copying is not None
    assert joiner.copying.step == step
    joiner.slow_parts = set()
    swarm.run_until(lambda: is_tier(swarm, joiner, "holder"))
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_version_is_not_kept_for_a_joiner_that_does_not_come_back() -> None:
    swarm = run_of(1000)
    joiner = joined(swarm, STATE_PART_WEIGHTS)
    swarm.run_until(lambda: any(node.pins for node in swarm.nodes.values()))
    joiner.kill()
    swarm.pass_time(61)
    swarm.run_until(lambda: not any(node.pins for node in swarm.nodes.values()))


def test_a_worker_may_leave_at_any_time() -> None:
    swarm = run_of(12, snapshot_every=50)
    joiner = worker(swarm)
    say_farewell(joiner)
    swarm.run_until(lambda: joiner.done is not None)
    assert joiner.done == "bedtime"
    swarm.finish()
    assert swarm.conductor.state.snapshot_step == 12
    assert_undisturbed(swarm)


def test_a_worker_whose_session_breaks_offers_nothing() -> None:
    swarm = run_of(20)
    joiner = worker(swarm)
    joiner.drop()
    joiner.attach()
    assert session_of(swarm, joiner).held() is None
    joiner.slow_parts = set()
    swarm.run_until(lambda: is_tier(swarm, joiner, "holder"))
    swarm.finish()
    assert_undisturbed(swarm)
