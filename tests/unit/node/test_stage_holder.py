# SPDX-License-Identifier: Apache-2.0
"""What of a stage survives a session, and what a failed copy leaves behind: nothing."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.node.disk_room import DiskRoom
from shoal.node.hardware import Device
from shoal.node.stage_holder import StageHolder
from shoal.node.stage_member import Prepared
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import DiskFullError, UnreachableError
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.scale import scale_exponent
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
        self.failures: list[Exception] = []
        """Of the next calls, in turn; then the donor is gone."""

    async def fetch_state(self, *_: object, **__: object) -> Path:
        self.asked.set()
        if self.hangs:
            await asyncio.Event().wait()
        raise self.failures.pop(0) if self.failures else UnreachableError("the donor is gone")

    def forget(self) -> None:
        pass

    async def fetch_shard(self, sha256: str) -> Any:
        raise AssertionError


class Disk:
    """Has room once it is let have some."""

    def __init__(self) -> None:
        self.has_room = asyncio.Event()
        self.is_waited_for = asyncio.Event()
        self.said: list[str] = []
        self.room = DiskRoom(self.said.append, has_room=lambda *_: True, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.is_waited_for.set()
        await self.has_room.wait()


class Bench:
    def __init__(self, folder: Path, tasks: TaskScope) -> None:
        self.sent: asyncio.Queue[coordinator_pb2.NodeEvent] = asyncio.Queue()
        self.transfer = Transfer()
        self.disk = Disk()
        membership: Any = SimpleNamespace(run=RUN, credentials=None)
        transfer: Any = self.transfer
        self.holder = StageHolder(
            membership, Device(torch.device("cpu"), "test", 1, 1.0, "fp32", 1), folder=folder,
            scratch=folder, transfer=transfer, swarm=SwarmView(), tasks=tasks,
            send=self.sent.put_nowait, report=lambda line: None, room=self.disk.room,
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


# ---- a full disk -------------------------------------------------------------------------

FULL = DiskFullError("state: No space left on device", folder="/disk", needed_bytes=12_300_000)


async def test_a_joiner_whose_disk_is_full_waits_for_room_instead_of_failing(
    tmp_path: Path,
) -> None:
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, tasks)
        bench.transfer.failures = [FULL, FULL]
        await bench.take(PEER)
        await bench.disk.is_waited_for.wait()
        assert "12.3 MB of room on its disk" in bench.holder.waiting_for()
        assert bench.sent.empty()
        bench.disk.has_room.set()
        trouble = (await bench.sent.get()).trouble
        assert trouble.error == "UnreachableError", "the third try, when there is room"
        assert len(bench.disk.said) == 2
        await bench.holder.close()


async def test_a_node_whose_disk_was_full_in_a_step_takes_no_stage_before_there_is_room(
    tmp_path: Path,
) -> None:
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, tasks)
        await bench.take(INIT)
        await bench.sent.get()
        bench.holder.trouble(1, FULL)
        assert (await bench.sent.get()).trouble.error == "DiskFullError"
        await bench.holder.detach()
        await bench.take(KEEP, incarnation=2)
        await bench.disk.is_waited_for.wait()
        assert "room on its disk" in bench.holder.waiting_for()
        bench.disk.has_room.set()
        assert (await bench.sent.get()).ready.incarnation == 2
        await bench.holder.close()


# ---- incarnations that end ---------------------------------------------------------------


async def test_an_incarnation_ends_though_its_successor_is_cancelled_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, tasks)
        await bench.take(INIT)
        await bench.sent.get()
        member = bench.holder.member
        assert member is not None
        closing, closed = asyncio.Event(), asyncio.Event()
        close = member.close

        async def slowly() -> None:
            closing.set()
            await asyncio.sleep(0)
            await close()
            closed.set()

        monkeypatch.setattr(member, "close", slowly)
        await bench.take(INIT, incarnation=2)
        await closing.wait()
        await bench.holder.detach()  # the session broke in this moment
        await asyncio.wait_for(closed.wait(), 10)
        await bench.holder.close()


async def test_a_version_that_is_still_written_for_a_joiner_does_not_hold_up_the_next_session(
    tmp_path: Path,
) -> None:
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, tasks)
        await bench.take(INIT)
        await bench.sent.get()
        member = bench.holder.member
        assert member is not None
        blocked = threading.Event()
        version = coordinator_pb2.StateVersion(step=0, part=types_pb2.STATE_PART_WEIGHTS)
        waits = asyncio.create_task(member.worker.call(lambda: blocked.wait(20)))
        await asyncio.sleep(0)
        pin = coordinator_pb2.Command(pin=coordinator_pb2.Pin(versions=[version]))
        await bench.holder.obey(pin, "pin")
        await asyncio.wait_for(bench.holder.detach(), 5)
        assert bench.holder.held() is not None
        blocked.set()
        await waits
        await bench.holder.close()
        assert not list(tmp_path.glob("pin-*"))


async def test_a_commit_that_the_sessions_end_cut_off_is_offered_with_its_own_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, tasks)
        await bench.take(INIT)
        before = (await bench.sent.get()).ready.weights_digest
        member = bench.holder.member
        assert member is not None
        worker = member.worker
        totals = torch.ones(worker.runtime.sums.numel(), dtype=torch.int64) << 40
        member.prepared = Prepared(1, 0, totals, digest=7)
        commit = coordinator_pb2.Commit(
            step=1, learning_rate=1e-2, clip_scale=1.0, num_tokens=RUN.spec.tokens_per_step,
            scale_exponent=scale_exponent(RUN.spec.tokens_per_step), sums_digest=7,
        )  # fmt: skip
        started, go_on, apply = threading.Event(), threading.Event(), worker.runtime.apply

        def slowly(*arguments: Any, **named: Any) -> None:
            started.set()
            assert go_on.wait(20)
            apply(*arguments, **named)

        monkeypatch.setattr(worker.runtime, "apply", slowly)
        command = coordinator_pb2.Command(commit=commit)
        obeying = asyncio.create_task(bench.holder.obey(command, "commit"))
        assert await asyncio.to_thread(started.wait, 20)
        obeying.cancel()
        await asyncio.gather(obeying, return_exceptions=True)
        detaching = asyncio.create_task(bench.holder.detach())
        await asyncio.sleep(0)
        go_on.set()
        await detaching
        held = bench.holder.held()
        assert held is not None
        assert held.step == 1
        assert held.weights_digest == worker.runtime.weights_digest() != before
        await bench.holder.close()
