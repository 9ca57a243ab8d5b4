# SPDX-License-Identifier: Apache-2.0
"""The shell scripts: they parse, they refuse early, and they know when an environment is stale.

A copy of the scripts runs in a folder with a space in its name, against a fake Python that takes
pip's orders and writes them down; nothing is installed.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELL_SCRIPTS = ("scripts/_environment.sh", "scripts/demo", "scripts/test", "scripts/check",
                 "scripts/protoc", ".ci/run", "deploy/install.sh")  # fmt: skip
COMMANDS = tuple(name for name in SHELL_SCRIPTS if not name.endswith("_environment.sh"))
LAYERS = ("node", "protocol", "coordinator", "compression")

FAKE_PYTHON = """#!/bin/sh
# Answers as a supported Python; `-m venv` makes a folder with itself inside; pip only takes notes.
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/shoal" ;;
    "-m pip "*) shift 2; echo "$*" >> "$FAKE_NOTES"
        case "$*" in *"$FAKE_FAILS"*) echo "no such wheel"; exit 1 ;; esac ;;
    "demo"*) echo "ran $*" ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Checkout:
    """A copy of what the scripts need, with the notes of its fake Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.notes = folder / "notes"
        self.python = folder / "fake-python"
        (self.root / "src" / "shoal").mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        for layer in LAYERS:
            (self.root / layer).mkdir()
            (self.root / "src" / "shoal" / layer).symlink_to(f"../../{layer}")
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def demo(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs scripts/demo from elsewhere; `variables` go to its environment."""
        environment = {
            name: value for name, value in os.environ.items()
            if not name.startswith(("SHOAL_", "PIP_"))
        }  # fmt: skip
        environment |= {
            "PYTHON": str(self.python),
            "REAL_PYTHON": sys.executable,
            "FAKE_NOTES": str(self.notes),
            "FAKE_FAILS": "(nothing)",
            **variables,
        }
        return subprocess.run(
            [str(self.root / "scripts" / "demo"), *arguments],
            cwd="/", env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def installs(self) -> list[str]:
        """What pip was told since the last time, shortened to what is asked for."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.notes.unlink(missing_ok=True)
        return [line.partition("--progress-bar off ")[2] for line in lines]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def torch_pin() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_script_parses(name: str) -> None:
    answer = subprocess.run(["bash", "-n", str(ROOT / name)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_script_is_executable(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)


def test_an_unsupported_python_is_refused_in_one_line(checkout: Checkout, tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)

    answer = checkout.demo(PYTHON=str(old))

    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert str(old) in line
    assert "3.11, 3.12 or 3.13" in line
    assert not (checkout.root / ".venv").exists()


def test_without_any_python_the_remedy_is_named(checkout: Checkout, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "env"):
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)

    answer = checkout.demo(PYTHON="", PATH=str(tools))

    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert "apt install python3" in answer.stderr


def test_symbolic_links_that_came_out_as_files_are_explained(checkout: Checkout) -> None:
    link = checkout.root / "src" / "shoal" / "protocol"
    link.unlink()
    link.write_text("../../protocol")

    answer = checkout.demo()

    assert answer.returncode == 2
    assert "src/shoal/protocol" in answer.stderr
    assert "WSL2" in answer.stderr
    assert checkout.installs() == []


def test_demo_installs_torch_first_then_shoal_and_passes_arguments_on(checkout: Checkout) -> None:
    answer = checkout.demo("--steps", "3")

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "ran demo --steps 3\n"
    assert checkout.installs() == [torch_pin(), "-c constraints.txt -e ."]


def test_a_second_run_installs_nothing_and_says_nothing(checkout: Checkout) -> None:
    checkout.demo()
    checkout.installs()

    answer = checkout.demo()

    assert answer.returncode == 0
    assert answer.stderr == ""
    assert checkout.installs() == []


def test_changed_dependencies_are_installed_into_the_same_environment(checkout: Checkout) -> None:
    checkout.demo()
    checkout.installs()
    kept = checkout.root / ".venv" / "kept"
    kept.touch()
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")

    checkout.demo()

    assert checkout.installs() == [torch_pin(), "-c constraints.txt -e ."]
    assert kept.exists()


def test_a_failed_install_shows_why_and_is_redone_from_scratch(checkout: Checkout) -> None:
    failed = checkout.demo(FAKE_FAILS="-e .")
    assert failed.returncode == 1
    assert "no such wheel" in failed.stderr
    assert "install.log" in failed.stderr
    half_installed = checkout.root / ".venv" / "half-installed"
    half_installed.touch()
    checkout.installs()

    again = checkout.demo()

    assert again.returncode == 0, again.stderr
    assert not half_installed.exists()
    assert checkout.installs() == [torch_pin(), "-c constraints.txt -e ."]


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.demo()
    checkout.installs()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))

    checkout.demo()

    assert checkout.installs() == [torch_pin(), "-c constraints.txt -e ."]


def test_torch_alone_comes_from_the_index_that_was_asked_for(checkout: Checkout) -> None:
    checkout.demo(SHOAL_TORCH_INDEX="https://example.org/cpu")

    assert checkout.installs() == [
        f"--index-url https://example.org/cpu {torch_pin()}",
        "-c constraints.txt -e .",
    ]


def test_an_environment_of_the_users_own_is_left_alone(checkout: Checkout) -> None:
    own = checkout.root / ".venv"
    own.mkdir()
    (own / "mine").touch()

    answer = checkout.demo()

    assert answer.returncode == 2
    assert "SHOAL_VENV" in answer.stderr
    assert [path.name for path in own.iterdir()] == ["mine"]


def test_a_process_left_behind_by_the_tests_is_named_and_ended() -> None:
    environment = {**os.environ, "SHOAL_TEST_SESSION": "of-this-test"}
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert left.stdout is not None
        assert left.stdout.readline() == "up\n"
        script = (
            "import leftovers, sys; leftovers.GRACE_S = 0.1; sys.exit(leftovers.main(sys.argv[1]))"
        )
        answer = subprocess.run(
            [sys.executable, "-c", script, "of-this-test"],
            cwd=ROOT / "scripts", capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert answer.returncode == 1
        assert str(left.pid) in answer.stderr
        assert left.wait(timeout=30) == -signal.SIGKILL
    finally:
        left.kill()
        left.communicate()


def test_with_nothing_left_behind_leftovers_says_nothing() -> None:
    answer = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "leftovers.py"), "of-nobody"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == 0
    assert answer.stdout + answer.stderr == ""
