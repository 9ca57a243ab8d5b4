# SPDX-License-Identifier: Apache-2.0
"""What a standby fetches beside the log, from leaders that break off."""

import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.coordinator.data.shards import shard_path
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.standby_bulk import BulkCopy, worth_fetching
from shoal.protocol.errors import (
    ChecksumError,
    MalformedFrameError,
    OversizedStreamError,
    UnreachableError,
)
from shoal.protocol.proto import coordinator_pb2, peer_pb2
from shoal.protocol.state_chunks import chunk_bytes_for, describe, read_chunks
from shoal.protocol.state_file import chunks

from .test_snapshots import RUN, write_stage

TOKENS = bytes(200)
DIGEST = hashlib.sha256(TOKENS).digest()


class Leader:
    """Its stub; it breaks off before it sends the stage that `breaks_at` names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[int] = []
        self.breaks_at: int | None = None
        self.exaggerates_by = 0
        self.damages = False
        self.shard = TOKENS

    async def DescribeSnapshot(
        self, request: peer_pb2.StateRequest, *, timeout: float
    ) -> peer_pb2.StateDescription:
        self.asked.append(request.stage)
        if request.stage == self.breaks_at:
            raise UnreachableError("the connection broke")
        path = write_stage(self.folder / "source", RUN, request.step, request.stage)
        description = describe(path)
        description.total_bytes += self.exaggerates_by
        return description

    async def FetchSnapshot(
        self, request: peer_pb2.StateRequest, *, timeout: float
    ) -> AsyncIterator[peer_pb2.StateChunk]:
        path = write_stage(self.folder / "source", RUN, request.step, request.stage)
        size = chunk_bytes_for(path.stat().st_size)
        for chunk in read_chunks(path, request.chunks, chunk_bytes=size):
            if self.damages:
                chunk.data = bytes(len(chunk.data))
            yield chunk

    async def FetchShard(
        self, request: coordinator_pb2.ShardRequest, *, timeout: float
    ) -> AsyncIterator[peer_pb2.StateChunk]:
        assert request.sha256 == DIGEST
        path = self.folder / "source"
        path.write_bytes(self.shard)
        for chunk in chunks(path):
            yield chunk


class Bulk(BulkCopy):
    def __init__(self, folder: Path) -> None:
        self.missing: list[bytes] = []
        self.intact: list[bytes] = []
        copy: Any = SimpleNamespace(
            folder=folder / "standby", run=RUN, missing_shards=lambda: self.missing,
            found_intact=self.intact.append,
        )  # fmt: skip
        self.said: list[str] = []
        super().__init__(copy, say=self.said.append)
        self.source = Leader(folder)

    @contextlib.asynccontextmanager
    async def _reach(self) -> AsyncIterator[Any]:
        yield self.source


@pytest.fixture
def bulk(tmp_path: Path) -> Bulk:
    return Bulk(tmp_path)


async def test_a_snapshot_goes_on_with_the_stage_at_which_it_broke_off(
    bulk: Bulk, tmp_path: Path
) -> None:
    bulk.wanted_snapshots = (4,)
    bulk.source.breaks_at = 1
    with pytest.raises(UnreachableError):
        await bulk._fetch_missing()
    assert not bulk.said
    bulk.source.breaks_at = None
    await bulk._fetch_missing()
    assert bulk.source.asked == [0, 1, 1]
    assert bulk.said == ["copied the snapshot of step 4"]
    SnapshotStore(tmp_path / "standby", RUN).verify(4)
    await bulk._fetch_missing()
    assert bulk.source.asked == [0, 1, 1], "it has them all"


async def test_a_state_larger_than_the_plan_allows_is_not_fetched(bulk: Bulk) -> None:
    bulk.wanted_snapshots = (4,)
    bulk.source.exaggerates_by = 1 << 40
    with pytest.raises(OversizedStreamError):
        await bulk._fetch_missing()


async def test_a_damaged_chunk_is_not_taken_and_asked_for_again(bulk: Bulk) -> None:
    bulk.wanted_snapshots = (4,)
    bulk.source.damages = True
    with pytest.raises(ChecksumError):
        await bulk._fetch_missing()
    bulk.source.damages = False
    await bulk._fetch_missing()
    assert bulk.said == ["copied the snapshot of step 4"]


@pytest.mark.parametrize(
    ("have", "offered", "fetched"),
    [([], [10, 20], [10, 20]), ([10], [10, 20], [20]), ([10, 20], [20, 30], [30]),
     ([50, 60], [30, 40], []), ([20], [], [])],
)  # fmt: skip
def test_only_what_would_be_kept_is_fetched(
    have: list[int], offered: list[int], fetched: list[int]
) -> None:
    assert worth_fetching(have, offered) == fetched


async def test_a_shard_is_placed_when_it_is_what_was_asked(bulk: Bulk, tmp_path: Path) -> None:
    bulk.missing = [DIGEST]
    path = shard_path(tmp_path / "standby", DIGEST.hex())
    path.parent.mkdir(parents=True)
    bulk.source.shard = b"x" * 200
    with pytest.raises(MalformedFrameError, match="asked was"):
        await bulk._fetch_missing()
    assert list(path.parent.iterdir()) == []
    assert not bulk.intact
    bulk.source.shard = TOKENS
    await bulk._fetch_missing()
    assert path.read_bytes() == TOKENS
    assert bulk.intact == [DIGEST]
