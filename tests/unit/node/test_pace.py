# SPDX-License-Identifier: Apache-2.0
"""What joiners get in the background, at most so fast."""

from shoal.node.pace import Pace


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def spent(rate: float, *sizes: int) -> float:
    time = Time()
    pace = Pace(rate, clock=lambda: time.now_s, sleep=time.sleep)
    for size in sizes:
        await pace.spend(size)
    return time.now_s - 100.0


async def test_bytes_take_their_time_after_a_burst_of_a_second() -> None:
    assert await spent(1000.0, 500, 500) == 0.0
    assert await spent(1000.0, *[500] * 10) == 4.0


async def test_without_a_bound_nothing_waits() -> None:
    assert await spent(0, 1 << 40) == 0.0
