# SPDX-License-Identifier: Apache-2.0
"""A standby coordinator takes over; the old one, or one on a copy of the folder, is kept out."""

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.coordinator.sqlite_store import read_event_log
from shoal.coordinator.standby_link import LINK_FILE
from shoal.coordinator.state import RolledBack, StepCommitted, TermOpened
from shoal.protocol.errors import StorageError, TermError
from shoal.protocol.fault_injector import read_fired
from shoal.protocol.faults import COORDINATOR_MOMENTS, Action, Fault, Moment

from .harness import ENDLESS, Process, Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


@dataclass(eq=False)
class StandbySwarm(Swarm):
    """A swarm with two coordinators' folders: `run_folder` is that of whoever leads."""

    led_by: str = "coordinator"

    @property
    def run_folder(self) -> Path:
        return self.folder / ("run" if self.led_by == "coordinator" else "standby")

    @property
    def coordinator(self) -> Process:
        return [p for p in self.processes if p.name == self.led_by][-1]

    @property
    def nodes(self) -> list[Process]:
        return [p for p in self.processes if p.name.startswith("n") and p.is_running]

    @property
    def faults(self) -> Path:
        """What the first coordinator does to itself."""
        return self.folder / "coordinator.faults"

    def start_coordinator(self, *arguments: str) -> Process:
        return super().start_coordinator("--faults", str(self.faults), *arguments)

    def start_standby(self) -> Process:
        return self._start(
            "standby", self.folder / "standby", "launch",
            "--standby", str(self.folder / "run" / LINK_FILE),
            "--folder", str(self.folder / "standby"), "--takeover-s", "3", self._discovery_flag,
        )  # fmt: skip

    def start_at(self, folder: Path, *arguments: str) -> Process:
        return self._start(
            "other", folder, "launch", str(self.folder / "run.toml"), "--folder", str(folder),
            self._discovery_flag, *arguments,
        )  # fmt: skip

    @property
    def copied_step(self) -> int:
        """How far the standby's log goes."""
        try:
            log = list(read_event_log(self.folder / "standby" / "events.sqlite"))
        except StorageError:
            return -1
        kind = StepCommitted.model_fields["kind"].default
        return max((e.payload["step"] for e in log if e.kind == kind), default=0)

    async def stood_by(self) -> None:
        """The standby follows, and has everything that it needs to lead."""
        await self.see(
            lambda v: any(s.connected and not s.events_behind for s in v.standbys),
            "the standby follows",
        )
        wanted = {path.name for path in (self.folder / "run" / "shards").glob("*.bin")}
        await self.wait_until(
            lambda: (
                self.copied_step >= 1
                and wanted == {p.name for p in (self.folder / "standby" / "shards").glob("*.bin")}
            ),
            "it has the log and the data",
        )

    async def end_with(self, num_nodes: int) -> None:
        """Stop, once all nodes are back: one that is away would wait for the run to go on."""
        await self.see(lambda v: len(v.live_nodes) == num_nodes, "all nodes are back")
        await self.stop_and_check()

    async def refused(self, process: Process) -> str:
        """A coordinator that must not start has ended; what it said."""
        process.was_signalled = True  # its exit code is no crash
        assert await self.ended(process) == TermError.exit_code
        return process.log.read_text(encoding="utf-8").strip().splitlines()[-1]


async def test_a_standby_leads_when_the_coordinator_is_killed_and_keeps_it_out_afterwards(
    tmp_path: Path,
) -> None:
    async with StandbySwarm(tmp_path, spec(steps=ENDLESS)) as swarm:
        nodes = await swarm.start("n0", "n1", "n2", "n3")
        swarm.start_standby()
        await swarm.stood_by()
        await swarm.advance(3)
        swarm.kill(swarm.coordinator)
        before = swarm.last_step

        swarm.led_by = "standby"
        await swarm.committed(before + 3)
        assert swarm.events(TermOpened)[-1].term > 1
        assert not swarm.events(RolledBack), "the nodes held the state; nothing was to be redone"
        assert all(node.is_running for node in nodes), "a node gave up meanwhile"

        words = await swarm.refused(swarm.start_at(tmp_path / "run"))
        assert "is led by the coordinator at" in words
        assert "shoal launch --standby" in words
        await swarm.end_with(4)


