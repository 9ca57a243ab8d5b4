# SPDX-License-Identifier: Apache-2.0
"""The `shoal` command as its users meet it: errors, signals, and a coordinator that moves."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal.coordinator.run_folder import Live, read_live
from shoal.protocol.join_link import JoinLink

from .harness import ENDLESS, Process, Swarm, spec

pytestmark = pytest.mark.swarm

DEADLINE_S = 60.0

RUN_TOML = """\
name = "tiny"
steps = 4
[model]
dim = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
ffn_dim = 64
seq_len = 16
[data]
source = "text:{text}"
tokenizer = "byte"
validation_fraction = 0.0
[batch]
microbatches = 2
microbatch_size = 1
"""

LINK = "shoal://127.0.0.1:{port}/tiny-00000000?fp={fp}&token=AQ&expires={expires}"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 400, encoding="utf-8")
    (tmp_path / "run.toml").write_text(
        RUN_TOML.format(text=tmp_path / "text.txt"), encoding="utf-8"
    )
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HTTP_PROXY": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
        "ALL_PROXY": "http://127.0.0.1:9",
        "grpc_proxy": "http://127.0.0.1:9",
    }


def start(home: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", *arguments],
        cwd=home, env=environment(home), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def shoal(home: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr, which must not hold a traceback."""
    process = start(home, *arguments)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in errors
    return process.returncode, errors


def one_line(errors: str) -> str:
    lines = errors.strip().splitlines()
    assert len(lines) == 1, errors
    assert lines[0].startswith("shoal: ")
    return lines[0]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """Somebody listens on it, and doesn't answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        yield server.getsockname()[1]


def link(port: int, *, lasts_s: float = 3600) -> str:
    return LINK.format(port=port, fp="0" * 64, expires=int(time.time() + lasts_s))


# ---- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "launch"])
@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ('[pipeline]\nboundary = "int9"\n', 2, "did you mean 'int8'"),
        ("[pipeline]\nstagse = 2\n", 2, "did you mean 'stages'"),
        ("[pipeline]\nstages = 3\n", 2, "exceeds model.num_layers"),
    ],
)
def test_a_wrong_run_file_is_refused_before_anything_is_written(
    home: Path, command: str, change: str, code: int, says: str
) -> None:
    file = home / "run.toml"
    file.write_text(file.read_text() + change)
    before = sorted(home.rglob("*"))
    got, errors = shoal(home, command, "run.toml")
    assert (got, says in one_line(errors)) == (code, True), errors
    assert sorted(home.rglob("*")) == before


def test_a_run_file_of_another_version_is_refused(home: Path) -> None:
    file = home / "run.toml"
    file.write_text("version = 99\n" + file.read_text())
    code, errors = shoal(home, "launch", "run.toml", "--folder", "run")
    assert code == 5
    assert "99" in one_line(errors)
    assert not (home / "run").exists()


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("http://127.0.0.1:1/", 6, "malformed"),
        (link(1, lasts_s=-60), 6, "expired"),
        (link(1), 7, "nobody of run tiny-00000000 answers"),
    ],
)
def test_a_link_that_leads_nowhere_says_why(home: Path, text: str, code: int, says: str) -> None:
    got, errors = shoal(home, "join", text, "--folder", "node", "--no-discovery")
    assert (got, says in one_line(errors)) == (code, True), errors


def test_an_unknown_device_is_refused_at_once(home: Path) -> None:
    code, errors = shoal(home, "join", link(1), "--folder", "node", "--device", "tpu")
    assert code == 2
    assert "use auto, cpu, cuda, cuda:1 or mps" in one_line(errors)
    assert not (home / "node").exists()


def test_a_folder_that_cannot_be_made_is_a_storage_error(home: Path) -> None:
    code, errors = shoal(home, "launch", "run.toml", "--folder", "text.txt/run")
    assert code == 4
    assert "text.txt/run" in one_line(errors)
    code, errors = shoal(home, "join", link(1), "--folder", "text.txt/node")
    assert code == 4
    one_line(errors)


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_taken_port_is_a_capacity_error(home: Path, flag: str) -> None:
    with taken_port() as port:
        code, errors = shoal(
            home, "launch", "run.toml", "--folder", "run", "--no-discovery", flag, str(port)
        )
    assert code == 8
    assert str(port) in one_line(errors)
    assert not (home / "run").exists(), "found before any work was done"


def test_wrong_usage_exits_with_two(home: Path) -> None:
    assert shoal(home, "launch")[0] == 2
    assert shoal(home, "launch", "run.toml", "--no-such-flag")[0] == 2
    assert shoal(home, "launch", "run.toml", "--port", "many")[0] == 2


def test_a_run_folder_of_another_spec_or_log_version_stays_as_it_is(home: Path) -> None:
    launched = start(home, "launch", "run.toml", "--folder", "run", "--no-discovery")
    wait_until(lambda: read_live(home / "run") is not None, launched)
    code, errors = shoal(home, "launch", "run.toml", "--folder", "run", "--no-discovery")
    assert code == 8, "a second coordinator"
    assert str(launched.pid) in one_line(errors)
    assert interrupted(launched)[0] == 0

    run = (home / "run" / "run.json").read_bytes()
    (home / "other.toml").write_text(
        (home / "run.toml").read_text().replace("steps = 4", "steps = 5")
    )
    code, errors = shoal(home, "launch", "other.toml", "--folder", "run", "--no-discovery")
    assert code == 2
    assert "steps (5, was 4)" in one_line(errors)
    assert (home / "run" / "run.json").read_bytes() == run

    with contextlib.closing(sqlite3.connect(home / "run" / "events.sqlite")) as database:
        database.execute("PRAGMA user_version = 99")
        database.commit()
    log = (home / "run" / "events.sqlite").read_bytes()
    code, errors = shoal(home, "launch", "run.toml", "--folder", "run", "--no-discovery")
    assert code == 5
    assert "99" in one_line(errors)
    assert (home / "run" / "events.sqlite").read_bytes() == log


# ---- signals -----------------------------------------------------------------------------


def wait_until(holds: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def interrupted(
    process: "subprocess.Popen[str]", number: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """Signals the whole process group, as a terminal does; returns exit code and output."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in errors
    assert "closed network connection" not in errors
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    return process.returncode, output + errors


