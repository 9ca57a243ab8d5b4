# SPDX-License-Identifier: Apache-2.0
"""Sums that wait: in order, in memory up to a bound, then on disk, then no more."""

import asyncio
from pathlib import Path

import pytest
import torch

from shoal.node.catch_up import CatchUp
from shoal.protocol.errors import CapacityError
from shoal.protocol.proto import coordinator_pb2


def totals(step: int) -> torch.Tensor:
    return torch.arange(100, dtype=torch.int64) * step - (1 << 61)


def commit(step: int) -> coordinator_pb2.Commit:
    return coordinator_pb2.Commit(step=step, clip_scale=step / 3)


async def filled(folder: Path, steps: range, **bounds: int) -> CatchUp:
    log = CatchUp(folder, **bounds)
    for step in steps:
        await log.append(commit(step), totals(step))
    return log


@pytest.mark.parametrize("ram_bytes", [0, 800, 1 << 20])
async def test_sums_come_back_in_order_from_memory_and_disk(tmp_path: Path, ram_bytes: int) -> None:
    log = await filled(tmp_path, range(5, 9), ram_bytes=ram_bytes)
    assert log.steps == [5, 6, 7, 8]
    assert len(list(tmp_path.iterdir())) == 4 - min(ram_bytes // 800, 4)
    for step in range(5, 9):
        found, sums = await log.pop()
        assert found == commit(step)
        assert torch.equal(sums, totals(step))
    assert len(log) == 0
    assert list(tmp_path.iterdir()) == []


async def test_what_piles_up_is_bounded(tmp_path: Path) -> None:
    log = await filled(tmp_path, range(1, 4), ram_bytes=800, disk_bytes=1600)
    with pytest.raises(CapacityError, match="3 steps"):
        await log.append(commit(4), totals(4))


async def test_closing_removes_the_files(tmp_path: Path) -> None:
    log = await filled(tmp_path, range(1, 4), ram_bytes=0)
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert len(log) == 0


async def test_closing_while_the_oldest_is_read_leaves_nothing(tmp_path: Path) -> None:
    log = await filled(tmp_path, range(1, 4), ram_bytes=0)
    reading = asyncio.create_task(log.pop())
    await asyncio.sleep(0)
    log.close()
    found, sums = await reading
    assert found == commit(1)
    assert torch.equal(sums, totals(1))
    assert list(tmp_path.iterdir()) == []
