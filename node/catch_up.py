# SPDX-License-Identifier: Apache-2.0
"""Sums and commits of steps that a worker can't apply yet: it lacks the moments, which are on their
way. In memory up to a bound, then in scratch files."""

import asyncio
import contextlib
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.protocol.atomic_file import AtomicFile, storage_error
from shoal.protocol.errors import CapacityError
from shoal.protocol.proto import coordinator_pb2

RAM_BYTES = 256 << 20
DISK_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class _Entry:
    commit: coordinator_pb2.Commit
    totals: torch.Tensor | Path
    num_bytes: int


class CatchUp:
    """First in, first out. `close` removes the files."""

    def __init__(
        self, folder: Path, *, ram_bytes: int = RAM_BYTES, disk_bytes: int = DISK_BYTES
    ) -> None:
        self._folder = folder
        self._ram_bytes = ram_bytes
        self._disk_bytes = disk_bytes
        self._entries: deque[_Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def steps(self) -> list[int]:
        return [entry.commit.step for entry in self._entries]

    async def append(self, commit: coordinator_pb2.Commit, totals: torch.Tensor) -> None:
        """`totals` is flat int64 on the CPU, and not changed any more. Raises `CapacityError` when
        too much has piled up, `StorageError`."""
        size = totals.nbytes
        kept: torch.Tensor | Path = totals
        if self._held(torch.Tensor) + size > self._ram_bytes:
            if self._held(Path) + size > self._disk_bytes:
                raise CapacityError(
                    f"the sums of {len(self)} steps wait for the optimizer state, which takes too "
                    "long to arrive; a faster line between this node and its stage's others helps"
                )
            kept = self._folder / f"totals-{commit.step}-{uuid.uuid4().hex}"
            await asyncio.to_thread(_write, kept, totals)
        self._entries.append(_Entry(commit, kept, size))

    async def pop(self) -> tuple[coordinator_pb2.Commit, torch.Tensor]:
        """The oldest. Raises `StorageError`. `close` may be called meanwhile."""
        entry = self._entries.popleft()
        totals = entry.totals
        if isinstance(totals, Path):
            totals = await asyncio.to_thread(_read, totals)
        return entry.commit, totals

    def close(self) -> None:
        for entry in self._entries:
            if isinstance(entry.totals, Path):
                with contextlib.suppress(OSError):  # the scratch folder goes at the end
                    entry.totals.unlink()
        self._entries.clear()

    def _held(self, kind: type) -> int:
        return sum(entry.num_bytes for entry in self._entries if isinstance(entry.totals, kind))


def _write(path: Path, totals: torch.Tensor) -> None:
    with AtomicFile(path, durable=False) as file:
        file.write(totals.numpy().data.cast("B"))


def _read(path: Path) -> torch.Tensor:
    """And remove it."""
    try:
        values = np.fromfile(path, dtype=np.int64)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        path.unlink(missing_ok=True)
    return torch.from_numpy(values)
