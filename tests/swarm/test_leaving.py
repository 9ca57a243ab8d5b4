# SPDX-License-Identifier: Apache-2.0
"""Nodes get notice and leave in order: what they computed counts, and nobody waits for them."""

import signal
from pathlib import Path

import pytest

from shoal.coordinator.dashboard.views import NodeView
from shoal.coordinator.state import NodeFenced, RolledBack, StepCommitted
from shoal.protocol.ids import Incarnation

from .harness import ENDLESS, Process, Swarm, spec
from .test_kill import has_finished_its_share

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

PATIENT = {"lease_s": 60.0}
"""A node that is stopped for a test is not fenced for its silence meanwhile."""


async def said(swarm: Swarm, text: str) -> None:
    """Wait until the run's event lines have it."""
    await swarm.see(lambda v: any(text in e.text for e in v.events), f"somebody says {text!r}")


def counted_in(swarm: Swarm, step: int, node: NodeView) -> int:
    (record, *_) = [r for r in swarm.events(StepCommitted) if r.step == step]
    assert node.stage is not None
    return len(record.contributions[node.stage].get(Incarnation(node.incarnation), ()))


async def stand_still(swarm: Swarm) -> tuple[Process, NodeView, int]:
    """A stopped node of stage 1, a node of stage 0 that has done its share of the open step, and
    that step's number."""
    view = await swarm.view()
    frozen = swarm.process_of(view.stages[1].nodes[0])
    while True:
        step = (await swarm.stop_in_mid_step(frozen)).step + 1
        done = await has_finished_its_share(swarm, 0)
        if done is not None:
            return frozen, done, step
        frozen.signal(signal.SIGCONT)
        await swarm.advance(1)


def finish(swarm: Swarm, process: Process, *flags: str) -> Process:
    """`shoal node finish`."""
    folder = str(process.folder)
    return swarm._start("finish", process.folder, "node", "finish", "--folder", folder, *flags)


async def test_nodes_with_notice_leave_in_mid_step_and_change_no_bit(tmp_path: Path) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS, fault=PATIENT)) as swarm:
        await swarm.start("n0", "n1", "n2", "n3")

        # What has a receipt counts; nothing of it is computed again.
        frozen, leaver, step = await stand_still(swarm)
        process = swarm.process_of(leaver)
        process.signal(signal.SIGTERM)
        await said(swarm, f"{leaver.name} leaves within 30 s")
        assert process.is_running, "its sums are waited for"
        frozen.signal(signal.SIGCONT)
        assert await swarm.ended(process) == 0
        await swarm.committed(step)
        assert counted_in(swarm, step, leaver) > 0
        lines = [e.text for e in (await swarm.view()).events]
        assert not any("rerouted" in text or "starts over" in text for text in lines)

        # A step that lasts longer than the grace: the others do its share again, and it is gone.
        successor = swarm.start_node("n4")
        await swarm.placed(successor)
        await swarm.advance(3)
        frozen, leaver, step = await stand_still(swarm)
        process = swarm.process_of(leaver)
        asked = finish(swarm, process, "--grace", "6")
        assert await swarm.ended(process) == 0
        assert await swarm.ended(asked) == 0
        assert swarm.last_step < step, "the step was still open"
        frozen.signal(signal.SIGCONT)
        await swarm.committed(step)
        assert counted_in(swarm, step, leaver) == 0
        output = asked.log.read_text(encoding="utf-8")
        assert "is asked to finish" in output
        assert "has handed over and left" in output

        await swarm.stop_and_check()
        reasons = [e.reason for e in swarm.events(NodeFenced)]
        assert not any("sign of life" in r or "heart beats" in r for r in reasons), reasons


async def test_a_stages_last_node_hands_its_state_to_one_that_waits(tmp_path: Path) -> None:
    run = spec(steps=ENDLESS, pipeline={"replicas": 1}, fault=PATIENT)
    async with Swarm(tmp_path, run) as swarm:
        await swarm.start("n0", "n1")
        spare = swarm.start_node("n2")
        await swarm.see(lambda v: len(v.live_nodes) == 3, "a third node waits")
        leaver = swarm.process_of((await swarm.view()).stages[1].nodes[0])
        if swarm.node_in(await swarm.view(), spare).stage is not None:
            leaver = swarm.process_of((await swarm.view()).stages[0].nodes[0])
        before = swarm.last_step
        leaver.signal(signal.SIGTERM)
        assert await swarm.ended(leaver) == 0
        await swarm.committed(before + 5)
        assert not swarm.events(RolledBack)
        await swarm.stop_and_check()


@pytest.mark.full
async def test_both_nodes_of_a_stage_leave_at_once_and_others_go_on(tmp_path: Path) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS, fault=PATIENT)) as swarm:
        await swarm.start("n0", "n1", "n2", "n3")
        leavers = [swarm.process_of(n) for n in (await swarm.view()).stages[0].nodes]
        for leaver in leavers:
            leaver.signal(signal.SIGTERM)
        for leaver in leavers:
            assert await swarm.ended(leaver) == 0
        before = swarm.last_step
        newcomer = swarm.start_node("n4")
        await swarm.committed(before + 3)
        await swarm.placed(newcomer)
        assert not swarm.events(RolledBack)
        await swarm.stop_and_check()


@pytest.mark.full
async def test_a_node_that_dies_is_known_by_its_broken_connection_not_by_its_silence(
    tmp_path: Path,
) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS, fault=PATIENT)) as swarm:
        await swarm.start("n0", "n1", "n2", "n3")
        victim = (await swarm.view()).stages[1].nodes[0]
        await swarm.stop_in_mid_step(swarm.process_of(victim))
        swarm.kill(swarm.process_of(victim))
        await swarm.advance(2)
        (fenced,) = [e for e in swarm.events(NodeFenced) if e.incarnation == victim.incarnation]
        assert fenced.reason == "connection lost"
        await swarm.stop_and_check()
