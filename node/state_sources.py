# SPDX-License-Identifier: Apache-2.0
"""Where a stage's state can be had: a replica that has the version pinned, or the coordinator."""

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Protocol

from shoal.protocol.ids import PeerId
from shoal.protocol.proto import peer_pb2, peer_pb2_grpc, types_pb2
from shoal.protocol.rpc import Credentials

if TYPE_CHECKING:
    from shoal.protocol.proto.coordinator_pb2_grpc import CoordinatorAsyncStub


class StateSource(Protocol):
    """Calls raise `grpc.aio.AioRpcError`, or `UnreachableError`."""

    name: str
    peer_id: PeerId | None
    """None: the coordinator, which nobody reports."""

    async def describe(
        self, request: peer_pb2.StateRequest, *, timeout_s: float
    ) -> peer_pb2.StateDescription: ...
    def fetch(
        self, request: peer_pb2.StateRequest, *, timeout_s: float
    ) -> AsyncGenerator[peer_pb2.StateChunk, None]: ...
    async def close(self) -> None: ...


class PeerSource:
    """A donor. Its channel opens at the first call."""

    def __init__(self, credentials: Credentials, member: types_pb2.Member) -> None:
        """Raises `UnreachableError` for an address that is none."""
        self.name = member.name
        self.peer_id: PeerId | None = PeerId(member.peer_id)
        self._channel = credentials.channel(member.address, PeerId(member.peer_id))
        self._stub = peer_pb2_grpc.PeerStub(self._channel)

    async def describe(
        self, request: peer_pb2.StateRequest, *, timeout_s: float
    ) -> peer_pb2.StateDescription:
        return await self._stub.DescribeState(request, timeout=timeout_s)

    async def fetch(
        self, request: peer_pb2.StateRequest, *, timeout_s: float
    ) -> AsyncGenerator[peer_pb2.StateChunk, None]:
        call = self._stub.FetchState(request, timeout=timeout_s)
        try:
            async for piece in call:
                yield piece
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close(None)


class SnapshotSource:
    """The coordinator's snapshot store, through the session that lives at each call."""

    name = "the coordinator"
    peer_id: PeerId | None = None

    def __init__(self, stub: "Callable[[], CoordinatorAsyncStub]") -> None:
        self._stub = stub

    async def describe(
        self, request: peer_pb2.StateRequest, *, timeout_s: float
    ) -> peer_pb2.StateDescription:
        return await self._stub().DescribeSnapshot(request, timeout=timeout_s)

    async def fetch(
        self, request: peer_pb2.StateRequest, *, timeout_s: float
    ) -> AsyncGenerator[peer_pb2.StateChunk, None]:
        call = self._stub().FetchSnapshot(request, timeout=timeout_s)
        try:
            async for piece in call:
                yield piece
        finally:
            call.cancel()

    async def close(self) -> None:
        """Its channel is the session's."""
