# SPDX-License-Identifier: Apache-2.0
"""`shoal demo`: a real swarm on this machine, one node of it killed on the way.

Everything goes through what any user has: `shoal launch`, `shoal join`, live.json and the HTTP
API, each process separate and with an identity of its own.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from platformdirs import user_data_path

from shoal.compression.registry import parse_boundary
from shoal.coordinator.dashboard.views import RunView
from shoal.coordinator.run_folder import Live, read_live, write_file
from shoal.demo_summary import Kill, Summary, summarize
from shoal.lifeline import lifeline
from shoal.protocol.errors import ConfigError, RunFailedError, ShoalError, UnreachableError
from shoal.protocol.terminal import EXIT_INTERRUPTED, Terminal
from shoal.status import fetch_view, human_bytes

POLL_S = 0.02
START_DEADLINE_S = 300.0
"""Data preparation included: the tokenizer is trained at first use."""
STALL_S = 120.0
GOODBYE_S = 20.0

_RUN_TOML = """\
name = "demo"
seed = {seed}
steps = {steps}

[model]
dim = 192
num_layers = {layers}
num_heads = 6
num_kv_heads = 2
ffn_dim = 512
seq_len = 128

[data]
source = "stdlib"
tokenizer = "bpe:2048"
max_bytes = 12000000

[batch]
microbatches = 16
microbatch_size = 4