def test_ctrl_c_while_waiting_for_a_link_file_quits(home: Path) -> None:
    process = start(home, "join", "--link-file", "link", "--folder", "node")
    assert process.stdout is not None
    assert "waiting for a join link" in process.stdout.readline()
    assert interrupted(process)[0] == 130


def test_ctrl_c_during_admission_quits(home: Path) -> None:
    with taken_port() as port:
        process = start(home, "join", link(port), "--folder", "node", "--no-discovery")
        wait_until(
            lambda: any(c.raddr for c in psutil.Process(process.pid).net_connections()), process
        )
        assert interrupted(process, signal.SIGTERM)[0] == 130
    assert not list((home / "node").glob("state-*"))


def test_ctrl_c_during_data_preparation_leaves_nothing_half_made(home: Path) -> None:
    (home / "text.txt").write_text("".join(f"{i} to be or not {i * i}\n" for i in range(200_000)))
    file = home / "run.toml"
    file.write_text(file.read_text().replace('tokenizer = "byte"', 'tokenizer = "bpe:9000"'))
    process = start(home, "launch", "run.toml", "--folder", "run")
    assert process.stdout is not None
    assert "building the tokenizer" in process.stdout.readline()
    assert interrupted(process)[0] == 130
    assert not (home / "run" / "run.json").exists()
    assert not list((home / "cache").rglob(".preparing-*"))


