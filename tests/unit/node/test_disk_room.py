# SPDX-License-Identifier: Apache-2.0
"""A full disk is waited for: in words, with growing pauses, until there is room."""

import random
from pathlib import Path

from shoal.node.disk_room import LONGEST_WAIT_S, DiskRoom
from shoal.protocol.errors import CapacityError, DiskFullError, StorageError

FULL = DiskFullError("state: No space left on device", folder="/disk", needed_bytes=12_300_000)


class Bench:
    """A disk that has room from the try `room_at` on."""

    def __init__(self, room_at: int = 0) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self.asked: list[tuple[Path, int]] = []
        self.said: list[str] = []
        self.meanwhile: list[str] = []
        self.room_at = room_at
        self.room = DiskRoom(
            self.said.append, has_room=self.has_room, sleep=self.sleep, clock=lambda: self.now_s,
            rng=random.Random(0),
        )  # fmt: skip

    def has_room(self, folder: Path, num_bytes: int) -> bool:
        self.asked.append((folder, num_bytes))
        return len(self.asked) > self.room_at

    async def sleep(self, seconds: float) -> None:
        self.meanwhile.append(self.room.waiting_for)
        self.slept.append(seconds)
        self.now_s += seconds


async def test_without_a_full_disk_nobody_waits() -> None:
    bench = Bench()
    bench.room.note(CapacityError("no memory"))
    bench.room.note(StorageError("a damaged file"))
    bench.room.note(DiskFullError("some other machine's disk"))
    await bench.room.wait()
    assert bench.slept == []


async def test_it_waits_until_there_is_room_and_says_for_what() -> None:
    bench = Bench(room_at=3)
    bench.room.note(FULL)
    await bench.room.wait()
    assert bench.asked == [(Path("/disk"), 12_300_000)] * 4
    assert "12.3 MB of room" in bench.meanwhile[0]
    assert "free space under /disk" in bench.meanwhile[0]
    assert len(bench.said) == 1
    assert bench.room.waiting_for == ""
    await bench.room.wait()
    assert len(bench.slept) == 4, "what is over is not waited for again"


async def test_pauses_grow_up_to_a_limit() -> None:
    bench = Bench(room_at=20)
    bench.room.note(FULL)
    await bench.room.wait()
    assert bench.slept[0] <= 1.0
    assert all(LONGEST_WAIT_S / 2 <= pause <= LONGEST_WAIT_S for pause in bench.slept[6:])


async def test_a_disk_that_only_looks_as_if_it_had_room_is_not_tried_ever_faster() -> None:
    bench = Bench()
    for _ in range(8):
        bench.room.note(FULL)
        await bench.room.wait()
    assert bench.slept[7] > LONGEST_WAIT_S / 2
    bench.now_s += 3600.0
    bench.room.note(FULL)
    await bench.room.wait()
    assert bench.slept[-1] <= 1.0, "an hour later it is another matter"
