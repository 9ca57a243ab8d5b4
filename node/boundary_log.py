# SPDX-License-Identifier: Apache-2.0
"""What this node sent over boundaries, on disk, for neighbours that replay.

A step is written before the node says that it is prepared: from then on its gradients may count
although it dies, and whoever starts it again brings the log back. A replay asks for committed steps
only, and for those in the computation that was committed; opening a step, also once more, forgets
what was logged of it before, whose gradients may carry another loss scale.

For speed, never for correctness: whatever is missing or damaged is a hole, and a replay that meets
one falls back. So nothing is synced, and a full or slow disk costs the log, not the step. One file
per (step, stage); the oldest steps go when the budget is used up. The log outlives the process.
"""

import asyncio
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from shoal.node.log_file import Kind, Place, Sent, places, read_entry, step_bytes, write_step
from shoal.protocol.errors import StorageError
from shoal.protocol.ids import RunId

log = logging.getLogger(__name__)

R = TypeVar("R")

OTHER_RUNS_S = 7 * 86_400.0
"""Logs of other runs are removed when nothing was written to them for so long."""

_MAX_UNWRITTEN_BYTES = 256 << 20
"""A disk that falls further behind than this loses steps rather than the memory."""

PATIENCE_S = 3.0
"""A step waits for the disk no longer than this; a node that takes 5 s to sum up may pass for mute
(coordinator/mute.py)."""

_NAME = re.compile(r"step-(\d{1,12})-stage-(\d{1,6})\.bin")


