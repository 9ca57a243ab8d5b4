# SPDX-License-Identifier: Apache-2.0
"""A swarm whose processes take faults on order, and whoever starts again what has ended of them."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from shoal.coordinator.dashboard.views import RunView
from shoal.coordinator.sqlite_store import read_event_log
from shoal.coordinator.state import EVENT_KINDS, Event
from shoal.protocol.errors import StorageError
from shoal.protocol.fault_injector import read_fired
from shoal.protocol.faults import Action, Fault, FiredFault

from .harness import DEADLINE_S, Process, Swarm

COORDINATOR = "coordinator"

_POLL_S = 0.1


@dataclass(eq=False)
class SupervisedSwarm(Swarm):
    """Whenever it waits for something, it starts again what has ended: under the same name, in
    the same folder. What ends with an error and without a fault is a failure."""

    left: list[Process] = field(default_factory=list)
    """Processes that ended by themselves, with code 0."""
    _is_over: bool = False
    _events: list[Event] = field(default_factory=list)
    _last_read: int = 0

    def _start(
        self, name: str, folder: Path, *arguments: str, program: Sequence[str] = ("-m", "shoal.cli")
    ) -> Process:
        faults = ("--faults", str(self._file(name)))
        return super()._start(name, folder, *arguments, *faults, program=program)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.faults"

    def newest(self, name: str) -> Process:
        return [p for p in self.processes if p.name == name][-1]

    # ---- faults --------------------------------------------------------------------------

    def order(self, name: str, fault: Fault) -> None:
        with self._file(name).open("a", encoding="utf-8") as file:
            file.write(fault.model_dump_json() + "\n")

    def fired(self, name: str) -> list[FiredFault]:
        """What has been done to the processes of this name."""
        return read_fired(self._file(name))

    def cancel(self, name: str) -> None:
        """What has not been done yet never will be: the process is started anew without it."""
        self.kill(self.newest(name))
        self._file(name).unlink()
        self._start_again(self.newest(name))

    # ---- who has ended -------------------------------------------------------------------

    def _check_waiting(self, what: str, deadline: float) -> None:
        if self._is_over:
            super()._check_waiting(what, deadline)
            return
        if crashed := self._start_what_ended():
            raise AssertionError(f"{', '.join(crashed)} crashed; waited until {what}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not so in time")

    def _start_what_ended(self) -> list[str]:
        """The names of those that ended otherwise than a fault explains."""
        coordinator = self.newest(COORDINATOR)
        if coordinator.is_running and self._suffered(coordinator, Action.TERM):
            return []  # it lets everybody go; who starts before it has ended would be let go again
        crashed = []
        for name in dict.fromkeys([COORDINATOR, *(p.name for p in self.processes)]):
            process = self.newest(name)
            if process.is_running or process.was_signalled:
                continue
            if process.popen.returncode == 0:
                self.left.append(process)
            elif not self._died_of_a_fault(process):
                crashed.append(f"{name} ({process.popen.returncode})")
                continue
            self._start_again(process)
        return crashed

    def _died_of_a_fault(self, process: Process) -> bool:
        return process.popen.returncode == -signal.SIGKILL and self._suffered(process, Action.KILL)

    def _suffered(self, process: Process, action: Action) -> bool:
        return any(f.pid == process.pid and f.action is action for f in self.fired(process.name))

    def _start_again(self, process: Process) -> None:
        process.was_signalled = self._killed = True  # nothing wrong with its end
        if process.name == COORDINATOR:
            self.start_coordinator()
        else:
            self.start_node(process.name)

    async def stop_and_check(self) -> int:
        self._is_over = True
        return await super().stop_and_check()

    async def end(self) -> None:
        self._is_over = True
        await super().end()

    # ---- facts ---------------------------------------------------------------------------

    def log(self) -> list[Event]:
        """As the base says, but reads what is new only: this swarm lives long, and what it has
        read stays when the log is compacted."""
        try:
            for stored in read_event_log(self.run_folder / "events.sqlite", self._last_read):
                self._last_read = stored.sequence
                self._events.append(EVENT_KINDS[stored.kind].model_validate(stored.payload))
        except StorageError:
            pass  # not there yet
        return self._events

    # ---- rest ----------------------------------------------------------------------------

    async def pause(self) -> None:
        """Also while the coordinator is on its way back."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                await self.operate("pause")
                break
            self._check_waiting("the run can be paused", deadline)
            await asyncio.sleep(_POLL_S)
        await self.see(lambda v: v.state == "paused", "the run is paused")

    async def is_whole(self, names: Collection[str], replicas: int) -> None:
        """Wait until all of these nodes hold a stage, as many each as there should be, and no
        process is stopped."""
        await self.wait_until(
            lambda: not any(self._is_stopped(name) for name in (COORDINATOR, *names)),
            "stopped processes go on",
        )
        peers = {self.newest(name).peer_id for name in names}

        def holds(view: RunView) -> bool:
            ready = {n.peer_id for n in view.live_nodes if n.state in ("ready", "training")}
            of_stages = [len([n for n in s.nodes if n.peer_id in ready]) for s in view.stages]
            return ready == peers and set(of_stages) == {replicas}

        await self.see(holds, "everybody is back")

    def _is_stopped(self, name: str) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.newest(name).pid).status() == psutil.STATUS_STOPPED
        return False
