# SPDX-License-Identifier: Apache-2.0
"""Waits while this node's disk is too full for what it is to hold.

A node that went on instead would fail at once, again and again, until the coordinator sends it
away. So it says what it needs, and tries again when there is room, or might be.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from shoal.protocol.disk import has_room
from shoal.protocol.errors import DiskFullError
from shoal.protocol.rpc import backoff

log = logging.getLogger(__name__)

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0

_QUIET_S = 600.0
"""After so long without a full disk, waits are short again."""


class DiskRoom:
    def __init__(
        self,
        report: Callable[[str], None],
        *,
        has_room: Callable[[Path, int], bool] = has_room,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._report = report
        self._has_room = has_room
        self._sleep = sleep
        self._clock = clock
        self._rng = rng or random.Random()
        self._lacks: DiskFullError | None = None
        self._tries = 0
        self._noted_s = -_QUIET_S
        self.waiting_for = ""
        """What it waits for, in plain words; empty while it doesn't."""

    def note(self, error: Exception) -> None:
        """Something failed; `wait` waits if it was for want of room on this node's disk."""
        if not isinstance(error, DiskFullError) or not error.folder:
            return
        if self._clock() - self._noted_s > _QUIET_S:
            self._tries = 0
        self._lacks, self._noted_s = error, self._clock()

    async def wait(self) -> None:
        """Returns at once unless a disk was full. Else once it has the room that was missing; not
        before a pause that grows, since free space alone doesn't tell (a quota may be used up)."""
        if self._lacks is None:
            return
        what = "some room"
        if self._lacks.needed_bytes:
            what = f"{self._lacks.needed_bytes / 1e6:,.1f} MB of room"
        self.waiting_for = (
            f"{what} on its disk: free space under {self._lacks.folder}, or start the node with "
            "--folder on a larger disk"
        )
        self._report(f"waiting for {self.waiting_for}")
        log.warning("%s", self._lacks)
        try:
            while (lacks := self._lacks) is not None:
                await self._sleep(
                    backoff(self._tries, self._rng, base_s=FIRST_WAIT_S, limit_s=LONGEST_WAIT_S)
                )
                self._tries += 1
                self._noted_s = self._clock()
                if await asyncio.to_thread(
                    self._has_room, Path(lacks.folder), max(1, lacks.needed_bytes)
                ):
                    self._lacks = None
        finally:
            self.waiting_for = ""
