# SPDX-License-Identifier: Apache-2.0
"""The coordinator dies and comes back, or everybody goes home and starts again later."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.coordinator.run_folder import Live, read_live
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


@pytest.mark.full
async def test_a_coordinator_killed_in_mid_step_is_found_on_another_port_and_no_bit_changes(
    tmp_path: Path,
) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS), discovery=True) as swarm:
        nodes = await swarm.start("n0", "n1", "n2", "n3")
        await swarm.see(
            lambda v: all(n.discovered_peers >= 2 for n in v.live_nodes),
            "every node has found another",
        )
        frozen = nodes[3]
        await swarm.stop_in_mid_step(frozen)
        before, done = swarm.live, swarm.last_step
        swarm.kill(swarm.coordinator)
        frozen.signal(signal.SIGCONT)
        with taken(before) as port:
            moved = swarm.start_coordinator("--port", str(port))
            await swarm.wait_until(
                lambda: (live := read_live(swarm.run_folder)) is not None and live.pid == moved.pid,
                "the coordinator is up again",
            )
            assert swarm.live.admission != before.admission
            assert swarm.live.session != before.session
            assert swarm.live.discovery_port != before.discovery_port
            await swarm.committed(done + 3)
            peers = {node.peer_id for node in nodes}
            await swarm.see(
                lambda v: {n.peer_id for n in v.live_nodes if n.state == "training"} == peers,
                "all nodes have found it",
            )
            assert not swarm.events(RolledBack), "the nodes held the state"
            assert all(node.is_running for node in nodes), "a node gave up meanwhile"
            await swarm.stop_and_check()


@contextlib.contextmanager
def taken(live: Live) -> Iterator[int]:
    """Somebody else, who doesn't answer, is at all of a coordinator's addresses. Yields a port that
    is free, as is the one after it."""
    used = [int(address.rpartition(":")[2]) for address in (live.admission, live.session)]
    with contextlib.ExitStack() as stack:
        for port in (*used, live.discovery_port):
            if port:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        while True:
            with socket.create_server(("127.0.0.1", 0)) as first:
                port = first.getsockname()[1]
                with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                    break
        yield port
