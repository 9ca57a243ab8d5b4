# SPDX-License-Identifier: Apache-2.0
"""Bounds how fast a node gives its stage's state away in the background."""

import asyncio
from collections.abc import Awaitable, Callable


class Pace:
    """So many bytes a second over everybody who spends; 0 has no bound. Bursts of a second pass."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._sleep = sleep
        self._free_s = 0.0

    async def spend(self, num_bytes: int) -> None:
        """Before the bytes are sent; waits for its turn."""
        if self._bytes_per_s <= 0:
            return
        now_s = self._clock()
        self._free_s = max(self._free_s, now_s - 1.0) + num_bytes / self._bytes_per_s
        if self._free_s > now_s:
            await self._sleep(self._free_s - now_s)
