# SPDX-License-Identifier: Apache-2.0
"""`shoal demo` as a user runs it: what it prints, writes, kills, and leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(280)]

KEYS = {
    "steps_done",
    "steps_lost",
    "microbatches_missing",
    "microbatches_double",
    "nodes_killed",
    "nodes_joined_late",
    "loss_first",
    "loss_last",
    "tokens_per_s",
    "bytes_moved",
    "weights_digest",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_demo(home: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {
            "XDG_DATA_HOME": str(home / "data"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "DEMO_TEST": str(tmp_path),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli", "demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
    assert leftovers(tmp_path) == []


def leftovers(tmp_path: Path) -> list[str]:
    """Processes that carry the demo's environment; they get three seconds to go."""
    deadline = time.monotonic() + 3
    found = ["?"]
    while found and time.monotonic() < deadline:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DEMO_TEST") == str(tmp_path):
                    found.append(" ".join(process.cmdline())[:120])
            except (psutil.Error, OSError):
                continue
        time.sleep(0.05)
    return found


def finished(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


@dataclass
class Demos:
    """Runs demos of eight steps to their end; an undisturbed one once for each shape."""

    start: Start
    folder: Path
    undisturbed: dict[tuple[str, ...], dict[str, Any]]

    def summary(self, *arguments: str) -> tuple[dict[str, Any], str]:
        """(summary, output)."""
        file = self.folder / f"{len(list(self.folder.glob('*.json')))}.json"
        file.write_text("overwritten")
        output = finished(self.start("--steps", "8", *arguments, "--json", str(file)))
        summary = json.loads(file.read_text())
        assert "dashboard  http://127.0.0.1:" in output
        assert "shoal join 'shoal://127.0.0.1:" in output
        assert summary.keys() >= KEYS
        assert summary["tokens_per_s"].keys() == {"before", "during", "after"}
        assert summary["steps_done"] == 8
        assert summary["steps_lost"] == 0
        assert summary["microbatches_missing"] == summary["microbatches_double"] == 0
        assert summary["loss_last"] < summary["loss_first"]
        assert summary["bytes_moved"] > 0
        assert len(summary["weights_digest"]) == 64
        return summary, output

    def digest(self, *shape: str) -> str:
        """Of the undisturbed run's weights."""
        if shape not in self.undisturbed:
            summary, _ = self.summary(*shape, "--kill", "never")
            assert summary["nodes_killed"] == 0
            assert "faults" not in summary
            self.undisturbed[shape] = summary
        return str(self.undisturbed[shape]["weights_digest"])


@pytest.fixture(scope="module")
def known_runs() -> dict[tuple[str, ...], dict[str, Any]]:
    return {}


@pytest.fixture
def demos(
    start_demo: Start, tmp_path: Path, known_runs: dict[tuple[str, ...], dict[str, Any]]
) -> Demos:
    return Demos(start_demo, tmp_path, known_runs)


def test_a_killed_node_changes_nothing_of_the_result(demos: Demos) -> None:
    killed, _ = demos.summary("--kill", "3")
    assert killed["nodes_killed"] == 1
    assert killed["killed_in_step"] == 3
    assert killed["weights_digest"] == demos.digest()


@pytest.mark.parametrize(
    ("seed", "shape"),
    [
        (9, ()),  # a node killed, then the coordinator
        pytest.param(6, (), marks=pytest.mark.full),
        pytest.param(26, (), marks=pytest.mark.full),
        pytest.param(3, ("--replicas", "1"), marks=pytest.mark.full),
        pytest.param(4, ("--stages", "1"), marks=pytest.mark.full),
    ],
)
def test_faults_drawn_by_a_seed_change_nothing_of_the_result(
    demos: Demos, seed: int, shape: tuple[str, ...]
) -> None:
    disturbed, output = demos.summary(*shape, "--chaos", str(seed))
    faults = disturbed["faults"]
    assert faults, output
    for fault in faults:
        assert fault.keys() >= {
            "step", "moment", "action", "node", "stage", "seconds", "at_s", "recovered_after_s",
        }  # fmt: skip
        assert fault["recovered_after_s"] is not None, output
    killed = [f for f in faults if f["action"] == "kill" and f["stage"] is not None]
    assert disturbed["nodes_killed"] == len(killed)
    assert re.search(rf"^faults survived +{len(faults)} \(", output, re.MULTILINE)
    assert disturbed["weights_digest"] == demos.digest(*shape)


def test_other_shapes_and_codecs_work(start_demo: Start, tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    arguments = ("--steps", "2", "--stages", "3", "--replicas", "1", "--kill", "never")
    finished(start_demo(*arguments, "--boundary", "int8", "--seed", "7", "--json", str(file)))
    assert json.loads(file.read_text())["steps_done"] == 2


def test_ctrl_c_ends_the_whole_swarm(start_demo: Start) -> None:
    process = start_demo("--steps", "500", "--kill", "never")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--kill", "99", "--steps", "8"), "give never, or a step from 1 to 8"),
        (("--boundary", "int7"), "int8"),
        (("--kill", "3", "--chaos", "1"), "--kill 3 and --chaos 1 exclude each other"),
    ],
)
def test_wrong_arguments_end_in_one_line(
    start_demo: Start, arguments: tuple[str, ...], cause: str
) -> None:
    process = start_demo(*arguments)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert cause in output.strip().splitlines()[-1]
    assert "Traceback" not in output
