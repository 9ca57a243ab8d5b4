# SPDX-License-Identifier: Apache-2.0
"""A coordinator's memory and its log don't grow with the run, whoever comes and goes."""

import gc
import tracemalloc
from pathlib import Path

import pytest

from shoal.coordinator import history, members
from shoal.coordinator.run_view import ConductorView
from shoal.coordinator.sqlite_store import SqliteEventStore

from .fake_run import make_run
from .fake_swarm import FakeSwarm

_SLACK_BYTES = 60_000


def drive(swarm: FakeSwarm, to_step: int) -> None:
    """Every 10 steps a node is lost and another comes; every 7 one joins again."""
    conductor = swarm.conductor
    while conductor.state.step < to_step:
        step = conductor.state.step
        if step % 10 == 9:
            swarm.at(step // 10 % 2)[0].kill()
            swarm.join()
        elif step % 7 == 3:
            swarm.at(0)[0].drop()
        swarm.run_until(lambda: conductor.state.step > step, within_s=900)  # noqa: B023
        swarm.tick()
        for node in swarm.nodes.values():
            node.commands_seen.clear()


def used(swarm: "LongSwarm") -> int:
    """Bytes in use right after a compaction, when the log is as short as it gets."""
    compacted = swarm.history_steps
    while swarm.history_steps == compacted:
        drive(swarm, swarm.conductor.state.step + 1)
    swarm.view.view()
    for node in swarm.nodes.values():
        node.promises.restarted()  # as many records as a node is old, up to a bound
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


class LongSwarm(FakeSwarm):
    """On a real log, whose disk is not this process's memory."""

    def __init__(self, path: Path, steps: int) -> None:
        super().__init__(
            make_run(steps=steps, microbatches=2, snapshot_every=20, validation_every=50)
        )
        store = SqliteEventStore(path)
        store._database.execute("PRAGMA synchronous = OFF")
        self.sqlite = self.store = store  # type: ignore[assignment]
        self.conductor = self._conduct()
        self.view = ConductorView(self.conductor, lambda: "link")
        for _ in range(4):
            self.join()

    @property
    def history_steps(self) -> int:
        return self.conductor.history.totals.num_steps


def check(path: Path, *, warm_up: int) -> None:
    """Compares twice the warm-up with the warm-up: the rows that charts keep grow to their limit
    and are halved again and again, and are as many at either step."""
    steps = 2 * warm_up
    tracemalloc.start()
    try:
        swarm = LongSwarm(path, steps + 200)
        drive(swarm, warm_up)
        before, log_before = used(swarm), path.stat().st_size
        drive(swarm, steps)
        after, log_after = used(swarm), path.stat().st_size
        rows = swarm.history_steps
        swarm.sqlite.close()
    finally:
        tracemalloc.stop()
    assert abs(after - before) < _SLACK_BYTES, f"{before} bytes became {after}"
    assert log_after - log_before < 100_000 + 250 * rows, "the log grows"


def test_memory_is_flat_over_hundreds_of_steps_with_churn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_POINTS", 100)
    monkeypatch.setattr(members, "_MAX_GONE", 10)
    check(tmp_path / "events.sqlite", warm_up=400)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_memory_is_flat_over_thousands_of_steps_with_churn(tmp_path: Path) -> None:
    check(tmp_path / "events.sqlite", warm_up=3000)
