# SPDX-License-Identifier: Apache-2.0
"""Whoever dies, its helper processes die with it; whoever leaves, leaves nothing behind."""

import signal
from pathlib import Path

import psutil
import pytest

from shoal.protocol.errors import HandOverError

from .harness import ENDLESS, GONE_S, Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(180)]


async def test_discovery_helpers_of_killed_and_of_leaving_processes_are_gone(
    tmp_path: Path,
) -> None:
    run = spec(steps=ENDLESS, pipeline={"replicas": 1})
    async with Swarm(tmp_path, run, discovery=True) as swarm:
        nodes = await swarm.start("n0", "n1", "n2")
        await swarm.wait_until(lambda: len(swarm.p2pds()) == 4, "everybody has a discovery helper")

        def helpers_of(pid: int) -> list[psutil.Process]:
            return [p for p in psutil.Process(pid).children(recursive=True) if p.name() == "p2pd"]

        for victim in (nodes[0], swarm.coordinator):
            helpers = helpers_of(victim.pid)
            assert helpers, "it had no helper to leave behind"
            swarm.kill(victim)
            _, alive = psutil.wait_procs(helpers, timeout=GONE_S)
            assert not alive, f"{victim.name} is dead, its p2pd isn't"
        for node in nodes[1:]:
            node.signal(signal.SIGINT)
            assert await swarm.ended(node) == HandOverError.exit_code, "nobody was there to take it"
        assert not swarm.survivors()


async def test_a_killed_nodes_scratch_files_go_when_it_starts_again(tmp_path: Path) -> None:
    run = spec(steps=ENDLESS, pipeline={"replicas": 1})
    async with Swarm(tmp_path, run) as swarm:
        victim, other = await swarm.start("n0", "n1")
        swarm.kill(victim, other)
        assert swarm.temporary_files(), "it had no scratch files to leave behind"
        swarm.kill(swarm.coordinator)
        swarm.start_coordinator()
        for name in ("n0", "n1"):
            swarm.start_node(name)
        await swarm.advance()
        await swarm.stop_and_check()
        assert not swarm.temporary_files()
