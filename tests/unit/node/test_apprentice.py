# SPDX-License-Identifier: Apache-2.0
"""A worker becomes able to apply, whatever arrives first."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.node.apprentice import Apprentice, Load
from shoal.node.state_fetch import FetchProgress
from shoal.protocol.errors import StorageError, UnreachableError
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.proto.types_pb2 import STATE_PART_MOMENTS, STATE_PART_WEIGHTS

WEIGHTS, MOMENTS = STATE_PART_WEIGHTS, STATE_PART_MOMENTS


class Stage:
    """A stage worker whose weights' digest is 100 + step, and which notes what it was told."""

    def __init__(self, step: int) -> None:
        self.runtime = SimpleNamespace(step=step)
        self.moments: int | None = None
        self.advanced: list[int] = []
        self.may_advance = asyncio.Event()
        self.may_advance.set()

    async def load_weights(self, path: Path, step: int) -> int:
        await asyncio.sleep(0)
        self.runtime.step = step
        return 100 + step

    async def load_moments(self, path: Path, step: int) -> None:
        await asyncio.sleep(0)
        self.moments = step

    async def projections(self) -> dict[str, torch.Tensor]:
        return {"weights of step": torch.tensor(self.runtime.step)}

    async def advance_moments(
        self,
        totals: torch.Tensor,
        commit: coordinator_pb2.Commit,
        projections: dict[str, torch.Tensor],
    ) -> None:
        await asyncio.sleep(0)
        assert projections["weights of step"] == commit.step - 1
        assert self.moments == commit.step - 1
        assert totals.tolist() == [commit.step]
        await self.may_advance.wait()
        self.moments = commit.step
        self.advanced.append(commit.step)


class Bench:
    def __init__(self, folder: Path, step: int = 5) -> None:
        self.stage = Stage(step)
        self.steps: list[int] = []
        self.sent: list[coordinator_pb2.NodeEvent] = []
        self.trouble: list[Exception] = []
        self.gates = {WEIGHTS: asyncio.Event(), MOMENTS: asyncio.Event()}
        self.failure: Exception | None = None
        worker: Any = self.stage
        self.apprentice = Apprentice(
            worker, incarnation=Incarnation(3), scratch=folder, fetch=self.fetch,
            on_step=self.steps.append, send=self.sent.append, on_trouble=self.trouble.append,
        )  # fmt: skip

    async def fetch(
        self, step: int, part: Any, donors: Any, load: Load, progress: FetchProgress
    ) -> int:
        progress.share = 0.25
        await self.gates[part].wait()
        if self.failure:
            raise self.failure
        return await load(Path())

    async def pull(self, step: int, part: Any) -> None:
        await self.apprentice.pull(coordinator_pb2.Pull(incarnation=3, step=step, part=part))

    async def commit(self, step: int) -> None:
        command = coordinator_pb2.Commit(step=step)
        await self.apprentice.committed(torch.tensor([step]), command)

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    async def arrive(self, part: int) -> None:
        self.gates[part].set()
        await self.settle()
        self.gates[part].clear()

    async def step(self, step: int) -> None:
        """A step is committed, and the weights after it arrive."""
        await self.commit(step)
        await self.pull(step, WEIGHTS)
        await self.arrive(WEIGHTS)

    def said(self) -> list[tuple[str, int]]:
        kinds = [(e.WhichOneof("event"), e) for e in self.sent]
        return [(str(kind), getattr(event, str(kind)).step) for kind, event in kinds]


@pytest.fixture
async def bench(tmp_path: Path) -> Any:
    bench = Bench(tmp_path)
    yield bench
    await bench.apprentice.close()
    assert list(tmp_path.iterdir()) == []


async def test_moments_are_brought_forward_over_the_steps_since(bench: Bench) -> None:
    await bench.pull(5, MOMENTS)
    for step in (6, 7, 8):
        await bench.step(step)
    assert bench.said() == [("applied", 6), ("applied", 7), ("applied", 8)]
    assert bench.steps == [6, 7, 8]
    assert bench.sent[0].applied.weights_digest == 106
    await bench.arrive(MOMENTS)
    assert bench.stage.advanced == [6, 7, 8]
    assert bench.said()[-1] == ("promoted", 8)
    assert bench.apprentice.is_promoted
    assert not bench.apprentice.is_proven
    bench.stage.runtime.step = 9
    assert bench.apprentice.is_proven


