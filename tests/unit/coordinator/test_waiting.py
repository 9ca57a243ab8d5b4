# SPDX-License-Identifier: Apache-2.0
"""Whenever the run can't go on there is a reason to read, and what would end it."""

import pytest
from hypothesis import HealthCheck, given, settings

from shoal.coordinator.run_view import ConductorView
from shoal.coordinator.step_runner import Phase

from .event_scripts import PARTS, Script, run_part, scripts
from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import in_step
from .test_conductor_property import KINDS, do, shapes

SAID_WITHIN_S = 125.0
"""The longest that a step may stand still unexplained; where nothing took long before, ten."""


def stands_still(swarm: FakeSwarm) -> bool:
    """Nothing can happen any more unless time passes."""
    return not swarm.settle(lambda: swarm.conductor.ended) and not swarm.conductor.ended


def check_said(swarm: FakeSwarm) -> None:
    if not stands_still(swarm):
        return
    deadline_s = swarm.now_s + SAID_WITHIN_S
    while not swarm.conductor.waiting_for:
        swarm.tick()
        if any(swarm.actions()) or swarm.conductor.ended:
            return  # it went on by itself
        assert swarm.now_s < deadline_s, f"no reason, {swarm.conductor.phase}"
    view = ConductorView(swarm.conductor, lambda: "link").view()
    assert view.waiting_for == swarm.conductor.waiting_for
    assert view.state in ("waiting", "paused", "draining")


def run_case(shape: dict[str, int], script: Script) -> None:
    swarm = FakeSwarm(make_run(steps=3, **shape), 2 * shape["stages"])
    for number, (kind, choice) in enumerate(script):
        if swarm.conductor.ended:
            return
        do(swarm, kind, choice)
        if number % 40 == 39:
            check_said(swarm)
    check_said(swarm)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=shapes, script=scripts(KINDS, most=160))
def test_a_run_that_stands_still_says_why(shape: dict[str, int], script: Script) -> None:
    run_case(shape, script)


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_a_run_that_stands_still_says_why_in_thousands_of_cases(part: int) -> None:
    run_part(part, run_case, cases=300, shape=shapes, script=scripts(KINDS, least=40, most=300))


def test_the_node_that_holds_up_a_step_is_named_with_what_ends_the_wait() -> None:
    swarm = FakeSwarm(make_run(stages=3, microbatches=8), 6)
    swarm.run_until(in_step(swarm))
    hung = swarm.at(1)[0]
    hung.mute = True
    assert hung.session is not None
    hung.session.pace.extend([2.0] * 8)
    swarm.settle()
    swarm.pass_time(11)
    name = swarm.conductor.sessions[hung.peer_id].name
    said = swarm.conductor.waiting_for
    assert f"; {name} goes on, or is taken out when it has finished nothing for" in said


def test_nodes_that_have_yet_to_apply_a_step_are_named() -> None:
    swarm = FakeSwarm(make_run(replicas=1), 2)
    swarm.run_until(lambda: swarm.conductor.phase is Phase.APPLYING)
    late = swarm.at(1)[0]
    late.frozen = True
    swarm.settle()
    late.frozen = False
    session = swarm.conductor.sessions[late.peer_id]
    for _ in range(60):
        session.last_heard_s = swarm.now_s
        late.frozen = True
        swarm.tick()
        late.frozen = False
    assert f"{session.name} has yet to apply step 1" in swarm.conductor.waiting_for
    assert "one more node joins" in swarm.conductor.waiting_for


def test_a_node_that_leaves_is_told_what_it_stays_for() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
    swarm.run_until(in_step(swarm))
    node = swarm.at(1)[0]
    node.leave(grace_s=30.0)
    swarm.run_until(lambda: node.done is not None)
    said = [c.wait.reason for c in node.commands_seen if c.HasField("wait")]
    assert "leaving once step 2 is done" in said
    assert any("leaving once stage 1 is stored" in reason for reason in said)