[pipeline]
stages = {stages}
replicas = {replicas}
boundary = "{boundary}"
"""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    steps: int = 20
    stages: int = 2
    replicas: int = 2
    kill: int | None = None
    """The step in whose middle a node is killed; None never kills."""
    boundary: str = "bf16"
    seed: int = 0
    json_file: Path | None = None
    keep_running: bool = False
    folder: Path | None = None


def parse_kill(text: str, steps: int) -> int | None:
    """ "never", a step number, or "middle"."""
    if text == "never":
        return None
    if text == "middle":
        return max(1, steps // 3)
    if not text.isdecimal() or not 1 <= int(text) <= steps:
        raise ConfigError(f"--kill {text!r}: give never, or a step from 1 to {steps}")
    return int(text)


@dataclass(eq=False)
class _Process:
    """A `shoal` command in a session of its own, so that a Ctrl-C here doesn't reach it."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, folder: Path, *arguments: str) -> "_Process":
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli", "-v", "--end-with-stdin", *arguments],
                stdin=lifeline(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(name, process, log)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        if self.alive:
            self.process.send_signal(number)

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


@dataclass
class _Swarm:
    config: DemoConfig
    folder: Path
    coordinator: _Process | None = None
    nodes: list[_Process] = field(default_factory=list)

    def start_coordinator(self) -> None:
        config = self.config
        run_file = self.folder / "run.toml"
        text = _RUN_TOML.format(
            seed=config.seed,
            steps=config.steps,
            layers=max(4, config.stages),
            stages=config.stages,
            replicas=config.replicas,
            boundary=parse_boundary(config.boundary).spec,
        )
        write_file(run_file, text.encode())
        self.coordinator = _Process.start(
            "coordinator", self.folder, "launch", str(run_file), "--folder",
            str(self.run_folder), "--keep-running",
        )  # fmt: skip

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def start_node(self, link: str) -> _Process:
        name = f"node-{len(self.nodes) + 1}"
        node = _Process.start(
            name, self.folder, "join", link, "--folder", str(self.folder / name), "--device",
            os.environ.get("SHOAL_NODE_DEVICE", "auto"),
        )  # fmt: skip
        self.nodes.append(node)
        return node

    async def live(self) -> Live:
        """Where the coordinator is, once it serves."""
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            live = read_live(self.run_folder)
            if live is not None:
                return live
            assert self.coordinator is not None
            if not self.coordinator.alive:
                raise RunFailedError(
                    f"the coordinator ended: {self.coordinator.last_words()} "
                    f"(log: {self.coordinator.log})"
                )
            await asyncio.sleep(POLL_S)
        raise UnreachableError(f"the coordinator did not start within {START_DEADLINE_S:.0f} s")

    async def stop(self) -> None:
        """Ask everybody to end, then make them."""
        processes = [p for p in (self.coordinator, *self.nodes) if p is not None]
        for process in processes:
            process.signal(signal.SIGINT)
        await asyncio.to_thread(_wait_or_kill, processes)


def _wait_or_kill(processes: Sequence[_Process]) -> None:
    deadline = time.monotonic() + GOODBYE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(max(0.0, deadline - time.monotonic()))
        process.signal(signal.SIGKILL)
        process.process.wait()


async def run_demo(config: DemoConfig, display: "Display") -> Summary:
    """Run the demo to its end. Raises `ShoalError` when it can't; a run that lost something comes
    back as a summary with `failure` set."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = config.folder or user_data_path("shoal") / "demos" / f"{stamp}-{os.getpid()}"
    folder = folder.absolute()
    parse_boundary(config.boundary)  # a misspelt codec is refused before anything starts
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--folder {folder} is not empty; each demo is a run of its own")
    swarm = _Swarm(config, folder)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def interrupted() -> None:
        if stopping.is_set():
            for process in (swarm.coordinator, *swarm.nodes):
                if process is not None:
                    process.signal(signal.SIGKILL)
        stopping.set()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    try:
        with display.live():
            summary = await _conduct(swarm, config, display)
        if config.json_file is not None:
            write_file(config.json_file, summary.to_json())
        for line in summary.lines():
            display.say(line)
        display.say(f"export the model with: shoal export {swarm.run_folder} --out DIR")
        if config.keep_running:
            display.say("the dashboard stays up; Ctrl-C ends it")
            with contextlib.suppress(asyncio.CancelledError):
                await stopping.wait()
        return summary
    finally:
        await asyncio.shield(asyncio.ensure_future(swarm.stop()))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _conduct(swarm: _Swarm, config: DemoConfig, display: "Display") -> Summary:
    display.say("reading the standard library's sources; the tokenizer is trained at first use")
    swarm.start_coordinator()
    live = await swarm.live()
    display.say(f"dashboard  {live.dashboard}")
    display.say(f"join       shoal join '{live.link}'")
    for _ in range(config.stages * config.replicas):
        swarm.start_node(live.link)
    kill = Kill(step=config.kill)
    view = await _follow(swarm, config, live, kill, display)
    return summarize(view, kill, wanted_steps=config.steps)


async def _follow(
    swarm: _Swarm, config: DemoConfig, live: Live, kill: Kill, display: "Display"
) -> RunView:
    """Watch until the run is over; kill and replace a node on the way."""
    moved, moved_s = None, time.monotonic()
    victim: _Process | None = None
    replacement: _Process | None = None
    while True:
        view = await _view(swarm, live)
        display.progress(view)
        if view.state in ("finished", "failed"):
            return view
        if victim is None and kill.step is not None and _in_the_middle(view, kill.step):
            victim = _kill_one(swarm, view, kill, display)
        elif (
            victim is not None
            and replacement is None
            and (view.step >= kill.at_step or view.waiting_for)
        ):
            replacement = swarm.start_node(live.link)
            kill.replacement_pid = replacement.process.pid
            display.say("starting a replacement")
        if replacement is not None and kill.rejoined_step is None:
            _note_replacement(view, kill, display)
        position = (view.step, view.attempt, view.receipts_done, view.waiting_for)
        if position != moved:
            moved, moved_s = position, time.monotonic()
        elif time.monotonic() - moved_s > STALL_S:
            raise RunFailedError(
                f"nothing moved for {STALL_S:.0f} s at step {view.step}: "
                f"{view.waiting_for or 'no reason given'} (logs: {swarm.folder})"
            )
        await asyncio.sleep(POLL_S)


async def _view(swarm: _Swarm, live: Live) -> RunView:
    try:
        return await fetch_view(live.dashboard)
    except (ShoalError, httpx.HTTPError):
        assert swarm.coordinator is not None
        if not swarm.coordinator.alive:
            raise RunFailedError(
                f"the coordinator ended: {swarm.coordinator.last_words()}"
            ) from None
        raise


def _in_the_middle(view: RunView, step: int) -> bool:
    """The step is open and at least a quarter of its receipts are in, or it has just passed."""
    if view.step >= step:
        return True
    some = max(1, view.receipts_total // 4)
    return view.step == step - 1 and view.state == "training" and view.receipts_done >= some


def _kill_one(swarm: _Swarm, view: RunView, kill: Kill, display: "Display") -> _Process:
    """SIGKILL a node of the stage with the most nodes."""
    stage = max(view.stages, key=lambda stage: (len(stage.nodes), stage.stage))
    by_pid = {process.process.pid: process for process in swarm.nodes}
    node = next(node for node in stage.nodes if node.pid in by_pid)
    victim = by_pid[node.pid]
    victim.process.kill()
    kill.at_step = view.step + 1
    kill.name, kill.stage = node.name, stage.stage
    display.say(
        f"killed {node.name} (pid {node.pid}, stage {stage.stage}) with SIGKILL in step "
        f"{kill.at_step}, {view.receipts_done} of {view.receipts_total} receipts in"
    )
    return victim


def _note_replacement(view: RunView, kill: Kill, display: "Display") -> None:
    for node in view.live_nodes:
        if node.pid == kill.replacement_pid and node.state in ("ready", "training"):
            kill.rejoined_step = max(view.step + 1, kill.at_step)
            display.say(f"{node.name} took its place in stage {node.stage}")


class Display:
    """Lines for events; progress as a live line on a terminal, as a line a step elsewhere."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._line = "starting"
        self._shown: tuple[int, str] | None = None

    def live(self) -> contextlib.AbstractContextManager[None]:
        return self._terminal.live(lambda: self._line)

    def say(self, text: str) -> None:
        self._terminal.line(text)

    def progress(self, view: RunView) -> None:
        self._line = progress_line(view)
        news = (view.step, view.waiting_for)
        if news != self._shown and not self._terminal.console.is_terminal:
            self._shown = news
            self.say(self._line)


def progress_line(view: RunView) -> str:
    """ "step 5/20  loss 4.312  3,912 tok/s  1.0 MB/step  nodes 2+2"."""
    nodes = "+".join(
        str(sum(n.state in ("training", "ready") for n in stage.nodes)) for stage in view.stages
    )
    loss = f"{view.loss:.3f}" if view.loss is not None else "–"
    moved = view.boundary_bytes_per_step + view.reduce_bytes_per_step
    line = (
        f"step {view.step}/{view.total_steps}  loss {loss}  {view.tokens_per_s:,.0f} tok/s  "
        f"{human_bytes(moved)}/step  nodes {nodes}"
    )
    return f"{line}  waiting: {view.waiting_for}" if view.waiting_for else line


def demo(config: DemoConfig) -> int:
    """The exit code: 0 only if every step was committed and nothing was lost or counted twice."""
    display = Display(Terminal())
    try:
        summary = asyncio.run(run_demo(config, display))
    except asyncio.CancelledError:
        display.say("interrupted; nothing is left running")
        return EXIT_INTERRUPTED
    except ShoalError as error:
        if config.json_file is not None:
            write_file(config.json_file, json.dumps({"failure": str(error)}).encode() + b"\n")
        raise
    if summary.failure:
        display.say(summary.failure)
        return RunFailedError.exit_code
    return 0
