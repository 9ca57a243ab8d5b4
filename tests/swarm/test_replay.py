# SPDX-License-Identifier: Apache-2.0
"""A stage loses its last node. Its state is replayed out of the neighbours' logs; where these don't
reach, every stage rolls back. No bit changes."""

import shutil
from pathlib import Path

import pytest

from shoal.coordinator.state import RolledBack, StageReplayed

from .harness import ENDLESS, Process, Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


def endless(*, log_mb: int = 64, stages: int = 2) -> dict[str, object]:
    return spec(
        steps=ENDLESS,
        model={"num_layers": max(stages, 2)},
        pipeline={"stages": stages, "replicas": 1},
        fault={"snapshot_every": 20, "boundary_log_mb": log_mb},
    )


async def with_an_old_snapshot(swarm: Swarm, *names: str) -> list[Process]:
    """A run some steps after a snapshot; the processes, by stage."""
    await swarm.start(*names)
    view = await swarm.see(
        lambda v: v.snapshot_step is not None and v.step >= v.snapshot_step + 5, "a snapshot is old"
    )
    return [swarm.process_of(stage.nodes[0]) for stage in view.stages]


@pytest.mark.parametrize("stage", [1, 0])
async def test_a_lost_stage_is_replayed_to_the_same_bits(tmp_path: Path, stage: int) -> None:
    async with Swarm(tmp_path, endless()) as swarm:
        nodes = await with_an_old_snapshot(swarm, "n0", "n1")
        swarm.kill(nodes[stage])
        swarm.start_node("n2")
        await swarm.wait_until(lambda: bool(swarm.events(StageReplayed)), "the stage is replayed")
        event = swarm.events(StageReplayed)[0]
        assert event.stage == stage
        assert event.to_step > event.from_step, "nothing was replayed; the test shows nothing"
        assert event.log_bytes > 0
        await swarm.committed(event.to_step + 3)
        view = await swarm.view()
        assert (view.replays, view.rollbacks) == (1, 0)
        assert any("replayed stage" in line.text for line in view.events)
        await swarm.stop_and_check()
        assert not swarm.events(RolledBack)


async def test_where_the_log_is_gone_every_stage_rolls_back(tmp_path: Path) -> None:
    async with Swarm(tmp_path, endless()) as swarm:
        nodes = await with_an_old_snapshot(swarm, "n0", "n1")
        swarm.kill(nodes[1])
        shutil.rmtree(nodes[0].folder / "boundary-log")
        swarm.start_node("n2")
        await rolls_back(swarm)


@pytest.mark.full
async def test_without_logs_every_stage_rolls_back(tmp_path: Path) -> None:
    async with Swarm(tmp_path, endless(log_mb=0)) as swarm:
        nodes = await with_an_old_snapshot(swarm, "n0", "n1")
        swarm.kill(nodes[0])
        assert not list(swarm.folder.glob("*/boundary-log/*/*"))
        swarm.start_node("n2")
        await rolls_back(swarm)


@pytest.mark.full
async def test_a_stage_lost_with_its_neighbour_rolls_back(tmp_path: Path) -> None:
    async with Swarm(tmp_path, endless()) as swarm:
        nodes = await with_an_old_snapshot(swarm, "n0", "n1")
        swarm.kill(*nodes)
        swarm.start_node("n2")
        swarm.start_node("n3")
        await rolls_back(swarm)


@pytest.mark.full
async def test_nodes_that_were_started_again_replay_from_each_others_logs(tmp_path: Path) -> None:
    async with Swarm(tmp_path, endless()) as swarm:
        nodes = await with_an_old_snapshot(swarm, "n0", "n1")
        swarm.kill(*nodes)
        for node in nodes:
            swarm.start_node(node.name)
        lost = swarm.last_step
        await swarm.committed(lost + 3)
        await swarm.stop_and_check()


@pytest.mark.full
async def test_two_stages_that_are_no_neighbours_are_replayed_at_once(tmp_path: Path) -> None:
    async with Swarm(tmp_path, endless(stages=4)) as swarm:
        nodes = await with_an_old_snapshot(swarm, "n0", "n1", "n2", "n3")
        swarm.kill(nodes[0], nodes[2])
        swarm.start_node("n4")
        swarm.start_node("n5")
        await swarm.wait_until(
            lambda: len(swarm.events(StageReplayed)) == 2, "both stages are replayed"
        )
        assert {event.stage for event in swarm.events(StageReplayed)} == {0, 2}
        await swarm.advance(3)
        await swarm.stop_and_check()
        assert not swarm.events(RolledBack)


async def rolls_back(swarm: Swarm) -> None:
    await swarm.wait_until(lambda: bool(swarm.events(RolledBack)), "the run rolls back")
    lost = swarm.last_step
    assert swarm.events(RolledBack)[0].to_step < lost, "nothing is recomputed"
    await swarm.committed(lost + 3)
    assert (await swarm.view()).rollbacks == 1
    await swarm.stop_and_check()
    assert not swarm.events(StageReplayed)
