# SPDX-License-Identifier: Apache-2.0
"""A swarm on this machine under faults, in stretches: undisturbed and disturbed in turn, so that
whatever else changes the machine's speed cancels out."""

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outcomes import LogSize, Outcome, Result, Stretch

from shoal.chaos import Pace
from shoal.coordinator.dashboard.views import RunView
from shoal.demo import DemoConfig
from shoal.demo_chaos import Chaos
from shoal.demo_restarter import Restarter
from shoal.demo_swarm import Swarm
from shoal.demo_watch import RunWatch
from shoal.protocol.errors import RunFailedError

ENDLESS_STEPS = 1_000_000
SAMPLE_S = 2.0
STALL_S = 180.0
SETTLE_S = 120.0
"""How long a node that was started again may take until it trains."""

_SOON_S = 0.05  # while a fault is on its way, or the run has yet to go on after one
_LATER_S = 0.4
_WARM_UP_STEPS = 3

TINY = """\
name = "soak"
seed = {seed}
steps = {steps}

[model]
dim = 64
num_layers = 2
num_heads = 4
num_kv_heads = 2
ffn_dim = 128
seq_len = 32

[data]
source = "stdlib"
tokenizer = "byte"
max_bytes = 200000

[batch]
microbatches = 4
microbatch_size = 2

[pipeline]
stages = 2
replicas = {replicas}

[fault]
snapshot_every = 200
"""


