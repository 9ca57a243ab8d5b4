# SPDX-License-Identifier: Apache-2.0
"""Random orders, losses, duplicates, silences, joins and restarts: nothing is counted twice or
lost, every record is the undisturbed run's, and whatever waits goes on when its cause ends."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.coordinator.run_view import ConductorView
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import coordinator_pb2 as pb

from .event_scripts import DISTURB, ORDER, PARTS, TIME, Script, run_part, scripts
from .fake_attempt import BadNumbers
from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import FakeSwarm, StillWaiting
from .fake_training import Reference, reference

STEPS = 3
_MAX_NODES = 8

disturbances: dict[str, Callable[[FakeSwarm, FakeNode], object]] = {
    "lose the process": lambda swarm, node: node.kill(),
    "start the process again": lambda swarm, node: swarm.start_again(node),
    "lose the log": lambda swarm, node: node.log.clear(),
    "lose the connection": lambda swarm, node: node.drop(),
    "fall silent": lambda swarm, node: setattr(node, "frozen", True),
    "wake up": lambda swarm, node: setattr(node, "frozen", False),
    "join": lambda swarm, node: swarm.join() if len(swarm.nodes) < _MAX_NODES else None,
    "join again": lambda swarm, node: (node.detach(), node.attach()) if node.session else None,
    "say farewell": lambda swarm, node: node.leave(),
    "leave in a hurry": lambda swarm, node: node.leave(grace_s=3.0),
    "say it twice": lambda swarm, node: node.events.extend(list(node.events)[:1]),
    "fail": lambda swarm, node: node.trouble(pb.TROUBLE_KIND_OWN_FAILURE, "out of memory"),
    "find bad numbers": lambda swarm, node: node.flaky.append(BadNumbers()),
    "sum up bad numbers": lambda swarm, node: node.flaky.append(BadNumbers(leg=pb.TASK_LEG_SUMMED)),
    "not reach somebody": lambda swarm, node: node.trouble(
        pb.TROUBLE_KIND_PEER_UNREACHABLE, "timeout", peer_incarnation=max(node.members, default=0)
    ),
    "restart the coordinator": lambda swarm, node: swarm.restart(lose_soft=True),
    "pause": lambda swarm, node: swarm.conductor.pause(),
    "resume": lambda swarm, node: swarm.conductor.resume(),
    "take a snapshot": lambda swarm, node: swarm.conductor.take_snapshot(),
    "let time pass": lambda swarm, node: swarm.pass_time(6),
}


def check(swarm: FakeSwarm, expected: Reference, records_before: int) -> int:
    """Holds at every moment. Returns how many records there are."""
    conductor = swarm.conductor
    assert not conductor.failed
    records = conductor.state.records
    assert len(records) >= records_before
    for step, record in records.items():
        assert record.sums_digests == expected.sums[step]
        for parts in record.contributions:
            ids = sorted(m for ids in parts.values() for m in ids)
            assert ids == list(range(swarm.run.spec.batch.microbatches))
    assert all(w == expected.weights[s] for s, w in conductor.state.weights_digests.items())
    incarnations = [s.incarnation for s in conductor.sessions.values() if s.incarnation]
    assert len(incarnations) == len(set(incarnations))
    return len(records)


def do(swarm: FakeSwarm, kind: int, choice: int) -> None:
    if kind == DISTURB and swarm.nodes:
        names = list(disturbances)
        node = list(swarm.nodes.values())[choice % len(swarm.nodes)]
        disturbances[names[choice // len(swarm.nodes) % len(names)]](swarm, node)
    elif kind == ORDER and (actions := list(swarm.actions())):
        actions[choice % len(actions)]()
    else:
        swarm.tick()


def bring_to_an_end(swarm: FakeSwarm) -> None:
    """Whatever kept the run waiting is taken away: then it has to finish."""
    for node in swarm.nodes.values():
        node.frozen = False
        node.flaky.clear()
    for _ in range(4):
        swarm.conductor.resume()
        while sum(node.done is None for node in swarm.nodes.values()) < 2 * swarm.num_stages:
            swarm.join()
        try:
            swarm.finish(within_s=60)
        except StillWaiting:
            # Nodes that said farewell, or were let go, may be missing once more.
            assert swarm.conductor.waiting_for
            continue
        return
    raise AssertionError(f"still waiting: {swarm.conductor.waiting_for}")


KINDS = [ORDER] * 12 + [TIME, DISTURB]
shapes = st.fixed_dictionaries(
    {
        "stages": st.integers(1, 3),
        "microbatches": st.integers(1, 4),
        "snapshot_every": st.sampled_from([1, 2, 9]),
        "validation_every": st.integers(0, 2),
        "min_nodes": st.integers(0, 1),
        "boundary_log_mb": st.integers(0, 1),
    }
)


def run_case(shape: dict[str, int], script: Script) -> None:
    run = make_run(steps=STEPS, **shape)
    expected, records = reference(run), 0
    swarm = FakeSwarm(run, 2 * run.spec.pipeline.stages)
    for kind, choice in script:
        if swarm.conductor.ended:
            break
        do(swarm, kind, choice)
        records = check(swarm, expected, records)
    bring_to_an_end(swarm)
    check(swarm, expected, records)
    assert swarm.conductor.state.step == STEPS
    view = ConductorView(swarm.conductor, lambda: "link").view()
    assert (view.state, view.steps_lost) == ("finished", 0)
    assert (view.microbatches_missing, view.microbatches_double) == (0, 0)
    assert Incarnation(0) not in swarm.conductor.state.peers


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=shapes, script=scripts(KINDS, most=250))
def test_no_order_of_events_loses_or_repeats_anything(
    shape: dict[str, int], script: Script
) -> None:
    run_case(shape, script)


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_no_order_of_events_loses_or_repeats_anything_in_thousands_of_cases(part: int) -> None:
    run_part(part, run_case, shape=shapes, script=scripts(KINDS, least=50, most=400))
