# SPDX-License-Identifier: Apache-2.0
"""What a standby fetches beside the log: shards and snapshots, while it follows a leader."""

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from shoal.coordinator.data.shards import shard_path
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.standby_copy import StandbyCopy
from shoal.protocol.atomic_file import fsync_folder, storage_error
from shoal.protocol.errors import MalformedFrameError, ShoalError, TruncatedStreamError
from shoal.protocol.identity import NodeIdentity, TlsKey
from shoal.protocol.proto import coordinator_pb2, coordinator_pb2_grpc, peer_pb2
from shoal.protocol.rpc import Credentials, backoff, error_from_rpc
from shoal.protocol.state_chunks import MAX_CHUNKS_ASKED, PartialState, check_description
from shoal.protocol.state_file import StateExpectation, StateReceiver

if TYPE_CHECKING:
    from shoal.protocol.proto.coordinator_pb2_grpc import CoordinatorAsyncStub

log = logging.getLogger(__name__)

KEPT_SNAPSHOTS = 2

_ROUND_S = 1.0
_RETRY_LIMIT_S = 30.0
_TRANSFER_S = 600.0
_LEAF_S = 3600.0


class BulkCopy:
    def __init__(self, copy: StandbyCopy, *, say: Callable[[str], None]) -> None:
        self._copy = copy
        self._say = say
        self.leader = ""
        """Its session address; empty while there is none."""
        self.wanted_snapshots: tuple[int, ...] = ()
        """Steps of the newest that it has."""
        self.trouble = ""
        """Why something is missing, for people."""
        self._store: SnapshotStore | None = None

    async def keep_up(self) -> None:
        """Until it is cancelled."""
        failures, rng, self._store = 0, random.Random(), None
        while True:
            rest_s = backoff(failures, rng, limit_s=_RETRY_LIMIT_S) if failures else 0.0
            await asyncio.sleep(_ROUND_S + rest_s)
            if not self.leader or not self._copy.has_files:
                continue
            try:
                await self._fetch_missing()
                failures, self.trouble = 0, ""
            except ShoalError as error:
                log.info("not copied: %s", error)
                failures, self.trouble = failures + 1, str(error)

    async def _fetch_missing(self) -> None:
        shards = await asyncio.to_thread(self._copy.missing_shards)
        if shards:
            await self._fetch_shards(shards)
        if self._store is None:
            self._store = await asyncio.to_thread(SnapshotStore, self._copy.folder, self._copy.run)
        for step in worth_fetching(self._store.complete_steps(), self.wanted_snapshots):
            await self._fetch_snapshot(self._store, step)
            self._say(f"copied the snapshot of step {step}")

    @contextlib.asynccontextmanager
    async def _reach(self) -> "AsyncIterator[CoordinatorAsyncStub]":
        """With a leaf that the standby issues to itself: it holds the run's keys."""
        authority = self._copy.authority
        identity = NodeIdentity.load_or_create(self._copy.folder / "keys")
        key = TlsKey.generate()
        leaf, _ = authority.issue_leaf(key.spki_der, identity.peer_id, _LEAF_S, time.time())
        credentials = Credentials(
            private_key_pem=key.private_pem, leaf_pem=leaf, authority_pem=authority.certificate_pem
        )
        async with credentials.channel(self.leader, identity.peer_id) as channel:
            try:
                yield coordinator_pb2_grpc.CoordinatorStub(channel)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None

    async def _fetch_shards(self, missing: Sequence[bytes]) -> None:
        """By digest. Raises `ShoalError`."""
        run = self._copy.run
        largest = max(
            ref.num_tokens * run.data.token_bytes for ref in (*run.data.train, *run.data.validation)
        )
        async with self._reach() as leader:
            for sha256 in missing:
                path = shard_path(self._copy.folder, sha256.hex())
                call = leader.FetchShard(
                    coordinator_pb2.ShardRequest(sha256=sha256), timeout=_TRANSFER_S
                )
                incoming = path.with_name(f".{path.name}.{secrets.token_hex(4)}.incoming")
                with StateReceiver(incoming, largest) as receiver:
                    async for chunk in call:
                        receiver.feed(chunk)
                    await asyncio.to_thread(receiver.finish)
                await asyncio.to_thread(_place_shard, incoming, path, sha256.hex())
                self._copy.found_intact(sha256)

    async def _fetch_snapshot(self, store: SnapshotStore, step: int) -> None:
        """The states at `step` that are missing yet; what came before a broken connection stays.
        Raises `ShoalError`."""
        async with self._reach() as leader:
            for stage in store.missing(step):
                await self._fetch_stage(leader, store, step, stage)
        store.prune(keep=KEPT_SNAPSHOTS)

    async def _fetch_stage(
        self, leader: "CoordinatorAsyncStub", store: SnapshotStore, step: int, stage: int
    ) -> None:
        run = self._copy.run
        request = peer_pb2.StateRequest(run_id=run.run_id, stage=stage, step=step)
        description = await leader.DescribeSnapshot(request, timeout=_TRANSFER_S)
        check_description(description, max_bytes=StateExpectation.of(run, stage, step).max_bytes)
        path = store.partial_path(step, stage)
        with await asyncio.to_thread(PartialState, path, description) as partial:
            wanted = [index for index in range(partial.num_chunks) if index not in partial.have]
            for first in range(0, len(wanted), MAX_CHUNKS_ASKED):
                asked = wanted[first : first + MAX_CHUNKS_ASKED]
                request.chunks[:] = asked
                await _bring(leader.FetchSnapshot(request, timeout=_TRANSFER_S), asked, partial)
        await asyncio.to_thread(_make_durable, path)
        await asyncio.to_thread(store.add, step, stage, path)


async def _bring(
    pieces: AsyncIterable[peer_pb2.StateChunk], asked: Sequence[int], partial: PartialState
) -> None:
    """Raises `TruncatedStreamError`, `MalformedFrameError`, `ChecksumError`, `StorageError`."""
    incoming = aiter(pieces)
    for index in asked:
        data, length = bytearray(), partial.length(index)
        while len(data) < length:
            piece = await anext(incoming, None)
            if piece is None:
                raise TruncatedStreamError(f"the leader ended within chunk {index} of a snapshot")
            in_place = piece.offset == partial.offset(index) + len(data)
            if not in_place or not 0 < len(piece.data) <= length - len(data):
                raise MalformedFrameError(
                    f"{len(piece.data)} bytes at {piece.offset}, within chunk {index}"
                )
            data += piece.data
        await asyncio.to_thread(partial.write, index, data)


def _make_durable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(path, error) from error


def worth_fetching(have: Sequence[int], offered: Sequence[int]) -> list[int]:
    """Steps of the offered snapshots that would be kept. Pure."""
    newest = sorted({*have, *offered})[-KEPT_SNAPSHOTS:]
    return [step for step in newest if step not in have]


def _place_shard(incoming: Path, path: Path, sha256: str) -> None:
    """Raises `MalformedFrameError` for other bytes than were asked, `StorageError`."""
    try:
        with incoming.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise MalformedFrameError(
                f"a shard with SHA-256 {found[:16]}…, asked was {sha256[:16]}…"
            )
        os.replace(incoming, path)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        incoming.unlink(missing_ok=True)
    fsync_folder(path.parent)