class BoundaryLog:
    """All calls from the event loop; files on a thread of its own, in the order asked for, so that
    what was appended is there to be read."""

    def __init__(
        self,
        folder: Path,
        run_id: RunId,
        *,
        boundary: str,
        budget_bytes: int,
        now_s: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`folder` holds the logs of all runs. `boundary` is the run's canonical boundary spec.
        With a budget of 0 nothing is kept; while a step is replaced, its old file comes on top."""
        self._folders = folder
        self._folder = folder / run_id
        self._boundary = boundary
        self._budget_bytes = budget_bytes
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="boundary-log")
        self._sizes: dict[tuple[int, int], int] = {}  # (step, stage) -> bytes; the thread's own
        self._appended_bytes = 0  # counted by the loop
        self._written_bytes = 0  # counted by the thread
        self._failing = False
        self._patience_s = patience_s
        self._newest: Future[None] | None = None  # the write that was asked for last
        self._late: Future[None] | None = None  # one that a step has waited for in vain
        self.is_awaited = False
        """A step waits for the disk."""
        self.num_bytes = 0
        """On disk."""
        self.oldest_step = 0
        """In the log; 0 while it is empty."""
        self._executor.submit(self._open, now_s())

    @property
    def is_on(self) -> bool:
        return self._budget_bytes > 0

    def append(self, step: int, stage: int, sent: Sequence[Sent]) -> None:
        """Begin to write what was sent in a step. Takes the place of what was there."""
        num_bytes = step_bytes(sent, self._boundary)
        unwritten = self._appended_bytes - self._written_bytes
        too_slow = unwritten > 0 and unwritten + num_bytes > _MAX_UNWRITTEN_BYTES
        if not sent or num_bytes > self._budget_bytes or too_slow:
            if too_slow:
                log.warning("the disk is too slow for the boundary log; step %d is left out", step)
            self._executor.submit(self._forget, lambda key: key == (step, stage))
            return
        self._appended_bytes += num_bytes
        self._newest = self._executor.submit(self._write, step, stage, sent, num_bytes)

    async def settle(self) -> None:
        """Wait until what was appended is on disk, or has turned out not to get there. A disk that
        takes longer than `patience_s` isn't waited for again until it has caught up."""
        newest = self._newest
        if newest is None or newest.done() or (self._late and not self._late.done()):
            return
        self.is_awaited = True
        try:
            # Not wait_for, which would cancel the write.
            done, _ = await asyncio.wait([asyncio.wrap_future(newest)], timeout=self._patience_s)
        finally:
            self.is_awaited = False
        if not done:
            self._late = newest
            log.warning(
                "the boundary log's disk takes more than %g s a step; training goes on without "
                "waiting for it, and a loss in the meantime may roll back",
                self._patience_s,
            )

    def forget_from(self, step: int) -> None:
        """`step` opens, perhaps once more: what was logged of it, or of later steps, belongs to a
        computation that the run has left."""
        self._executor.submit(self._forget, lambda key: key[0] >= step)

    def truncate(self, through_step: int) -> None:
        """Forget all steps up to this one."""
        self._executor.submit(self._forget, lambda key: key[0] <= through_step)

    async def places(self, step: int, stage: int) -> dict[tuple[Kind, int], Place]:
        """What the log has of a step at a stage."""
        return await self._call(lambda: self._places(step, stage), {})

    async def read(self, step: int, stage: int, place: Place) -> bytes | None:
        """An entry's payload; None for one that is damaged or gone."""
        return await self._call(lambda: read_entry(self._path(step, stage), place), None)

    async def close(self) -> None:
        """What was appended is written when this returns; the files stay."""
        await asyncio.to_thread(self._executor.shutdown, wait=True)

    async def _call(self, function: Callable[[], R], otherwise: R) -> R:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except OSError as error:
            log.info("boundary log: %s", error)
            return otherwise

    # ---- on the thread -------------------------------------------------------------------

    def _open(self, now_s: float) -> None:
        try:
            for other in self._folders.glob("*/"):
                if other != self._folder and now_s - other.stat().st_mtime > OTHER_RUNS_S:
                    shutil.rmtree(other, ignore_errors=True)
            for path in self._folder.glob("*") if self._folder.is_dir() else ():
                match = _NAME.fullmatch(path.name)
                if match and self.is_on:
                    self._sizes[int(match[1]), int(match[2])] = path.stat().st_size
                else:  # left by an interrupted write
                    path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("boundary log: %s", error)
        self._evict(room_for=0)

    def _write(self, step: int, stage: int, sent: Iterable[Sent], num_bytes: int) -> None:
        key = step, stage
        try:
            self._evict(room_for=num_bytes, replacing=key)
            write_step(self._path(*key), sent, self._boundary)  # the old file or the new one
            self._sizes[key] = num_bytes
            self._failing = False
        except (StorageError, OSError) as error:
            self._forget(lambda other: other == key)  # it is of another computation
            if not self._failing:  # once, not at every step
                log.warning("the boundary log can't be written, a lost stage rolls back: %s", error)
            self._failing = True
        finally:
            self._written_bytes += num_bytes
            self._count()

    def _forget(self, is_meant: Callable[[tuple[int, int]], bool]) -> None:
        try:
            self._remove([key for key in self._sizes if is_meant(key)])
        except OSError as error:
            log.warning("boundary log: %s", error)
        self._count()

    def _evict(self, *, room_for: int, replacing: tuple[int, int] | None = None) -> None:
        others = sorted(key for key in self._sizes if key != replacing)
        held = sum(self._sizes[key] for key in others)
        victims = []
        for key in others:
            if held + room_for <= self._budget_bytes:
                break
            held -= self._sizes[key]
            victims.append(key)
        self._remove(victims)
        self._count()

    def _remove(self, keys: Iterable[tuple[int, int]]) -> None:
        for key in keys:
            self._sizes.pop(key, None)  # first: what can't be removed is not served either
            self._path(*key).unlink(missing_ok=True)

    def _count(self) -> None:
        self.num_bytes = sum(self._sizes.values())
        self.oldest_step = min((step for step, _ in self._sizes), default=0)

    def _places(self, step: int, stage: int) -> dict[tuple[Kind, int], Place]:
        if (step, stage) not in self._sizes:
            return {}
        return dict(places(self._path(step, stage), self._boundary))

    def _path(self, step: int, stage: int) -> Path:
        return self._folder / f"step-{step:08d}-stage-{stage}.bin"
