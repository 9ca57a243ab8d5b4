# SPDX-License-Identifier: Apache-2.0
"""Which cached shards go when they take too much room."""

import contextlib
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedFile:
    name: str
    num_bytes: int
    used_s: float


def to_evict(
    files: Sequence[CachedFile], max_bytes: int, *, kept: Collection[str]
) -> list[CachedFile]:
    """Those used longest ago, until the rest fits; never one of `kept`. Pure."""
    excess = sum(file.num_bytes for file in files) - max_bytes
    going = []
    for file in sorted(files, key=lambda file: (file.used_s, file.name)):
        if excess <= 0:
            break
        if file.name not in kept:
            going.append(file)
            excess -= file.num_bytes
    return going


def evict(folder: Path, max_bytes: int, *, kept: Collection[str]) -> int:
    """Remove shards from `folder` until it holds at most `max_bytes`; returns how many bytes went.
    What can't be removed now goes another time."""
    files = []
    for path in folder.glob("*.bin"):
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append(CachedFile(path.name, status.st_size, status.st_mtime))
    freed = 0
    for file in to_evict(files, max_bytes, kept=kept):
        log.info("the shard cache is full; removing %s", file.name)
        with contextlib.suppress(OSError):
            (folder / file.name).unlink()
            freed += file.num_bytes
    return freed


def mark_used(path: Path) -> None:
    """Now. A shard that isn't there is marked when it is written."""
    with contextlib.suppress(OSError):
        os.utime(path)