async def test_moments_of_the_step_at_hand_promote_at_once(bench: Bench) -> None:
    await bench.pull(5, MOMENTS)
    await bench.arrive(MOMENTS)
    assert bench.said() == [("promoted", 5)]


async def test_a_commit_in_between_waits_for_its_weights(bench: Bench) -> None:
    await bench.pull(5, MOMENTS)
    await bench.commit(6)
    await bench.arrive(MOMENTS)
    assert bench.said() == []
    await bench.pull(6, WEIGHTS)
    await bench.arrive(WEIGHTS)
    assert bench.said() == [("applied", 6), ("promoted", 6)]


async def test_moments_that_arrive_with_a_backlog_go_on_with_what_follows(bench: Bench) -> None:
    await bench.pull(5, MOMENTS)
    await bench.step(6)
    await bench.commit(7)
    await bench.arrive(MOMENTS)
    assert bench.stage.advanced == [6]
    await bench.pull(7, WEIGHTS)
    await bench.arrive(WEIGHTS)
    assert bench.stage.advanced == [6, 7]
    assert bench.said() == [("applied", 6), ("applied", 7), ("promoted", 7)]


async def test_another_version_of_the_moments_begins_anew(bench: Bench) -> None:
    await bench.pull(5, MOMENTS)
    await bench.step(6)
    await bench.pull(6, MOMENTS)
    await bench.step(7)
    await bench.arrive(MOMENTS)
    assert bench.stage.advanced == [7]
    assert bench.said()[-1] == ("promoted", 7)


async def test_sums_before_the_moments_are_asked_for_are_not_kept(bench: Bench) -> None:
    await bench.step(6)
    await bench.pull(6, MOMENTS)
    await bench.arrive(MOMENTS)
    assert bench.stage.advanced == []
    assert bench.said() == [("applied", 6), ("promoted", 6)]


async def test_after_its_promotion_it_pulls_no_more(bench: Bench) -> None:
    await bench.pull(5, MOMENTS)
    await bench.arrive(MOMENTS)
    await bench.pull(6, WEIGHTS)
    await bench.arrive(WEIGHTS)
    assert bench.said() == [("promoted", 5)]


async def test_it_says_what_it_waits_for(bench: Bench) -> None:
    await bench.pull(5, MOMENTS)
    await bench.settle()
    assert bench.apprentice.progress() == "worker: moments 25 %"
    await bench.pull(6, WEIGHTS)
    await bench.settle()
    assert bench.apprentice.progress() == "worker: pulls the weights, 25 % done"


async def test_moments_that_are_not_to_be_had_are_no_failure_of_the_node(bench: Bench) -> None:
    bench.failure = UnreachableError("the donors are gone")
    await bench.pull(5, MOMENTS)
    await bench.arrive(MOMENTS)
    assert bench.trouble == []
    bench.failure = StorageError("the disk is full")
    await bench.pull(5, MOMENTS)
    await bench.arrive(MOMENTS)
    assert [str(e) for e in bench.trouble] == ["the disk is full"]


async def test_weights_that_are_not_to_be_had_are_reported(bench: Bench) -> None:
    bench.failure = UnreachableError("the donors are gone")
    await bench.pull(6, WEIGHTS)
    await bench.arrive(WEIGHTS)
    assert [str(e) for e in bench.trouble] == ["the donors are gone"]


async def test_moments_asked_for_anew_while_older_ones_are_brought_forward(bench: Bench) -> None:
    """What was under way must not be taken for the version that is still to come."""
    await bench.pull(5, MOMENTS)
    await bench.commit(6)
    await bench.arrive(MOMENTS)
    bench.stage.may_advance.clear()
    await bench.pull(6, WEIGHTS)
    await bench.arrive(WEIGHTS)
    await bench.pull(6, MOMENTS)
    bench.stage.may_advance.set()
    await bench.settle()
    assert not bench.apprentice.is_promoted
    await bench.arrive(MOMENTS)
    assert bench.said()[-1] == ("promoted", 6)
    assert bench.stage.moments == 6


async def test_a_bug_while_pulling_is_reported(bench: Bench) -> None:
    bench.failure = KeyError("a bug")
    await bench.pull(5, MOMENTS)
    await bench.arrive(MOMENTS)
    assert [type(error) for error in bench.trouble] == [KeyError]
