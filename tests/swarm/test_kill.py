# SPDX-License-Identifier: Apache-2.0
"""Nodes die without a word. Nothing is lost, nothing counts twice, no bit changes."""

import random
from pathlib import Path

import pytest

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


async def test_node_killed_in_mid_step_and_another_joining_change_no_bit(tmp_path: Path) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS)) as swarm:
        nodes = await swarm.start("n0", "n1", "n2", "n3")
        victim = nodes[0]
        view = await swarm.stop_in_mid_step(victim)
        before = swarm.node_in(view, victim)
        swarm.kill(victim)
        await swarm.committed(view.step + 2)
        assert before.incarnation in swarm.fenced_in_open_step()
        assert any(
            "rerouted" in e.text for e in (await swarm.view()).events if before.name in e.text
        )

        joined = await swarm.placed(swarm.start_node("n4"))
        assert joined.stage == before.stage
        await swarm.wait_until(
            lambda: counted(swarm, Incarnation(joined.incarnation)) > 0,
            "the joiner's work is committed",
        )
        await swarm.stop_and_check()


async def test_last_node_of_a_stage_is_lost_and_steps_are_recomputed_to_the_same_bits(
    tmp_path: Path,
) -> None:
    run = spec(steps=ENDLESS, pipeline={"replicas": 1}, fault={"snapshot_every": 5})
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
