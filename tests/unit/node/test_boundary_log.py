# SPDX-License-Identifier: Apache-2.0
"""The boundary log keeps what fits, forgets what is not needed, and takes damage for a hole."""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shoal.compression.codec import Leg
from shoal.node import boundary_log
from shoal.node.boundary_log import OTHER_RUNS_S, BoundaryLog
from shoal.node.log_file import Sent, places, read_entry, step_bytes, write_step
from shoal.protocol.errors import StorageError
from shoal.protocol.ids import RunId

RUN = RunId("run-00000000")
SENT = [Sent("forward", 0, b"a" * 100), Sent("backward", 0, b"b" * 50), Sent("forward", 1, b"c")]
STEP_BYTES = step_bytes(SENT, "bf16")


def open_log(
    folder: Path, *, budget_bytes: int = 10**6, run: RunId = RUN, boundary: str = "bf16",
    now_s: float = 0.0, patience_s: float = 3600.0,
) -> BoundaryLog:  # fmt: skip
    return BoundaryLog(
        folder, run, boundary=boundary, budget_bytes=budget_bytes, now_s=lambda: now_s,
        patience_s=patience_s,
    )  # fmt: skip


async def held(log: BoundaryLog, step: int, stage: int = 0) -> dict[tuple[Leg, int], bytes | None]:
    found = await log.places(step, stage)
    return {key: await log.read(step, stage, place) for key, place in found.items()}


ALL = {("forward", 0): b"a" * 100, ("backward", 0): b"b" * 50, ("forward", 1): b"c"}


def full(*arguments: object) -> None:
    raise StorageError(os.strerror(errno.ENOSPC))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / RUN).iterdir())


async def test_what_was_appended_can_be_read(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(3, 0, SENT)
    assert await held(log, 3) == ALL
    assert (log.num_bytes, log.oldest_step) == (STEP_BYTES, 3)
    assert await held(log, 3, stage=1) == {}
    assert await held(log, 4) == {}
    await log.close()
    [path] = (tmp_path / RUN).iterdir()
    assert path.stat().st_size == STEP_BYTES


async def test_a_step_that_is_computed_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(3, 0, SENT)
    log.append(3, 0, SENT[:1])
    assert await held(log, 3) == {("forward", 0): b"a" * 100}
    await log.close()


async def test_the_node_may_die_in_the_midst_of_a_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "left"

    def killed_here(path: Path, entries: Sequence[Sent], boundary: str) -> None:
        shutil.copytree(tmp_path / "log", left)
        write_step(path, entries, boundary)

    log = open_log(tmp_path / "log")
    log.append(3, 0, SENT)
    await log.settle()
    monkeypatch.setattr(boundary_log, "write_step", killed_here)
    log.append(3, 0, SENT[:1])
    await log.close()
    again = open_log(left)
    assert await held(again, 3) == ALL
    await again.close()


@pytest.mark.parametrize("again", [[], SENT])
async def test_what_can_not_be_replaced_is_forgotten_since_it_is_of_another_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: list[Sent]
) -> None:
    log = open_log(tmp_path)
    log.append(3, 0, SENT)
    log.append(3, 1, SENT)
    await log.settle()
    monkeypatch.setattr(boundary_log, "write_step", full)
    log.append(3, 0, again)
    assert await held(log, 3) == {}
    assert await held(log, 3, stage=1) == ALL
    assert log.num_bytes == STEP_BYTES
    assert len(files(tmp_path)) == 1
    await log.close()


async def test_replacing_a_step_costs_no_other_step(tmp_path: Path) -> None:
    log = open_log(tmp_path, budget_bytes=3 * STEP_BYTES)
    for step in (1, 2, 3, 2):
        log.append(step, 0, SENT)
    assert [await held(log, step) for step in (1, 2, 3)] == [ALL] * 3
    assert log.num_bytes == 3 * STEP_BYTES
    await log.close()


async def test_a_step_that_opens_again_is_forgotten_with_all_after_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for step, stage in ((3, 0), (4, 0), (4, 1), (5, 1)):
        log.append(step, stage, SENT)
    log.forget_from(4)
    assert await held(log, 3) == ALL
    assert files(tmp_path) == ["step-00000003-stage-0.bin"]
    assert log.num_bytes == STEP_BYTES
    await log.close()


