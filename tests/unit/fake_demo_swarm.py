# SPDX-License-Identifier: Apache-2.0
"""A demo's swarm without processes: they live and end as a test says."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from shoal.demo_swarm import Process, Swarm


def load_fake_view() -> ModuleType:
    # By path, so that it doesn't matter how pytest was started.
    path = Path(__file__).parent / "coordinator" / "fake_view.py"
    spec = importlib.util.spec_from_file_location("demo_fake_view", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_fake_view"] = module
    spec.loader.exec_module(module)
    return module


@dataclass(eq=False)
class FakeProcess(Process):
    """Its pids count up from `first_pid`."""

    first_pid: int = 0
    ended_with: int | None = None

    def start(self) -> None:
        self.starts += 1
        self.ended_s = self.ended_with = None

    @property
    def pid(self) -> int:
        return self.first_pid + 100 * (self.starts - 1)

    @property
    def code(self) -> int | None:
        return self.ended_with

    @property
    def alive(self) -> bool:
        return self.ended_with is None

    def signal(self, number: int) -> None:
        if self.alive:
            self.ended_with = -number


def fake_swarm(folder: Path) -> Swarm:
    """A coordinator with pid 3000, and nodes whose pids are those of `fake_view.training_view`."""
    swarm = Swarm(folder, "", with_faults=True)
    swarm.coordinator = _process(folder, "coordinator", 3000)
    swarm.nodes = [_process(folder, f"node-{n}", 4000 + n) for n in range(6)]
    return swarm


def _process(folder: Path, name: str, first_pid: int) -> FakeProcess:
    log = folder / f"{name}.log"
    log.write_text("started\nlast words\n", encoding="utf-8")
    process = FakeProcess(name, (), log, folder / f"{name}.faults", first_pid=first_pid)
    process.start()
    return process
