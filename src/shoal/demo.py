# SPDX-License-Identifier: Apache-2.0
"""`shoal demo`: a real swarm on this machine, one node of it killed on the way, or a fault after
another.

Everything goes through what any user has: `shoal launch`, `shoal join`, live.json and the HTTP
API, each process separate and with an identity of its own.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_data_path

from shoal.chaos import Pace
from shoal.compression.registry import parse_boundary
from shoal.coordinator.dashboard.views import RunView
from shoal.coordinator.run_folder import write_file
from shoal.demo_chaos import Chaos
from shoal.demo_display import Display
from shoal.demo_kill import Kill, parse_kill
from shoal.demo_restarter import Restarter
from shoal.demo_summary import Churn, Summary, summarize
from shoal.demo_swarm import Swarm
from shoal.demo_watch import RunWatch
from shoal.protocol.errors import ConfigError, RunFailedError, ShoalError
from shoal.protocol.terminal import EXIT_INTERRUPTED, Terminal

POLL_S = 0.05
STALL_S = 120.0

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
    chaos: int | None = None
    """The seed that faults are drawn by; None for no faults but the kill."""
    boundary: str = "bf16"
    seed: int = 0
    json_file: Path | None = None
    keep_running: bool = False
    folder: Path | None = None

    def run_toml(self) -> str:
        return _RUN_TOML.format(
            seed=self.seed,
            steps=self.steps,
            layers=max(4, self.stages),
            stages=self.stages,
            replicas=self.replicas,
            boundary=parse_boundary(self.boundary).spec,
        )


def parse_trouble(kill: str | None, chaos: int | None, steps: int) -> int | None:
    """The step to kill a node in, if any. Raises `ConfigError` for --kill beside --chaos."""
    if chaos is None:
        return parse_kill("middle" if kill is None else kill, steps)
    if kill is not None:
        raise ConfigError(
            f"--kill {kill} and --chaos {chaos} exclude each other: --chaos draws its own faults. "
            "Give one of them"
        )
    return None


async def run_demo(config: DemoConfig, display: Display) -> Summary:
    """Run the demo to its end. Raises `ShoalError` when it can't; a run that lost something comes
    back as a summary with `failure` set."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = config.folder or user_data_path("shoal") / "demos" / f"{stamp}-{os.getpid()}"
    folder = folder.absolute()
    run_toml = config.run_toml()  # a misspelt codec is refused before anything starts
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--folder {folder} is not empty; each demo is a run of its own")
    swarm = Swarm(folder, run_toml, with_faults=config.chaos is not None)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def interrupted() -> None:
        if stopping.is_set():
            swarm.kill()
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


async def _conduct(swarm: Swarm, config: DemoConfig, display: Display) -> Summary:
    display.say("reading the standard library's sources; the tokenizer is trained at first use")
    swarm.start_coordinator()
    live = await swarm.live()
    started_s = time.time()
    display.say(f"dashboard  {live.dashboard}")
    display.say(f"join       shoal join '{live.link}'")
    for _ in range(config.stages * config.replicas):
        swarm.start_node(live.link)
    watch = RunWatch(swarm, may_restart=config.chaos is not None)
    try:
        if config.chaos is not None:
            view, churn = await _follow_chaos(swarm, watch, config.chaos, started_s, display)
        else:
            kill = None
            if config.kill is not None:
                kill = Kill(swarm, live.link, config.kill, display.say)
            view = await _follow(swarm, watch, kill, display)
            churn = kill.churn if kill is not None else Churn()
    finally:
        await watch.close()
    seconds = time.time() - started_s
    return summarize(view, churn, wanted_steps=config.steps, seconds=seconds)


async def _follow(swarm: Swarm, watch: RunWatch, kill: Kill | None, display: Display) -> RunView:
    """Watch until the run is over; kill and replace a node on the way."""
    progress = _Progress(swarm)
    while True:
        view = await watch.look()
        progress.check(view)
        if view is not None:
            if view.state in ("finished", "failed"):
                return view
            display.progress(view)
            if kill is not None:
                kill.observe(view)
        await asyncio.sleep(POLL_S)


async def _follow_chaos(
    swarm: Swarm, watch: RunWatch, seed: int, started_s: float, display: Display
) -> tuple[RunView, Churn]:
    """Watch until the run is over; have faults happen, and start again what they end."""
    chaos = Chaos(swarm, seed=seed, pace=Pace(), started_s=started_s, say=display.say)
    restarter = Restarter(swarm, display.say, chaos.ended_on_order)
    progress = _Progress(swarm)
    while True:
        view = await watch.look()
        progress.check(view)
        chaos.observe(view, time.time())
        if view is None:
            display.coordinator_is_away()
        elif view.state in ("finished", "failed"):
            return view, chaos.churn(restarter)
        else:
            display.progress(view, chaos.last_words)
        restarter.mend(view)
        await asyncio.sleep(POLL_S)


class _Progress:
    """Notices that nothing moves any more."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._position: tuple[int, int, int, str] | None = None
        self._moved_s = time.monotonic()

    def check(self, view: RunView | None) -> None:
        """Raises `RunFailedError`."""
        if view is None:  # the watch has a limit of its own for that
            return
        position = (view.step, view.attempt, view.receipts_done, view.waiting_for)
        if position != self._position:
            self._position, self._moved_s = position, time.monotonic()
        elif time.monotonic() - self._moved_s > STALL_S:
            raise RunFailedError(
                f"nothing moved for {STALL_S:.0f} s at step {view.step}: "
                f"{view.waiting_for or 'no reason given'} (logs: {self._swarm.folder})"
            )


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
