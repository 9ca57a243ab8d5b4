# SPDX-License-Identifier: Apache-2.0
"""Nodes come and go, and everybody who counts them counts the same."""

import re
import signal

import httpx
import pytest

from shoal.coordinator.dashboard.views import GONE, RunView

from .harness import Process, Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

REJOINS = 5


async def metrics_count(swarm: Swarm) -> int:
    """Live nodes, as Prometheus sees them."""
    async with httpx.AsyncClient(base_url=swarm.live.dashboard, timeout=10) as client:
        text = (await client.get("/metrics")).text
    counts = re.findall(r'^shoal_nodes\{.*state="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return sum(int(float(count)) for state, count in counts if state not in GONE)


async def first_update(swarm: Swarm) -> RunView:
    """What the page gets to draw: the first event of its stream."""
    async with httpx.AsyncClient(base_url=swarm.live.dashboard, timeout=10) as client:
        async with client.stream("GET", "/api/events") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    return RunView.model_validate_json(line.removeprefix("data:"))
    raise AssertionError("the event stream ended without an event")


async def check_all_count(swarm: Swarm, expected: set[str]) -> None:
    """API, command line, page and metrics agree on who is there."""
    await swarm.see(lambda v: {n.peer_id for n in v.live_nodes} == expected, "the right nodes")
    for view in (await swarm.view(), await swarm.status(), await first_update(swarm)):
        assert {n.peer_id for n in view.live_nodes} == expected
        assert len(view.nodes) == len({n.peer_id for n in view.nodes}), "a node is listed twice"
        placed = [n.peer_id for stage in view.stages for n in stage.nodes]
        assert len(placed) == len(set(placed))
        assert set(placed) <= expected
    assert await metrics_count(swarm) == len(expected)


async def attached(swarm: Swarm, process: Process) -> None:
    """The coordinator has heard of this very process."""
    await swarm.see(
        lambda v: any(n.pid == process.pid and not n.is_gone for n in v.nodes),
        f"{process.name} is attached",
    )


def peers(processes: list[Process]) -> set[str]:
    return {process.peer_id for process in processes}


async def test_everybody_counts_the_same_nodes_through_join_leave_and_quick_rejoins(
    shared: Swarm,
) -> None:
    regulars = peers(shared.nodes)
    await check_all_count(shared, regulars)

    guest = shared.start_node("guest")
    await shared.placed(guest)
    await check_all_count(shared, regulars | {guest.peer_id})

    await shared.resume()
    await shared.advance()
    await check_all_count(shared, regulars | {guest.peer_id})
    guest.signal(signal.SIGINT)  # in the midst of a step: it drains
    assert await shared.ended(guest) == 0
    await shared.pause()
    view = await shared.see(
        lambda v: any(n.peer_id == guest.peer_id and n.state == "left" for n in v.nodes),
        "the guest has left politely",
    )
    told = [e.text for e in view.events]
    assert not any("starts over" in t or "rerouted" in t for t in told), "work was done again"
    await check_all_count(shared, regulars)

    for _ in range(REJOINS):
        guest = shared.start_node("guest")
        await attached(shared, guest)
        shared.kill(guest)
    guest = shared.start_node("guest")
    await shared.placed(guest)
    await check_all_count(shared, regulars | {guest.peer_id})
    guest.signal(signal.SIGINT)
    assert await shared.ended(guest) == 0
    await check_all_count(shared, regulars)

    await shared.resume()
    await shared.advance()
    await shared.pause()
    shared.check_exact(finished=False)
