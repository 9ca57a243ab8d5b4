# SPDX-License-Identifier: Apache-2.0
"""A stage's state and token shards, to and from other machines."""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from shoal.node.admission import Membership
from shoal.node.state_fetch import FetchProgress, OnBadPeer, StateFetch
from shoal.node.state_sources import PeerSource, SnapshotSource, StateSource
from shoal.protocol.errors import UnreachableError
from shoal.protocol.proto import coordinator_pb2, peer_pb2, types_pb2
from shoal.protocol.rpc import error_from_rpc
from shoal.protocol.state_file import StateExpectation, chunks

if TYPE_CHECKING:
    from shoal.protocol.proto.coordinator_pb2_grpc import CoordinatorAsyncStub

log = logging.getLogger(__name__)

IDLE_LIMIT_S = 120.0
"""Without a chunk of a shard for so long, the transfer is given up."""

_MAX_PARTIAL = 2
"""Partial state files kept beside the one in use."""

_PART_NAMES = {
    types_pb2.STATE_PART_WEIGHTS: "the weights",
    types_pb2.STATE_PART_MOMENTS: "the moments",
}

Version = tuple[int, int, types_pb2.StatePart.ValueType]
"""(stage, step, part)"""

_DEADLINE_S = 600.0
_LEAST_BYTES_PER_S = 500_000
"""A transfer may take `_DEADLINE_S` and a second per so many bytes."""


class StateTransfer:
    """`stub` gives the stub of the session that lives now, or raises `UnreachableError`."""

    def __init__(
        self,
        membership: Membership,
        folder: Path,
        stub: "Callable[[], CoordinatorAsyncStub]",
        *,
        on_bad: OnBadPeer = lambda peer, error: None,
    ) -> None:
        """`on_bad` hears of donors that lie."""
        self._membership = membership
        self._partial = folder / "partial"
        self._stub = stub
        self._on_bad = on_bad

    def partial_path(self, version: Version) -> Path:
        """Kept in the node's folder, so that a copy goes on after a restart."""
        stage, step, part = version
        run_id = self._membership.run.run_id
        return self._partial / f"{run_id}-stage-{stage}-step-{step}-part-{part}.partial"

    async def fetch_state(
        self,
        version: Version,
        donors: coordinator_pb2.Donors | None,
        *,
        judge: Callable[[Path], Awaitable[bool]],
        progress: FetchProgress,
    ) -> Path:
        """A part of a stage's state from the donors, or with None from the coordinator's store; the
        caller removes the file. Raises as `StateFetch.run`."""
        stage, step, part = version
        run = self._membership.run
        sources: list[StateSource] = []
        if donors is None:
            sources.append(SnapshotSource(self._stub))
        else:
            for member in donors.members:
                with contextlib.suppress(UnreachableError):  # an address that is none
                    sources.append(PeerSource(self._membership.credentials, member))
        path = self.partial_path(version)
        await asyncio.to_thread(self._tidy, path)
        fetch = StateFetch(
            sources,
            peer_pb2.StateRequest(run_id=run.run_id, stage=stage, step=step, part=part),
            path,
            max_bytes=StateExpectation.of(run, stage, step, part=part).max_bytes,
            weights_digest=donors.weights_digest if donors and donors.has_weights_digest else None,
            judge=judge,
            on_bad=self._on_bad,
            progress=progress,
        )
        found = await fetch.run()
        log.info(
            "got %s of stage %d at step %d: %d bytes fetched, %d bytes were there",
            _PART_NAMES.get(part, "the state"),
            stage,
            step,
            progress.fetched_bytes,
            progress.resumed_bytes,
        )
        return found

    def _tidy(self, path: Path) -> None:
        """Only the newest few partial files are worth their space."""
        with contextlib.suppress(OSError):
            old = [p for p in self._partial.glob("*.partial") if p != path]
            old.sort(key=lambda p: p.stat().st_mtime)
            for left in old[: max(0, len(old) - _MAX_PARTIAL)]:
                left.unlink(missing_ok=True)

    def forget(self) -> None:
        """The node ends in peace: nobody will resume."""
        shutil.rmtree(self._partial, ignore_errors=True)

    async def fetch_shard(self, sha256: str) -> AsyncIterator[bytes]:
        request = coordinator_pb2.ShardRequest(sha256=bytes.fromhex(sha256))
        try:
            async for chunk in _unless_idle(self._stub().FetchShard(request, timeout=_DEADLINE_S)):
                yield chunk.data
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    async def store_snapshot(self, path: Path, *, stage: int, step: int) -> None:
        """Send a state file to the coordinator's store. Raises what it refuses."""
        run_id = self._membership.run.run_id

        async def upload() -> AsyncIterator[coordinator_pb2.SnapshotChunk]:
            request = peer_pb2.StateRequest(run_id=run_id, stage=stage, step=step)
            yield coordinator_pb2.SnapshotChunk(snapshot=request)
            pieces = chunks(path)
            while (chunk := await asyncio.to_thread(next, pieces, None)) is not None:
                yield coordinator_pb2.SnapshotChunk(chunk=chunk)

        try:
            await self._stub().StoreSnapshot(upload(), timeout=_deadline_s(path.stat().st_size))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


def _deadline_s(num_bytes: int) -> float:
    return _DEADLINE_S + num_bytes / _LEAST_BYTES_PER_S


async def _unless_idle(
    stream: AsyncIterable[peer_pb2.StateChunk],
) -> AsyncIterator[peer_pb2.StateChunk]:
    chunks_in = aiter(stream)
    while True:
        try:
            async with asyncio.timeout(IDLE_LIMIT_S):
                chunk = await anext(chunks_in, None)
        except TimeoutError:
            raise UnreachableError(f"no state data arrived for {IDLE_LIMIT_S:.0f} s") from None
        if chunk is None:
            return
        yield chunk
