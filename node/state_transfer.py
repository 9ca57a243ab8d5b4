# SPDX-License-Identifier: Apache-2.0
"""A stage's state and token shards, to and from other machines."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from shoal.node.admission import Membership
from shoal.protocol.errors import UnreachableError
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2, peer_pb2, peer_pb2_grpc
from shoal.protocol.rpc import error_from_rpc
from shoal.protocol.state_file import StateExpectation, StateReceiver, chunks

if TYPE_CHECKING:
    from shoal.protocol.proto.coordinator_pb2_grpc import CoordinatorAsyncStub

IDLE_LIMIT_S = 120.0
"""Without a chunk for so long, a transfer is given up; the donor writes a file before the first."""

_DEADLINE_S = 600.0
_LEAST_BYTES_PER_S = 500_000
"""A transfer may take `_DEADLINE_S` and a second per so many bytes."""


class StateTransfer:
    """`stub` gives the stub of the session that lives now, or raises `UnreachableError`."""

    def __init__(
        self, membership: Membership, scratch: Path, stub: "Callable[[], CoordinatorAsyncStub]"
    ) -> None:
        self._membership = membership
        self._scratch = scratch
        self._stub = stub

    async def fetch_state(self, assign: coordinator_pb2.Assign) -> Path:
        """The assigned stage's state file, from the donor or the coordinator's store; the caller
        removes it. Raises `UnreachableError` and whatever the sender or the checks refuse."""
        expect = StateExpectation.of(self._membership.run, assign.stage, assign.step)
        path = self._scratch / f"incoming-{assign.incarnation}.safetensors"
        try:
            with StateReceiver(path, expect.max_bytes) as receiver:
                async for chunk in self._source(assign, _deadline_s(expect.max_bytes)):
                    await asyncio.to_thread(receiver.feed, chunk)
                await asyncio.to_thread(receiver.finish)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return path

    async def _source(
        self, assign: coordinator_pb2.Assign, deadline_s: float
    ) -> AsyncIterator[peer_pb2.StateChunk]:
        request = peer_pb2.StateRequest(
            run_id=self._membership.run.run_id, stage=assign.stage, step=assign.step
        )
        if assign.source == coordinator_pb2.STATE_SOURCE_SNAPSHOT:
            async for chunk in _unless_idle(
                self._stub().FetchSnapshot(request, timeout=deadline_s)
            ):
                yield chunk
            return
        donor = assign.donor
        credentials = self._membership.credentials
        async with credentials.channel(donor.address, PeerId(donor.peer_id)) as channel:
            stub = peer_pb2_grpc.PeerStub(channel)
            async for chunk in _unless_idle(stub.FetchState(request, timeout=deadline_s)):
                yield chunk

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
