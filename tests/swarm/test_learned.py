# SPDX-License-Identifier: Apache-2.0
"""Nodes die while boundaries learn. What both sides of a boundary hold stays equal on both, and no
bit changes."""

from pathlib import Path

import pytest

from shoal.coordinator.state import RolledBack, StageReplayed

from .harness import ENDLESS, Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

IN_CI = ["mapl:r=16|int8:g64", "resbm:b=16"]
OTHERS = [
    "mapl:r=16:grad=encoder_only",
    "mapl:r=16:proj=unaware:anchors=full",
    "mapl:r=16:proj=fixed|zstd:3",
    "resbm:b=16:form=iota|int8:g64",
    "ssn:k=16",
    "ssn:k=16:variant=projected|int4",
    "linear:b=16",
]
every_codec = pytest.mark.parametrize(
    "boundary", [*IN_CI, *(pytest.param(codec, marks=pytest.mark.full) for codec in OTHERS)]
)


@every_codec
@pytest.mark.parametrize("optimizer", ["muon"])
async def test_a_node_is_killed_and_another_joins(
    tmp_path: Path, boundary: str, optimizer: str
) -> None:
    run = spec(
        steps=ENDLESS,
        model={"num_layers": 3},
        pipeline={"stages": 3, "replicas": 2, "boundary": boundary},
        optimizer={"warmup_steps": 4, "name": optimizer},
        fault={"snapshot_every": 1000},
    )
    async with Swarm(tmp_path, run) as swarm:
        await swarm.start("n0", "n1", "n2", "n3", "n4", "n5")
        await swarm.advance(3)
        view = await swarm.view()
        # The middle stage has a boundary on either side.
        victim = swarm.process_of(view.stages[1].nodes[0])
        await swarm.stop_in_mid_step(victim)
        swarm.kill(victim)
        await swarm.advance(2)
        joined = await swarm.placed(swarm.start_node("n6"))
        assert joined.stage == 1
        await swarm.see(
            lambda v: any(
                node.name == joined.name and node.tier == "holder" for node in v.stages[1].nodes
            ),
            "the joiner holds the stage, moments too",
        )
        await swarm.advance(3)
        await swarm.stop_and_check()


@every_codec
async def test_a_stage_loses_its_last_node_and_is_replayed(tmp_path: Path, boundary: str) -> None:
    run = spec(
        steps=ENDLESS,
        model={"num_layers": 3},
        pipeline={"stages": 3, "replicas": 1, "boundary": boundary},
        fault={"snapshot_every": 20, "boundary_log_mb": 64},
    )
    async with Swarm(tmp_path, run) as swarm:
        await swarm.start("n0", "n1", "n2")
        view = await swarm.see(
            lambda v: v.snapshot_step is not None and v.step >= v.snapshot_step + 5,
            "a snapshot is old",
        )
        swarm.kill(swarm.process_of(view.stages[1].nodes[0]))
        swarm.start_node("n3")
        await swarm.wait_until(lambda: bool(swarm.events(StageReplayed)), "the stage is replayed")
        event = swarm.events(StageReplayed)[0]
        assert event.to_step > event.from_step, "nothing was replayed; the test shows nothing"
        await swarm.committed(event.to_step + 3)
        await swarm.stop_and_check()
        assert not swarm.events(RolledBack)
