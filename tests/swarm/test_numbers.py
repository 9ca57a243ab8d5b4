# SPDX-License-Identifier: Apache-2.0
"""Runs whose numbers overflow or diverge, in real processes."""

from pathlib import Path

import pytest

from shoal.coordinator.dashboard.views import RunView
from shoal.coordinator.state import (
    NodeFenced,
    NumbersBackedOff,
    Paused,
    StepCommitted,
    StepOpened,
)
from shoal.protocol.faults import Action, Fault, Moment

from .harness import ENDLESS, Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


async def check_paused(swarm: Swarm, view: RunView) -> None:
    """It says where and why, and nobody is blamed for it."""
    for shown in (view, await swarm.status()):
        assert f"the run diverged in step {view.step + 1}: microbatch" in shown.waiting_for
        assert "at stage" in shown.waiting_for
        assert "NonFinite" in shown.waiting_for
        assert "optimizer.lr" in shown.waiting_for
        assert all(node.marks == 0 for node in shown.nodes)
    assert not swarm.events(NodeFenced)
    assert swarm.last_step == view.step


async def test_numbers_that_one_node_alone_finds_bad_move_to_another(tmp_path: Path) -> None:
    poison = Fault(id="poison", step=3, moment=Moment.GRADIENT_ACCUMULATED, action=Action.POISON)
    async with Swarm(tmp_path, spec(steps=ENDLESS)) as swarm:
        orders = swarm.folder / "faults"
        orders.write_text(poison.model_dump_json() + "\n", encoding="utf-8")
        swarm.start_coordinator()
        node = swarm.start_node("n0", arguments=("--faults", str(orders)))
        await swarm.started([node, *(swarm.start_node(name) for name in ("n1", "n2", "n3"))])
        view = await swarm.see(
            lambda v: any(n.marks for n in v.nodes), "somebody's numbers were his own"
        )
        assert [n.peer_id for n in view.nodes if n.marks] == [node.peer_id]
        assert swarm.node_in(view, node).marks == 1
        assert any("NonFiniteError" in e.text for e in view.events)
        await swarm.advance()
        assert not swarm.events(NodeFenced), "nobody is taken out for it"
        assert not swarm.events(NumbersBackedOff)
        last = {e.step: e.attempt for e in swarm.events(StepOpened)}
        assert set(last.values()) == {1}, "only one microbatch had to move"
        await swarm.stop_and_check()


async def test_a_run_that_diverges_pauses_with_the_reason_and_goes_on_nowhere(
    tmp_path: Path,
) -> None:
    run = spec(steps=ENDLESS, optimizer={"lr": 1e30}, pipeline={"replicas": 2})
    async with Swarm(tmp_path, run) as swarm:
        swarm.start_coordinator()
        nodes = [swarm.start_node(f"n{i}") for i in range(4)]
        view = await swarm.see(lambda v: v.state == "paused", "the run is paused")
        await check_paused(swarm, view)
        # Resumed, it tries the same step again, and no other.
        pauses = len(swarm.events(Paused))
        await swarm.resume()
        await swarm.wait_until(lambda: len(swarm.events(Paused)) > pauses, "it pauses again")
        again = await swarm.see(lambda v: v.state == "paused", "the run is paused again")
        assert again.step == view.step
        await check_paused(swarm, again)
        attempts = [e.attempt for e in swarm.events(StepOpened) if e.step == view.step + 1]
        assert len(attempts) <= 6
        assert all(node.is_running for node in nodes)
        swarm.check_exact(finished=False)


async def test_an_overflow_redoes_the_step_coarser_to_the_bits_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    run = spec(steps=6, model={"init_std": 1000.0})
    async with Swarm(tmp_path, run) as swarm:
        await swarm.start("n0", "n1", "n2", "n3")
        await swarm.finished()
        coarser = swarm.events(NumbersBackedOff)
        assert coarser, "nothing overflowed; the test shows nothing"
        assert [e.loss_scale for e in coarser] == [coarser[0].loss_scale] * len(coarser)
        assert coarser[0].step == 1
        exponents = {r.scale_exponent for r in swarm.events(StepCommitted)}
        assert len(exponents) <= 1 + sum(e.step > 1 for e in coarser)
        committed = swarm.log()
        last = max(i for i, e in enumerate(committed) if isinstance(e, StepCommitted))
        assert not any(isinstance(e, NodeFenced) for e in committed[:last])
        swarm.check_exact()