@dataclass(frozen=True, slots=True)
class Plan:
    folder: Path
    size: str = "tiny"
    """ "tiny" (the tests' model, tens of steps a second) or "demo" (a second a step)."""
    nodes: int = 4
    seed: int = 1
    discovery: bool = True

    def run_toml(self) -> str:
        replicas = -(-self.nodes // 2)
        if self.size == "demo":
            demo = DemoConfig(steps=ENDLESS_STEPS, replicas=replicas, seed=self.seed)
            return demo.run_toml()
        return TINY.format(steps=ENDLESS_STEPS, replicas=replicas, seed=self.seed)


Say = Callable[[str], None]


async def run_session(plan: Plan, stretches: Sequence[Stretch], say: Say) -> Result:
    """Run the stretches one after another, then stop the run in order; its folder holds the
    snapshot of the last step. Raises `ShoalError` when the run doesn't go on."""
    flags = () if plan.discovery else ("--no-discovery",)
    swarm = Swarm(plan.folder, plan.run_toml(), with_faults=True, flags=flags)
    try:
        swarm.start_coordinator()
        live = await swarm.live()
        say(f"dashboard  {live.dashboard}")
        for _ in range(plan.nodes):
            swarm.start_node(live.link)
        session = _Session(plan, swarm, say)
        async with session.watching(), session.sampling():
            await session.settle()
            for stretch in stretches:
                await session.run(stretch)
            await session.stop()
        return session.result
    finally:
        await asyncio.shield(asyncio.ensure_future(swarm.stop()))


class _Session:
    def __init__(self, plan: Plan, swarm: Swarm, say: Say) -> None:
        self.result = Result()
        self._plan = plan
        self._swarm = swarm
        self._say = say
        self._started_s = time.time()
        self._watch = RunWatch(swarm, may_restart=True)
        self._chaos = self._new_chaos(Pace())
        self._chaos.quiet = True
        self._restarter = Restarter(swarm, say, lambda p: self._chaos.ended_on_order(p))
        self._taken: dict[int, int] = {}  # by the coordinator's pid
        self._highest = 0
        self._moved_s = time.monotonic()

    def _new_chaos(self, pace: Pace) -> Chaos:
        # Another seed for each stretch, so that they don't repeat each other.
        return Chaos(
            self._swarm,
            seed=self._plan.seed + 1000 * len(self.result.outcomes),
            pace=pace,
            started_s=self._started_s,
            say=self._say,
        )

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._watch.close()

    @contextlib.asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def settle(self) -> None:
        """Until every node trains, some steps are made, and no fault is on its way."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            view = await self._turn()
            if view is not None and not self._chaos.unsettled and self._all_train(view):
                return
        waiting = [p.name for p in self._swarm.processes if not p.alive]
        raise RunFailedError(
            f"after {SETTLE_S:.0f} s not every node trains (not running: {waiting or 'none'}; "
            f"logs: {self._plan.folder})"
        )

    def _all_train(self, view: RunView) -> bool:
        placed = {n.pid for stage in view.stages for n in stage.nodes if n.state == "training"}
        wanted = len(view.stages) * -(-self._plan.nodes // 2)
        mine = {process.pid for process in self._swarm.nodes}
        enough = min(self._plan.nodes, wanted)
        return view.step >= _WARM_UP_STEPS and len(placed & mine) >= enough

    async def run(self, stretch: Stretch) -> None:
        disturbed = stretch.every_s is not None
        if stretch.every_s is not None:
            self._chaos = self._new_chaos(Pace(every_s=stretch.every_s, every_steps=None))
            self._chaos.restart_clock(time.time())
        self._chaos.quiet = not disturbed
        steps, taken, begun_s = await self._position(), self._sum_taken(), time.monotonic()
        ends_s = begun_s + stretch.seconds
        while time.monotonic() < ends_s or self._chaos.unsettled:
            self._chaos.quiet = not disturbed or time.monotonic() >= ends_s
            await self._turn()
        steps = await self._position() - steps
        outcome = Outcome(
            every_s=stretch.every_s,
            seconds=time.monotonic() - begun_s,
            steps=steps,
            faults=list(self._chaos.records) if disturbed else [],
            taken=self._sum_taken() - taken,
        )
        self.result.outcomes.append(outcome)
        self._say(
            f"{'disturbed' if disturbed else 'undisturbed'} stretch: {outcome.steps:.1f} steps in "
            f"{outcome.seconds:.1f} s, {len(outcome.faults)} faults"
        )
        self._chaos.quiet = True
        await self.settle()

    async def stop(self) -> None:
        """As the operator does it; the snapshot of the last step is stored before it ends."""
        coordinator = self._swarm.coordinator
        assert coordinator is not None
        await self._turn()
        coordinator.signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(coordinator.wait, SETTLE_S)
        self.result.restarts = self._restarter.restarts
        self.result.crashes = self._restarter.crashes

    # ---- facts ---------------------------------------------------------------------------

    async def _turn(self) -> RunView | None:
        """Look once, act on it, and wait a little."""
        view = await self._watch.look()
        if view is not None:
            self._note(view)
            if view.state == "failed":
                raise RunFailedError(f"the run failed: {view.waiting_for}")
        self._chaos.observe(view, time.time())
        self._restarter.mend(view)
        if time.monotonic() - self._moved_s > STALL_S:
            why = view.waiting_for if view is not None else "the coordinator is away"
            raise RunFailedError(f"no step for {STALL_S:.0f} s: {why}")
        await asyncio.sleep(_SOON_S if self._chaos.unsettled else _LATER_S)
        return view

    def _note(self, view: RunView) -> None:
        assert self._swarm.coordinator is not None
        self._taken[self._swarm.coordinator.pid] = view.receipts_taken
        if view.step > self._highest:
            self._highest, self._moved_s = view.step, time.monotonic()
        result = self.result
        result.steps = self._highest
        result.tokens_per_step = view.spec_summary.tokens_per_step
        result.pairs_per_step = view.spec_summary.microbatches * view.spec_summary.num_stages
        result.steps_lost = view.steps_lost
        result.microbatches_missing = view.microbatches_missing
        result.microbatches_double = view.microbatches_double

    async def _position(self) -> float:
        """Committed steps now, with the fraction of the open one."""
        while True:
            view = await self._turn()
            if view is not None:
                part = view.receipts_done / view.receipts_total if view.receipts_total else 0.0
                return self._highest + (part if view.step == self._highest else 0.0)

    def _sum_taken(self) -> int:
        return sum(self._taken.values())

    async def _sample(self) -> None:
        database = self._swarm.run_folder / "events.sqlite"
        while True:
            for process in self._swarm.processes:
                if process.alive:
                    self.result.sampler.sample(process.name, process.pid)
            with contextlib.suppress(OSError, sqlite3.Error):
                self.result.log_sizes.append(_log_size(database, self._highest))
            await asyncio.sleep(SAMPLE_S)


def _log_size(database: Path, step: int) -> LogSize:
    size = sum(
        path.stat().st_size
        for path in (database, database.with_name(database.name + "-wal"))
        if path.exists()
    )
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=1.0)
    try:
        (rows,) = connection.execute("SELECT count(*) FROM events").fetchone()
    finally:
        connection.close()
    return LogSize(time.time(), step, size, rows)
