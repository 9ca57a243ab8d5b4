# SPDX-License-Identifier: Apache-2.0
"""What of a stage survives a session, and what a failed copy leaves behind: nothing."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.node.hardware import Device
from shoal.node.stage_holder import StageHolder
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import UnreachableError
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.task_scope import TaskScope

from .tiny_run import tiny_run

torch.set_num_threads(1)

RUN = tiny_run(2)
INIT = coordinator_pb2.STATE_SOURCE_INIT
KEEP = coordinator_pb2.STATE_SOURCE_KEEP
PEER = coordinator_pb2.STATE_SOURCE_PEER


class Transfer:
    """A donor that is gone, or that never sends."""

    def __init__(self) -> None:
        self.hangs = False
        self.asked = asyncio.Event()

    async def fetch_state(self, *_: object, **__: object) -> Path:
        self.asked.set()
        if self.hangs:
            await asyncio.Event().wait()
        raise UnreachableError("the donor is gone")

    def forget(self) -> None:
        pass

    async def fetch_shard(self, sha256: str) -> Any:
        raise AssertionError


class Bench:
    def __init__(self, folder: Path, tasks: TaskScope) -> None:
        self.sent: asyncio.Queue[coordinator_pb2.NodeEvent] = asyncio.Queue()
        self.transfer = Transfer()
        membership: Any = SimpleNamespace(run=RUN, credentials=None)
        transfer: Any = self.transfer
        self.holder = StageHolder(
            membership, Device(torch.device("cpu"), "test", 1, 1.0, "fp32", 1), folder=folder,
            scratch=folder, transfer=transfer, swarm=SwarmView(), tasks=tasks,
            send=self.sent.put_nowait, report=lambda line: None,
        )  # fmt: skip

    async def take(self, source: Any, *, stage: int = 0, incarnation: int = 1) -> None:
        await self.holder.take(
            coordinator_pb2.Assign(stage=stage, incarnation=incarnation, source=source)
        )


async def test_the_state_outlives_the_session_and_is_offered(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, tasks)
        assert bench.holder.held() is None
        await bench.take(INIT)
        ready = (await bench.sent.get()).ready
        assert (ready.incarnation, ready.step) == (1, 0)
        assert bench.holder.stage == 0
        await bench.holder.detach()
        assert bench.holder.stage is None
        held = bench.holder.held()
        assert held is not None
        assert (held.stage, held.weights_digest) == (0, ready.weights_digest)
        await bench.take(KEEP, incarnation=2)
        again = (await bench.sent.get()).ready
        assert (again.incarnation, again.weights_digest) == (2, ready.weights_digest)
        await bench.holder.close()


async def test_a_failed_copy_is_reported_and_not_offered(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, tasks)
        await bench.take(PEER)
        trouble = (await bench.sent.get()).trouble
        assert (trouble.incarnation, trouble.error) == (1, "UnreachableError")
        assert bench.holder.held() is None
        await bench.holder.close()


async def test_a_session_that_breaks_ends_the_copy(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, tasks)
        bench.transfer.hangs = True
        await bench.take(PEER)
        await bench.transfer.asked.wait()
        await bench.holder.detach()
        assert bench.holder.held() is None
        await bench.take(INIT, stage=1, incarnation=2)
        assert (await bench.sent.get()).ready.incarnation == 2
        assert bench.sent.empty()
        await bench.holder.close()


async def test_what_is_not_held_cannot_be_kept(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, tasks)
        await bench.take(KEEP)
        assert (await bench.sent.get()).trouble.error == "WrongLeaseError"
        await bench.holder.close()


async def test_a_bug_while_taking_a_stage_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(*_: object, **__: object) -> Path:
        raise KeyError("a bug")

    async def live() -> None:
        async with TaskScope() as tasks:
            bench = Bench(tmp_path, tasks)
            monkeypatch.setattr(bench.transfer, "fetch_state", wrong)
            await bench.take(PEER)
            await asyncio.Event().wait()

    with pytest.raises(KeyError, match="a bug"):
        await live()
