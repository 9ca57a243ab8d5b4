# SPDX-License-Identifier: Apache-2.0
"""Stages lose their last nodes again and again, while others are being replayed: whatever way back
is taken, every record is the undisturbed run's."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.protocol.proto import coordinator_pb2 as pb

from .event_scripts import PARTS, run_part
from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import FakeSwarm, StillWaiting
from .fake_training import reference
from .test_conductor_property import check

STEPS = 6
_MAX_NODES = 8

losses: list[Callable[[FakeSwarm, FakeNode], object]] = [
    lambda swarm, node: node.kill(),
    lambda swarm, node: (node.kill(), swarm.join()),
    lambda swarm, node: (node.kill(), swarm.join()),
    lambda swarm, node: swarm.start_again(node),
    lambda swarm, node: swarm.start_again(node),
    lambda swarm, node: node.drop(),
    lambda swarm, node: node.log.clear(),
    lambda swarm, node: setattr(node, "frozen", not node.frozen),
    lambda swarm, node: swarm.join() if len(swarm.nodes) < _MAX_NODES else None,
    lambda swarm, node: node.say(farewell=pb.Farewell(reason="bedtime")),
    lambda swarm, node: swarm.restart(lose_soft=True),
    lambda swarm, node: swarm.conductor.take_snapshot(),
    lambda swarm, node: swarm.pass_time(1),
]

acts = st.tuples(st.integers(0, 40), st.integers(0, len(losses) - 1), st.integers(0, 7))
"""(things that happen before, which loss, whose)."""


def run_case(
    stages: int, snapshot_every: int, log_mb: int, script: list[tuple[int, int, int]]
) -> FakeSwarm:
    run = make_run(
        stages=stages, steps=STEPS, microbatches=2, snapshot_every=snapshot_every, replicas=1,
        boundary_log_mb=log_mb, validation_every=0,
    )  # fmt: skip
    expected, records = reference(run), 0
    swarm = FakeSwarm(run, stages)
    for before, loss, whose in script:
        count = iter(range(before))
        swarm.settle(lambda count=count: next(count, None) is None)  # type: ignore[misc]
        if swarm.conductor.ended:
            break
        if swarm.nodes:
            losses[loss](swarm, list(swarm.nodes.values())[whose % len(swarm.nodes)])
        swarm.tick()
        records = check(swarm, expected, records)
    for node in swarm.nodes.values():
        node.frozen = False
    for _ in range(4):
        while sum(node.done is None for node in swarm.nodes.values()) < stages:
            swarm.join()
        try:
            swarm.finish(within_s=60)
            break
        except StillWaiting:  # who had said farewell is missing once more
            assert swarm.conductor.waiting_for
    assert swarm.conductor.ended
    check(swarm, expected, records)
    assert swarm.conductor.state.step == STEPS
    assert not swarm.conductor.marks
    return swarm


CASES = {
    "stages": st.integers(1, 4),
    "snapshot_every": st.sampled_from([1, 2, 99, 99]),
    "log_mb": st.sampled_from([0, 1, 1, 1]),
    "script": st.lists(acts, min_size=1, max_size=12),
}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(**CASES)
def test_no_order_of_losses_changes_anything(
    stages: int, snapshot_every: int, log_mb: int, script: list[tuple[int, int, int]]
) -> None:
    run_case(stages, snapshot_every, log_mb, script)


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_no_order_of_losses_changes_anything_in_thousands_of_cases(part: int) -> None:
    run_part(part, run_case, cases=300, **CASES)
