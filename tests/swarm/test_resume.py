# SPDX-License-Identifier: Apache-2.0
"""The coordinator dies and comes back, or everybody goes home and starts again later."""

import signal
from pathlib import Path

import pytest

from shoal.coordinator.state import RolledBack

from .harness import ENDLESS, Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


async def test_coordinator_killed_in_mid_run_resumes_with_the_nodes_still_there(
    tmp_path: Path,
) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS)) as swarm:
        nodes = await swarm.start("n0", "n1", "n2", "n3")
        await swarm.committed(3)
        swarm.kill(swarm.coordinator)
        done = swarm.last_step
        assert all(node.is_running for node in nodes)

        swarm.start_coordinator()
        await swarm.committed(done + 3)
        peers = {node.peer_id for node in nodes}
        await swarm.see(
            lambda v: {n.peer_id for n in v.live_nodes if n.state == "training"} == peers,
            "all nodes are back",
        )
        assert not swarm.events(RolledBack), "the nodes held the state; nothing was to be redone"
        assert all(node.is_running for node in nodes), "a node gave up meanwhile"
        await swarm.stop_and_check()


async def test_everything_stopped_and_started_later_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS, pipeline={"replicas": 1})) as swarm:
        await swarm.start("n0", "n1")
        await swarm.committed(3)
        swarm.coordinator.signal(signal.SIGINT)
        await swarm.finished()
        stopped = swarm.last_step
        swarm.check_snapshot(stopped)

        swarm.start_coordinator()
        swarm.start_node("n0")
        swarm.start_node("n1")
        await swarm.committed(stopped + 3)
        assert not swarm.events(RolledBack)
        await swarm.stop_and_check()
