# SPDX-License-Identifier: Apache-2.0
"""What is drawn: the same by the same seed, every kind sooner or later, nothing too late."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shoal.chaos import (
    COORDINATOR,
    NodeFact,
    Pace,
    Strike,
    SwarmFacts,
    draw,
    is_due,
    last_faulty_step,
    moments_of,
)
from shoal.protocol.faults import COORDINATOR_MOMENTS, NODE_MOMENTS, Action, Moment

NODES = tuple(NodeFact(f"node-{n}", f"name-{n}", stage=(n - 1) % 2) for n in range(1, 5))
FACTS = SwarmFacts(step=10, total_steps=1000, num_stages=2, microbatches=16, nodes=NODES)
LONGEST_S = 9.0


def drawn(facts: SwarmFacts, seeds: int = 60, numbers: int = 10) -> Iterator[Strike]:
    for seed in range(seeds):
        for number in range(numbers):
            strike = draw(seed, number, facts)
            assert strike is not None
            yield strike


def test_same_seed_and_facts_give_the_same_fault() -> None:
    assert list(drawn(FACTS)) == list(drawn(FACTS))


def test_order_in_which_nodes_are_listed_does_not_matter() -> None:
    assert list(drawn(replace(FACTS, nodes=NODES[::-1]))) == list(drawn(FACTS))


def test_seeds_and_numbers_give_different_faults() -> None:
    strikes = list(drawn(FACTS, seeds=10))
    assert len({strike.fault.model_copy(update={"id": ""}) for strike in strikes}) > 50
    assert len({strike.fault.id for strike in strikes[:10]}) == 10


def test_every_action_moment_and_process_comes_up() -> None:
    strikes = list(drawn(FACTS))
    nodes = [s for s in strikes if s.stage is not None]
    coordinator = [s for s in strikes if s.stage is None]
    assert {s.fault.action for s in nodes} == set(Action) - {Action.POISON}
    assert {s.fault.moment for s in nodes} == set(NODE_MOMENTS)
    assert {s.process for s in nodes} == {node.process for node in NODES}
    assert {s.fault.moment for s in coordinator} == set(COORDINATOR_MOMENTS)
    assert {s.fault.action for s in coordinator} == {
        Action.KILL, Action.TERM, Action.STOP, Action.FULL_DISK,
    }  # fmt: skip
    assert {s.process for s in coordinator} == {COORDINATOR}


def test_stops_are_shorter_and_longer_than_a_lease() -> None:
    stops = [s.fault.seconds for s in drawn(FACTS) if s.fault.action is Action.STOP]
    assert min(stops) < 2.5
    assert max(stops) > 5.5


def test_lengths_are_bounded_and_only_of_what_lasts() -> None:
    for strike in drawn(FACTS):
        fault = strike.fault
        assert 0 <= fault.seconds <= LONGEST_S
        assert (fault.seconds == 0) == (fault.action in (Action.KILL, Action.TERM))
        assert (fault.delay_s > 0) == (fault.action is Action.DELAY_LINK)
        assert 0 <= fault.skip <= FACTS.microbatches // 2


def test_a_node_is_hit_only_at_moments_that_its_stage_has() -> None:
    for strike in drawn(replace(FACTS, num_stages=2)):
        if strike.stage is not None:
            assert strike.fault.moment in moments_of(strike.stage, 2)
    assert Moment.FORWARD_RECEIVED not in moments_of(0, 2)
    assert Moment.BACKWARD_RECEIVED not in moments_of(1, 2)
    assert Moment.FORWARD_SENT not in moments_of(1, 2)
    assert set(moments_of(1, 3)) == set(NODE_MOMENTS)
    assert set(moments_of(0, 1)) == {
        Moment.GRADIENT_ACCUMULATED, Moment.MID_REDUCE, Moment.PREPARED, Moment.COMMITTED,
    }  # fmt: skip


def test_a_node_without_others_has_no_link_to_lose() -> None:
    alone = replace(FACTS, num_stages=1, nodes=NODES[:1])
    actions = {strike.fault.action for strike in drawn(alone)}
    assert not actions & {Action.DROP_LINK, Action.DELAY_LINK}


def test_nobody_is_hit_while_nobody_trains() -> None:
    assert draw(1, 0, replace(FACTS, nodes=())) is None


@pytest.mark.parametrize("total_steps", [1, 2, 3, 4, 8, 10, 100])
def test_no_fault_is_for_the_last_steps(total_steps: int) -> None:
    last = last_faulty_step(total_steps)
    assert last <= max(1, total_steps - min(3, total_steps // 3))
    for step in range(total_steps + 1):
        for seed in range(20):
            strike = draw(seed, 3, replace(FACTS, step=step, total_steps=total_steps))
            assert (strike is None) == (step + 1 > last)
            if strike is not None:
                assert step < strike.fault.step <= last


@pytest.mark.parametrize("seed", range(20))
def test_a_run_of_ten_steps_has_a_fault(seed: int) -> None:
    assert is_due(Pace(), seed, 0, steps_since=1, seconds_since=0.0)
    assert draw(seed, 0, replace(FACTS, step=1, total_steps=10)) is not None


def test_next_fault_comes_after_steps_or_seconds() -> None:
    pace = Pace(every_s=20, every_steps=4)
    for number in range(1, 30):
        assert not is_due(pace, 5, number, steps_since=2, seconds_since=14.9)
        assert is_due(pace, 5, number, steps_since=5, seconds_since=0)
        assert is_due(pace, 5, number, steps_since=0, seconds_since=25)


def test_without_a_number_of_steps_time_alone_decides() -> None:
    pace = Pace(every_s=20, every_steps=None)
    assert not is_due(pace, 5, 0, steps_since=10**6, seconds_since=14.9)
    assert not is_due(pace, 5, 7, steps_since=10**6, seconds_since=14.9)
    assert is_due(pace, 5, 7, steps_since=0, seconds_since=25)
