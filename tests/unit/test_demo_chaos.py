# SPDX-License-Identifier: Apache-2.0
"""Faults are ordered one at a time, from whoever is drawn, and what they did is noted."""

from pathlib import Path
from typing import Any

import pytest

from shoal.chaos import Pace
from shoal.demo_chaos import PATIENCE_S, Chaos
from shoal.demo_restarter import Restarter
from shoal.protocol.fault_injector import FIRED_SUFFIX
from shoal.protocol.faults import Action, Fault, FiredFault, Moment, parse_fault

from .fake_demo_swarm import fake_swarm, load_fake_view

START_S = 1000.0
view = load_fake_view().training_view


class Scene:
    """A swarm, its chaos, and the other side of the fault files."""

    def __init__(self, folder: Path, seed: int = 1, **pace: Any) -> None:
        self.swarm = fake_swarm(folder)
        self.said: list[str] = []
        self.chaos = Chaos(
            self.swarm, seed=seed, pace=Pace(**pace), started_s=START_S, say=self.said.append
        )

    def ordered(self) -> list[tuple[Path, Fault]]:
        found = []
        for process in self.swarm.processes:
            assert process.faults is not None
            if process.faults.exists():
                lines = process.faults.read_text(encoding="utf-8").splitlines()
                found += [(process.faults, parse_fault(line)) for line in lines]
        return sorted(found, key=lambda pair: int(pair[1].id.rpartition("-")[2]))

    def fire(self, file: Path, fault: Fault, *, time_s: float, pid: int = 0, step: int = 0) -> None:
        """As the process does it."""
        fired = FiredFault(
            id=fault.id, step=step or fault.step, moment=fault.moment, action=fault.action,
            time_s=time_s, pid=pid,
        )  # fmt: skip
        with file.with_name(file.name + FIRED_SUFFIX).open("a", encoding="utf-8") as fired_file:
            fired_file.write(fired.model_dump_json() + "\n")

    def order_until(self, action: Action) -> tuple[Path, Fault]:
        """Go on, fault by fault, until one of this kind has been ordered for a node."""
        for number in range(1, 300):
            now_s = START_S + 100 * number
            self.chaos.observe(view(10 * number, total_steps=10_000), now_s)
            file, fault = self.ordered()[-1]
            if fault.action is action and file.name.startswith("node"):
                return file, fault
            self.fire(file, fault, time_s=now_s)
            self.chaos.observe(view(fault.step, total_steps=10_000), now_s + 1)
        raise AssertionError(f"no {action} was drawn")


def test_first_fault_is_ordered_after_the_first_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.chaos.observe(view(0, history=[]), START_S + 30)
    assert scene.ordered() == []
    scene.chaos.observe(view(1), START_S + 31)
    ((file, fault),) = scene.ordered()
    assert fault.id == "chaos-1-0"
    assert fault.step == 3
    assert file.name.endswith(".faults")


def test_what_an_earlier_chaos_has_done_is_not_taken_for_the_own(tmp_path: Path) -> None:
    earlier = Scene(tmp_path, seed=1)
    earlier.chaos.observe(view(1), START_S)
    ((file, fault),) = earlier.ordered()
    earlier.fire(file, fault, time_s=START_S + 1)
    later = Scene(tmp_path, seed=1001)
    later.chaos.observe(view(20), START_S + 100)
    assert len({fault.id for _, fault in later.ordered()}) == 2
    later.chaos.observe(view(20), START_S + 101)
    assert later.chaos.records == []


def test_no_second_fault_before_the_run_has_gone_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.chaos.observe(view(1), START_S)
    ((file, fault),) = scene.ordered()
    scene.chaos.observe(view(2), START_S + PATIENCE_S - 1)
    scene.fire(file, fault, time_s=START_S + 25)
    scene.chaos.observe(view(2), START_S + 100)
    assert len(scene.ordered()) == 1
    assert scene.chaos.unsettled
    scene.chaos.observe(view(4), START_S + 101)
    assert len(scene.ordered()) == 2


def test_record_says_what_was_done_and_how_long_the_next_step_took(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    file, fault = scene.order_until(Action.STOP)
    scene.fire(file, fault, time_s=50_000.0, step=fault.step + 1)
    needed = fault.step + 1 + (fault.moment in (Moment.COMMITTED, Moment.PREPARED))
    scene.chaos.observe(view(needed - 1, total_steps=10_000), 50_001.0)
    record = scene.chaos.records[-1]
    assert record.recovered_after_s is None
    scene.chaos.observe(view(needed, total_steps=10_000), 50_002.5)
    assert record.recovered_after_s == 2.5
    assert (record.step, record.moment, record.action) == (
        fault.step + 1, fault.moment.value, "stop",
    )  # fmt: skip
    assert record.at_s == 49_000.0
    assert record.seconds == fault.seconds > 0
    assert record.stage in (0, 1, 2)
    assert record.node != "coordinator"
    assert any(record.node in line and "stopped for" in line for line in scene.said)


@pytest.mark.parametrize("moment", [Moment.COMMIT_WRITTEN, Moment.STEP_OPENED])
def test_a_step_that_was_committed_already_is_no_recovery(tmp_path: Path, moment: Moment) -> None:
    for seed in range(100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        scene = Scene(folder, seed)
        scene.chaos.observe(view(1), START_S)
        ((file, fault),) = scene.ordered()
        if fault.moment is moment:
            break
    scene.fire(file, fault, time_s=START_S + 1)
    scene.chaos.observe(view(fault.step), START_S + 2)
    assert (scene.chaos.records[0].recovered_after_s is None) == (moment is Moment.COMMIT_WRITTEN)


def test_a_fault_whose_moment_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.chaos.observe(view(1), START_S)
    scene.chaos.observe(view(4), START_S + PATIENCE_S + 1)
    assert len(scene.ordered()) == 2
    file, late = scene.ordered()[0]
    scene.fire(file, late, time_s=START_S + 40)
    scene.chaos.observe(view(5), START_S + 41)
    assert [record.at_s for record in scene.chaos.records] == [40.0]


def test_an_end_on_order_is_known_from_its_pid(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    file, fault = scene.order_until(Action.KILL)
    victim = next(p for p in scene.swarm.nodes if p.faults == file)
    assert not scene.chaos.ended_on_order(victim)
    scene.fire(file, fault, time_s=60_000.0, pid=victim.pid)
    victim.signal(9)
    assert scene.chaos.ended_on_order(victim)
    victim.start()
    assert not scene.chaos.ended_on_order(victim)


def test_churn_counts_what_was_killed(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    restarter = Restarter(scene.swarm, scene.said.append, scene.chaos.ended_on_order)
    assert scene.chaos.churn(restarter).first_step == 0
    file, fault = scene.order_until(Action.KILL)
    before = scene.chaos.churn(restarter).nodes_killed
    scene.fire(file, fault, time_s=60_000.0)
    scene.chaos.observe(None, 60_000.1)
    churn = scene.chaos.churn(restarter)
    assert churn.nodes_killed == before + 1
    assert churn.faults == scene.chaos.records
    assert churn.first_step == scene.chaos.records[0].step


def test_nothing_is_ordered_while_quiet_or_after_the_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.chaos.quiet = True
    scene.chaos.observe(view(50), START_S + 500)
    scene.chaos.quiet = False
    scene.chaos.observe(view(50, state="finished"), START_S + 501)
    assert scene.ordered() == []
