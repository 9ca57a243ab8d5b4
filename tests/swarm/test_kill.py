# SPDX-License-Identifier: Apache-2.0
"""Nodes die without a word. Nothing is lost, nothing counts twice, no bit changes."""

import random
import signal
from pathlib import Path

import pytest

from shoal.coordinator.dashboard.views import NodeView
from shoal.coordinator.state import RolledBack, StepCommitted
from shoal.protocol.ids import Incarnation

from .harness import ENDLESS, Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


def counted(swarm: Swarm, incarnation: Incarnation) -> int:
    """Microbatches of an incarnation in committed steps."""
    return sum(
        len(stage.get(incarnation, ()))
        for record in swarm.events(StepCommitted)
        for stage in record.contributions
    )


async def replace(swarm: Swarm, victim: NodeView, name: str) -> None:
    """Start another node; wait until its work counts in the dead one's stage."""
    await swarm.advance(2)
    assert victim.incarnation in swarm.fenced_in_open_step()
    told = [e.text for e in (await swarm.view()).events]
    assert any(f"{victim.name} left stage {victim.stage}" in text for text in told)
    joined = await swarm.placed(swarm.start_node(name))
    assert joined.stage == victim.stage
    await swarm.wait_until(
        lambda: counted(swarm, Incarnation(joined.incarnation)) > 0, "its work is committed"
    )


async def has_finished_its_share(swarm: Swarm, stage: int) -> NodeView | None:
    """A node of the stage that has nothing left to do in the step that stands still."""
    now_s = (await swarm.view()).now_s
    view = await swarm.see(
        lambda v: all(n.last_seen_s > now_s for n in v.stages[stage].nodes), "fresh heartbeats"
    )
    done = [n for n in view.stages[stage].nodes if "other nodes to finish" in n.waiting_for]
    return done[0] if done else None


async def test_nodes_killed_in_mid_step_and_others_joining_change_no_bit(tmp_path: Path) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS)) as swarm:
        await swarm.start("n0", "n1", "n2", "n3")
        view = await swarm.view()

        # With inputs that its upstream sent, and must send again to another.
        victim = swarm.process_of(view.stages[1].nodes[0])
        await swarm.stop_in_mid_step(victim)
        swarm.kill(victim)
        await replace(swarm, view.stages[1].nodes[0], "n4")
        assert any("rerouted to" in e.text for e in (await swarm.view()).events)

        # With gradients in its sums that are nowhere else, its share being done.
        frozen = swarm.process_of(view.stages[1].nodes[1])
        await swarm.stop_in_mid_step(frozen)
        while (node := await has_finished_its_share(swarm, 0)) is None:
            frozen.signal(signal.SIGCONT)
            await swarm.advance(1)
            await swarm.stop_in_mid_step(frozen)
        swarm.kill(swarm.process_of(node))
        frozen.signal(signal.SIGCONT)
        await replace(swarm, node, "n5")

        await swarm.stop_and_check()


async def test_last_node_of_a_stage_is_lost_and_steps_are_recomputed_to_the_same_bits(
    tmp_path: Path,
) -> None:
    # Without logs, for with them the stage is replayed: test_replay.py.
    fault = {"snapshot_every": 5, "boundary_log_mb": 0}
    run = spec(steps=ENDLESS, pipeline={"replicas": 1}, fault=fault)
    async with Swarm(tmp_path, run) as swarm:
        victim, _ = await swarm.start("n0", "n1")
        view = await swarm.see(
            lambda v: v.snapshot_step is not None and v.step > v.snapshot_step, "a snapshot is old"
        )
        swarm.kill(victim)
        swarm.start_node("n2")
        await swarm.wait_until(lambda: bool(swarm.events(RolledBack)), "the run rolls back")
        back = swarm.events(RolledBack)[0]
        assert view.snapshot_step is not None
        assert back.to_step >= view.snapshot_step
        lost = swarm.last_step
        assert back.to_step < lost, "nothing had to be recomputed; the test shows nothing"
        await swarm.committed(lost + 3)
        recomputed = [e.step for e in swarm.events(StepCommitted)]
        assert len(recomputed) > len(set(recomputed))
        await swarm.stop_and_check()


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_nodes_killed_at_random_moments_change_no_bit(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with Swarm(tmp_path, spec(steps=ENDLESS, fault={"snapshot_every": 40})) as swarm:
        nodes = await swarm.start("n0", "n1", "n2", "n3")
        for round_number in range(6):
            await swarm.advance(rng.randint(1, 20))
            victims = rng.sample(nodes, rng.choice([1, 1, 2]))
            swarm.kill(*victims)
            nodes = [node for node in nodes if node not in victims]
            for number, _ in enumerate(victims):
                nodes.append(swarm.start_node(f"m{round_number}-{number}"))
            await swarm.placed(nodes[-1])
        await swarm.advance(5)
        await swarm.stop_and_check()