CI_MOMENT = Moment.COMMIT_WRITTEN


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=() if moment is CI_MOMENT else pytest.mark.full)
        for moment in COORDINATOR_MOMENTS
    ],
)
async def test_a_takeover_at_any_moment_of_a_step_changes_nothing(
    tmp_path: Path, moment: Moment
) -> None:
    async with StandbySwarm(tmp_path, spec(steps=ENDLESS)) as swarm:
        nodes = await swarm.start("n0", "n1", "n2", "n3")
        swarm.start_standby()
        await swarm.stood_by()
        leader = swarm.coordinator
        await killed_at(swarm, moment)
        [fired] = read_fired(swarm.faults)
        assert fired.pid == leader.pid
        open_step = fired.step
        is_recorded = moment is Moment.COMMIT_WRITTEN
        assert swarm.last_step == open_step - (not is_recorded), "it died at another moment"

        swarm.led_by = "standby"
        await swarm.committed(open_step + 3)
        assert swarm.events(TermOpened)[-1].term > 1
        assert not swarm.events(RolledBack), "the nodes held the state; nothing was to be redone"
        assert all(node.is_running for node in nodes), "a node gave up meanwhile"
        await swarm.end_with(4)  # sums, weights and ledger of every step in the heir's log
        swarm.led_by = "coordinator"
        swarm.check_exact(finished=False)  # and in the log of who was killed


async def killed_at(swarm: StandbySwarm, moment: Moment) -> None:
    """The coordinator is killed at this moment of a step that is to come."""
    leader = swarm.coordinator
    leader.was_signalled = swarm._killed = True  # its end is no crash
    swarm._note_resources()
    fault = Fault(id="1", step=swarm.last_step + 5, moment=moment, action=Action.KILL)
    swarm.faults.write_text(fault.model_dump_json() + "\n", encoding="utf-8")
    assert await swarm.ended(leader) == -signal.SIGKILL


async def test_a_coordinator_on_a_copy_of_the_folder_is_kept_out(tmp_path: Path) -> None:
    async with StandbySwarm(tmp_path, spec(steps=ENDLESS, pipeline={"replicas": 1})) as swarm:
        await swarm.start("n0", "n1")
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        words = await swarm.refused(swarm.start_at(tmp_path / "copy"))
        assert "is led by the coordinator at" in words
        await swarm.advance(1)
        swarm.kill(swarm.coordinator)
        words = await swarm.refused(swarm.start_at(tmp_path / "copy"))
        assert "is a copy of the run folder" in words
        assert "--force-term" in words
        swarm.start_coordinator()
        await swarm.advance(2)
        await swarm.end_with(2)


@pytest.mark.full
async def test_a_coordinator_that_comes_back_in_time_is_followed_again(tmp_path: Path) -> None:
    async with StandbySwarm(tmp_path, spec(steps=ENDLESS)) as swarm:
        await swarm.start("n0", "n1", "n2", "n3")
        standby = swarm.start_standby()
        await swarm.stood_by()
        await swarm.advance(2)
        swarm.kill(swarm.coordinator)
        before = swarm.last_step
        swarm.start_coordinator()
        await swarm.committed(before + 3)
        view = await swarm.see(lambda v: any(s.connected for s in v.standbys), "followed again")
        assert view.leads
        assert standby.is_running
        await swarm.end_with(4)
        assert await swarm.ended(standby) == 0
        assert "nothing to take over" in standby.log.read_text(encoding="utf-8")


@pytest.mark.full
async def test_the_old_coordinator_stands_by_for_the_one_that_replaced_it(tmp_path: Path) -> None:
    async with StandbySwarm(tmp_path, spec(steps=ENDLESS)) as swarm:
        await swarm.start("n0", "n1", "n2", "n3")
        swarm.start_standby()
        await swarm.stood_by()
        swarm.kill(swarm.coordinator)
        before = swarm.last_step
        swarm.led_by = "standby"
        await swarm.committed(before + 3)
        old = swarm._start(
            "old", tmp_path / "run", "launch", "--standby", str(tmp_path / "standby" / LINK_FILE),
            "--folder", str(tmp_path / "run"), "--takeover-s", "3", swarm._discovery_flag,
        )  # fmt: skip
        await swarm.see(lambda v: any(s.connected for s in v.standbys), "the old one follows")
        await swarm.advance(3)
        swarm.kill(swarm.coordinator)
        before = swarm.last_step
        swarm.led_by = "coordinator"
        old.name = "coordinator"
        await swarm.committed(before + 3)
        assert not swarm.events(RolledBack)
        await swarm.end_with(4)
