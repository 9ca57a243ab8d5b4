# SPDX-License-Identifier: Apache-2.0
"""Two coordinators on two logs, nodes between them, random partitions, deaths and returns: never
two leaders at once, never a commit below a promise, never another result, and the run ends."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .event_scripts import DISTURB, ORDER, PARTS, TIME, Script, run_part, scripts
from .fake_run import make_run
from .rival_swarm import RivalSwarm, disturbances

STEPS = 4


def do(swarm: RivalSwarm, kind: int, choice: int) -> None:
    nodes = list(swarm.nodes.values())
    if kind == DISTURB and nodes:
        names = list(disturbances)
        disturbances[names[choice // len(nodes) % len(names)]](swarm, nodes[choice % len(nodes)])
    elif kind == ORDER and (actions := list(swarm.actions())):
        actions[choice % len(actions)]()
    else:
        swarm.tick()
    swarm.supervise()


def bring_to_an_end(swarm: RivalSwarm) -> None:
    """Everybody is back and reaches everybody; one coordinator is left."""
    if any(node.done for node in swarm.nodes.values()) and swarm.is_finished():
        return
    swarm.cut.clear()
    swarm.is_link_cut = False
    swarm.revive()
    leads = [side for side in swarm.sides.values() if side.leads and not side.conductor.ended]  # type: ignore[union-attr]
    chosen = max(leads, key=lambda side: side.conductor.terms.term, default=None)  # type: ignore[union-attr]
    chosen = chosen or max(swarm.sides.values(), key=lambda side: len(side.disk))
    for side in swarm.sides.values():
        if side is not chosen:
            swarm.kill_coordinator(side.name)
    if not chosen.leads:
        swarm.start(chosen.name)
    for tick in range(400):
        conductor = chosen.conductor
        assert conductor is not None
        swarm.conductor = conductor
        if conductor.ended and conductor.deposed is None:
            break
        swarm.settle(lambda: conductor.ended)  # noqa: B023
        swarm.supervise()
        swarm.tick()
        if tick % 50 == 0:  # a node waits for ten seconds, and asks again within three
            for node in swarm.nodes.values():
                swarm.give_up_waiting(node)
    conductor = chosen.conductor
    assert conductor is not None
    assert conductor.state.step == STEPS, conductor.waiting_for
    assert not conductor.failed, conductor.failed
    for step, record in conductor.state.records.items():
        assert record.sums_digests == swarm.expected.sums[step]


KINDS = [ORDER] * 12 + [TIME] + [DISTURB] * 2


def run_case(nodes: int, stages: int, script: Script, registered: bool) -> None:
    run = make_run(steps=STEPS, stages=stages, microbatches=2, validation_every=0, min_nodes=1)
    swarm = RivalSwarm(run, nodes * stages)
    if registered:
        swarm.register_standby()
    for kind, choice in script:
        do(swarm, kind, choice)
    bring_to_an_end(swarm)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    nodes=st.integers(1, 3),
    stages=st.integers(1, 2),
    script=scripts(KINDS, most=300),
    registered=st.booleans(),
)
def test_no_partition_gives_a_run_two_leaders(
    nodes: int, stages: int, script: Script, registered: bool
) -> None:
    run_case(nodes, stages, script, registered)


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_no_partition_gives_a_run_two_leaders_in_thousands_of_cases(part: int) -> None:
    run_part(
        part,
        run_case,
        nodes=st.integers(1, 3),
        stages=st.integers(1, 2),
        script=scripts(KINDS, least=100, most=500),
        registered=st.just(True),
    )