async def test_a_step_is_kept_for_each_stage_that_the_node_held(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(3, 0, SENT)
    log.append(3, 1, SENT[:1])
    assert await held(log, 3, stage=0) == ALL
    assert await held(log, 3, stage=1) == {("forward", 0): b"a" * 100}
    await log.close()


@pytest.mark.parametrize("fitting", [1, 3])
async def test_the_oldest_steps_go_when_the_budget_is_used_up(tmp_path: Path, fitting: int) -> None:
    log = open_log(tmp_path, budget_bytes=fitting * STEP_BYTES)
    for step in range(1, 8):
        log.append(step, 0, SENT)
        await log.places(step, 0)
        assert log.num_bytes <= fitting * STEP_BYTES
    assert log.oldest_step == 8 - fitting
    assert len(files(tmp_path)) == fitting
    await log.close()


async def test_a_step_beyond_the_whole_budget_is_not_kept(tmp_path: Path) -> None:
    log = open_log(tmp_path, budget_bytes=STEP_BYTES - 1)
    log.append(1, 0, SENT)
    assert await held(log, 1) == {}
    await log.close()


async def test_without_a_budget_nothing_is_kept_or_written(tmp_path: Path) -> None:
    log = open_log(tmp_path, budget_bytes=0)
    assert not log.is_on
    log.append(1, 0, SENT)
    await log.close()
    assert not list(tmp_path.iterdir())


async def test_truncating_forgets_all_steps_up_to_one(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for step in range(1, 6):
        log.append(step, 0, SENT)
    log.truncate(3)
    assert await held(log, 3) == {}
    assert await held(log, 4) == ALL
    assert (log.oldest_step, log.num_bytes) == (4, 2 * STEP_BYTES)
    log.truncate(99)
    assert await held(log, 5) == {}
    assert (log.oldest_step, log.num_bytes, files(tmp_path)) == (0, 0, [])
    await log.close()


async def test_the_log_survives_the_process(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for step in (1, 2):
        log.append(step, 0, SENT)
    await log.close()
    (tmp_path / RUN / ".step-00000003-stage-0.bin.1-2.tmp").write_bytes(b"torn")
    again = open_log(tmp_path, budget_bytes=STEP_BYTES)
    assert await held(again, 2) == ALL
    assert await held(again, 1) == {}, "the budget has become smaller"
    assert len(files(tmp_path)) == 1
    await again.close()


async def test_logs_of_other_runs_go_when_they_are_old(tmp_path: Path) -> None:
    other = open_log(tmp_path, run=RunId("other-00000000"))
    other.append(1, 0, SENT)
    await other.close()
    os.utime(tmp_path / "other-00000000", (1000, 1000))
    log = open_log(tmp_path, now_s=1000 + OTHER_RUNS_S)
    await log.places(1, 0)
    assert (tmp_path / "other-00000000").exists()
    await log.close()
    log = open_log(tmp_path, now_s=1001 + OTHER_RUNS_S)
    await log.close()
    assert not (tmp_path / "other-00000000").exists()


async def test_a_disk_that_can_not_be_written_costs_the_step_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    log.append(1, 0, SENT)
    await log.places(1, 0)
    with monkeypatch.context() as patched:
        patched.setattr(boundary_log, "write_step", full)
        log.append(2, 0, SENT)
        await log.places(2, 0)
    log.append(3, 0, SENT)
    assert [await held(log, step) for step in (1, 2, 3)] == [ALL, {}, ALL]
    await log.close()


class SlowDisk:
    """Writes nothing until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        monkeypatch.setattr(boundary_log, "write_step", self._write)

    def _write(self, path: Path, entries: Sequence[Sent], boundary: str) -> None:
        assert self.goes_on.wait(30)
        write_step(path, entries, boundary)


async def settling(log: BoundaryLog) -> asyncio.Task[None]:
    """A step that has begun to wait."""
    task = asyncio.create_task(log.settle())
    await asyncio.sleep(0)
    assert log.is_awaited
    return task


async def test_whoever_settles_has_the_step_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, log = SlowDisk(monkeypatch), open_log(tmp_path)
    await log.settle()  # nothing was appended
    log.append(1, 0, SENT)
    settled = await settling(log)
    assert not settled.done()
    disk.goes_on.set()
    await settled
    assert not log.is_awaited
    assert files(tmp_path) == ["step-00000001-stage-0.bin"]
    await log.close()


async def test_a_slow_disk_is_not_waited_for_again_until_it_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, log = SlowDisk(monkeypatch), open_log(tmp_path, patience_s=0.0)
    log.append(1, 0, SENT)
    await log.settle()
    log._patience_s = 3600.0
    log.append(2, 0, SENT)
    async with asyncio.timeout(30):
        await log.settle()
    disk.goes_on.set()
    assert await held(log, 2) == ALL, "it was written all the same"
    log.append(3, 0, SENT)
    await log.settle()
    assert len(files(tmp_path)) == 3
    await log.close()


async def test_a_step_that_gives_up_waiting_does_not_break_off_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, log = SlowDisk(monkeypatch), open_log(tmp_path)
    log.append(1, 0, SENT)
    log.append(2, 0, SENT)
    settled = await settling(log)
    settled.cancel()
    await asyncio.gather(settled, return_exceptions=True)
    disk.goes_on.set()
    assert await held(log, 2) == ALL
    await log.close()


# ---- the file ----------------------------------------------------------------------------


def whole(path: Path, boundary: str = "bf16") -> set[tuple[Leg, int]]:
    """Entries that can be read."""
    found = places(path, boundary)
    return {key for key, place in found.items() if read_entry(path, place) is not None}


def test_a_file_that_is_torn_anywhere_gives_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "step.bin"
    write_step(path, SENT, "bf16")
    content = path.read_bytes()
    assert whole(path) == set(ALL)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert whole(path) < set(ALL)
        path.write_bytes(content[:length] + bytes(len(content) - length))
        assert whole(path) < set(ALL)


def test_no_flipped_bit_gives_a_wrong_entry(tmp_path: Path) -> None:
    path = tmp_path / "step.bin"
    write_step(path, SENT, "bf16")
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x11
        path.write_bytes(damaged)
        read = {key: read_entry(path, place) for key, place in places(path, "bf16").items()}
        good = {key: payload for key, payload in read.items() if payload is not None}
        assert good.items() < ALL.items()


def test_a_file_of_another_codec_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "step.bin"
    write_step(path, SENT, "bf16")
    assert whole(path, "int8:g64") == set()


def test_while_a_file_is_written_the_one_before_is_there(tmp_path: Path) -> None:
    path = tmp_path / "step.bin"
    write_step(path, SENT, "bf16")

    def entries() -> Iterator[Sent]:
        for sent in SENT[:1]:
            assert whole(path) == set(ALL)
            yield sent
        assert whole(path) == set(ALL)

    write_step(path, entries(), "bf16")
    assert whole(path) == {("forward", 0)}