async def test_the_first_ctrl_c_hands_over_and_status_finds_the_run(tmp_path: Path) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS), discovery=True) as swarm:
        leaving, *_ = await swarm.start("a", "b", "c", "d")
        await swarm.placed(leaving)
        helpers = psutil.Process(leaving.pid).children()
        os.killpg(leaving.pid, signal.SIGINT)
        leaving.was_signalled = True
        assert await swarm.ended(leaving) == 0
        assert not psutil.wait_procs(helpers, timeout=10)[1]
        step = (await swarm.view()).step
        await swarm.committed(step + 1)
        assert status(tmp_path)["run_id"] == swarm.live.run_id
        listed = swarm_shoal(tmp_path, "run", "list")
        assert swarm.live.run_id in listed
        assert str(swarm.run_folder) in listed

        out = tmp_path / "exported"
        asked_at = (await swarm.view()).step
        report = swarm_shoal(tmp_path, "export", swarm.live.run_id, "--out", str(out))
        assert (out / "model.safetensors").exists()
        assert int(report.split("step ")[-1].split(",")[0]) >= asked_at

        coordinator = swarm.coordinator
        os.killpg(coordinator.pid, signal.SIGTERM)
        coordinator.was_signalled = True
        assert await swarm.ended(coordinator) == 0
        for node in swarm.nodes:
            assert await swarm.ended(node) == 0
        log = coordinator.log.read_text()
        assert "resume with: shoal launch" in log
        for process in swarm.processes:
            text = process.log.read_text()
            assert "Traceback" not in text
            assert "closed network connection" not in text
        assert read_live(swarm.run_folder) is None


def swarm_shoal(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli", *arguments],
        cwd=folder, check=True, text=True, timeout=DEADLINE_S, stdout=subprocess.PIPE,
        env={**os.environ, "XDG_DATA_HOME": str(folder / "xdg-data"),
             "http_proxy": "http://127.0.0.1:9"},
    ).stdout  # fmt: skip


def status(folder: Path) -> dict[str, object]:
    view: dict[str, object] = json.loads(swarm_shoal(folder, "status", "--json"))
    return view


async def test_the_second_ctrl_c_quits_at_once(tmp_path: Path) -> None:
    async with Swarm(tmp_path, spec(steps=ENDLESS, pipeline={"replicas": 1})) as swarm:
        node, _ = await swarm.start("a", "b")
        swarm.coordinator.signal(signal.SIGSTOP)  # nobody can take the work over now
        try:
            node.signal(signal.SIGINT)
            await swarm.wait_until(
                lambda: "leaving: handing over first" in node.log.read_text(), "it is told"
            )
            node.signal(signal.SIGINT)
            assert await swarm.ended(node, 10) == 130
        finally:
            swarm.coordinator.signal(signal.SIGCONT)
        assert not list(node.folder.glob("state-*"))


# ---- a coordinator that moves ------------------------------------------------------------


async def test_nodes_and_newcomers_find_a_coordinator_that_moved(tmp_path: Path) -> None:
    async with Swarm(
        tmp_path, spec(steps=ENDLESS, pipeline={"stages": 1, "replicas": 1}), discovery=True
    ) as swarm:
        await swarm.start("a")
        link_file = tmp_path / "link"
        await swarm.wait_until(
            lambda: len(JoinLink.parse(link_file.read_text()).discovery) > 1,
            "the link names the node's discovery peer",
        )
        before = swarm.live
        old_link = link_file.read_text().strip()
        swarm.kill(swarm.coordinator)
        with occupied(before):
            moved = _launch(swarm, "--port", str(_free_pair()))
            await swarm.wait_until(
                lambda: (live := read_live(swarm.run_folder)) is not None and live.pid == moved.pid,
                "the coordinator is up again",
            )
            assert swarm.live.session != before.session
            assert swarm.live.discovery_port != before.discovery_port
            step = (await swarm.view()).step
            await swarm.committed(step + 1)

            assert JoinLink.parse(old_link).addresses == (before.admission,)
            newcomer = swarm._start(
                "late", tmp_path / "late", "join", old_link, "--folder", str(tmp_path / "late"),
                "--device", "cpu",
            )  # fmt: skip
            await swarm.wait_until(
                lambda: "joined run" in newcomer.log.read_text(), "the newcomer joins"
            )


def _launch(swarm: Swarm, *arguments: str) -> Process:
    return swarm._start(
        "coordinator", swarm.run_folder, "launch", str(swarm.folder / "run.toml"),
        "--folder", str(swarm.run_folder), "--link-file", str(swarm.folder / "link"), *arguments,
    )  # fmt: skip


@contextlib.contextmanager
def occupied(live: Live) -> Iterator[None]:
    """The old coordinator's addresses: somebody else's now, who doesn't answer."""
    ports = [int(a.rpartition(":")[2]) for a in (live.admission, live.session)]
    with contextlib.ExitStack() as stack:
        for port in (*ports, live.discovery_port):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def _free_pair() -> int:
    """A free port whose successor is free too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port
