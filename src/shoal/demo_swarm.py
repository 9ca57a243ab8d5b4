# SPDX-License-Identifier: Apache-2.0
"""The processes of a swarm on this machine: a coordinator and nodes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.chaos import COORDINATOR
from shoal.coordinator.run_folder import Live, read_live, write_file
from shoal.lifeline import lifeline
from shoal.protocol.errors import RunFailedError, UnreachableError

START_DEADLINE_S = 300.0
"""Data preparation included: the tokenizer is trained at first use."""
GOODBYE_S = 20.0
_POLL_S = 0.02


@dataclass(eq=False)
class Process:
    """A `shoal` command in a session of its own, so that a Ctrl-C here doesn't reach it. It may be
    started again: same name, folder and arguments."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    faults: Path | None = None
    """The file that it reads its faults from."""
    environment: Mapping[str, str] = field(default_factory=dict)
    starts: int = 0
    crashes: int = 0
    ended_s: float | None = None
    """When its end was noticed, monotonic."""
    _popen: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        faults = ["--faults", str(self.faults)] if self.faults is not None else []
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "shoal.cli",
                    "-v",
                    "--end-with-stdin",
                    *self.arguments,
                    *faults,
                ],
                stdin=lifeline(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self.starts += 1
        self.ended_s = None

    @property
    def pid(self) -> int:
        """Of the process that was started last; 0 before."""
        return self._popen.pid if self._popen is not None else 0

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def code(self) -> int | None:
        """As `subprocess` tells it: negative for a signal, None while it runs."""
        return self._popen.poll() if self._popen is not None else None

    def signal(self, number: int) -> None:
        if self._popen is not None and self.alive:
            self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Raises `subprocess.TimeoutExpired`."""
        if self._popen is not None:
            self._popen.wait(timeout_s)

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


@dataclass
class Swarm:
    """A run's processes under one folder: run.toml, run/, and a folder and a log for each node."""

    folder: Path
    run_toml: str
    with_faults: bool = False
    """Each process gets a file of faults, which may be written to at any time."""
    flags: tuple[str, ...] = ()
    """For every process, such as --no-discovery."""
    environment: Mapping[str, str] = field(default_factory=dict)
    coordinator: Process | None = None
    nodes: list[Process] = field(default_factory=list)

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    @property
    def processes(self) -> list[Process]:
        return [p for p in (self.coordinator, *self.nodes) if p is not None]

    def start_coordinator(self) -> None:
        run_file = self.folder / "run.toml"
        write_file(run_file, self.run_toml.encode())
        self.coordinator = self._start(
            COORDINATOR, "launch", str(run_file), "--folder", str(self.run_folder),
            "--keep-running",
        )  # fmt: skip

    def start_node(self, link: str) -> Process:
        name = f"node-{len(self.nodes) + 1}"
        node = self._start(
            name, "join", link, "--folder", str(self.folder / name), "--device",
            os.environ.get("SHOAL_NODE_DEVICE", "auto"),
        )  # fmt: skip
        self.nodes.append(node)
        return node

    def _start(self, name: str, *arguments: str) -> Process:
        process = Process(
            name,
            (*arguments, *self.flags),
            self.folder / f"{name}.log",
            faults=self.folder / f"{name}.faults" if self.with_faults else None,
            environment=self.environment,
        )
        process.start()
        return process

    async def live(self) -> Live:
        """Where the coordinator is, once it serves."""
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            live = read_live(self.run_folder)
            if live is not None:
                return live
            self.require_coordinator()
            await asyncio.sleep(_POLL_S)
        raise UnreachableError(f"the coordinator did not start within {START_DEADLINE_S:.0f} s")

    def require_coordinator(self) -> None:
        """Raises `RunFailedError` when it has ended."""
        assert self.coordinator is not None
        if not self.coordinator.alive:
            raise RunFailedError(
                f"the coordinator ended: {self.coordinator.last_words()} "
                f"(log: {self.coordinator.log})"
            )

    async def stop(self) -> None:
        """Ask everybody to end, then make them."""
        for process in self.processes:
            process.signal(signal.SIGCONT)  # one that a fault has stopped hears nothing else
            process.signal(signal.SIGINT)
        await asyncio.to_thread(_wait_or_kill, self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.signal(signal.SIGKILL)


def _wait_or_kill(processes: Sequence[Process]) -> None:
    deadline = time.monotonic() + GOODBYE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GOODBYE_S)
