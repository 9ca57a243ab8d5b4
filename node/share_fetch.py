# SPDX-License-Identifier: Apache-2.0
"""Fetches the other sides' shares of a step (node/shares.py), from whichever replica has them."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
from torch import Tensor

from shoal.compression import integers
from shoal.node.shares import WAIT_S, ShareKey, mirrored_numel
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import (
    BoundaryHoleError,
    ShoalError,
    UnreachableError,
    WrongLeaseError,
    WrongShapeError,
)
from shoal.protocol.ids import NOBODY, Incarnation, PeerId
from shoal.protocol.proto import peer_pb2, types_pb2
from shoal.protocol.rpc import Credentials, backoff, error_from_rpc
from shoal.protocol.spec import ResolvedRun
from shoal.protocol.wire import RefusedTensor, fetch_share, receive_tensors

log = logging.getLogger(__name__)

_DEADLINE_S = 2 * WAIT_S
_LEAST_BYTES_PER_S = 500_000
"""An answer may take `_DEADLINE_S` and a second per so many bytes."""
_RETRY_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class FetchedShare:
    values: Tensor
    """Flat int64."""
    num_bytes: int
    """On the wire."""


class ShareFetch:
    """One stage's. Channels stay open until `close`."""

    def __init__(
        self,
        run: ResolvedRun,
        stage: int,
        *,
        me: Incarnation,
        swarm: SwarmView,
        credentials: Credentials,
        on_unreachable: Callable[[types_pb2.Member, str], None],
    ) -> None:
        self._run_id = run.run_id
        self._numel = mirrored_numel(run.spec)
        self._stage = stage
        self._me = me
        self._swarm = swarm
        self._credentials = credentials
        self._on_unreachable = on_unreachable
        self._channels: dict[Incarnation, grpc.aio.Channel] = {}
        self._rng = random.Random(me)
        self._asked: dict[int, Incarnation] = {}  # by boundary, who has yet to answer
        self.num_fetched = 0

    @property
    def waits_for(self) -> Incarnation:
        """Whose share is on its way."""
        return next(iter(self._asked.values()), NOBODY)

    async def fetch(self, wanted: Iterable[ShareKey]) -> dict[int, FetchedShare]:
        """The other side's share by boundary.

        Asks replicas in turn until one answers: cancelled from outside when the round is.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {key.boundary: group.create_task(self._fetch(key)) for key in wanted}
        finally:
            self._asked.clear()
        return {boundary: task.result() for boundary, task in tasks.items()}

    async def _fetch(self, key: ShareKey) -> FetchedShare:
        stage = key.boundary if self._stage != key.boundary else key.boundary + 1
        attempt = 0
        while True:
            # Not all replicas of this stage ask the same one.
            replicas = self._swarm.members_of(stage)
            if replicas:
                member = replicas[(self._me + attempt) % len(replicas)]
                self._asked[key.boundary] = Incarnation(member.incarnation)
                try:
                    share = await self._ask(member, key, stage)
                    del self._asked[key.boundary]
                    self.num_fetched += 1
                    return share
                except UnreachableError as error:
                    self._on_unreachable(member, str(error))
                except ShoalError as error:
                    log.info("share of boundary %d from %s: %s", key.boundary, member.name, error)
            await asyncio.sleep(backoff(attempt, self._rng, limit_s=_RETRY_LIMIT_S))
            attempt += 1

    async def _ask(self, member: types_pb2.Member, key: ShareKey, stage: int) -> FetchedShare:
        incarnation = Incarnation(member.incarnation)
        channel = self._channels.get(incarnation)
        if channel is None:
            channel = self._credentials.channel(member.address, PeerId(member.peer_id))
            self._channels[incarnation] = channel
        request = request_of(self._run_id, key, stage)
        return await ask_for_share(channel, request, self._numel, name=member.name)

    async def drop(self, incarnation: Incarnation) -> None:
        """The member is gone: nobody waits for its answer."""
        channel = self._channels.pop(incarnation, None)
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        for incarnation in list(self._channels):
            await self.drop(incarnation)


def request_of(run_id: str, key: ShareKey, stage: int) -> peer_pb2.ShareRequest:
    return peer_pb2.ShareRequest(
        run_id=run_id,
        step=key.step,
        boundary=key.boundary,
        stage=stage,
        scale_exponent=key.scale_exponent,
        loss_scale=key.loss_scale,
    )


async def ask_for_share(
    channel: grpc.aio.Channel, request: peer_pb2.ShareRequest, numel: int, *, name: str
) -> FetchedShare:
    """`numel` int64 values. Raises `BoundaryHoleError` where the node has no such share, and the
    `ShoalError` with which the call or its answer failed."""

    def admit(header: types_pb2.TensorHeader) -> int:
        key = header.key
        asked = (request.run_id, request.step, request.stage, request.boundary)
        if (key.run_id, key.step, key.stage, key.microbatch) != asked or (
            key.direction != types_pb2.DIRECTION_SHARE
        ):
            raise WrongLeaseError("a share that was not asked for")
        if list(header.shape) != [numel] or header.dtype != types_pb2.DTYPE_INT64:
            raise WrongShapeError(
                f"share of shape {list(header.shape)[:8]} and dtype {header.dtype}; the plan's is "
                f"int64 with {numel} elements"
            )
        integers.check_length(header.codec, header.payload_bytes, numel)
        return header.payload_bytes

    timeout_s = _DEADLINE_S + 8 * numel / _LEAST_BYTES_PER_S
    try:
        messages = fetch_share(channel, request, timeout_s=timeout_s)
        async for received in receive_tensors(messages, admit):
            if isinstance(received, RefusedTensor):
                raise received.error
            values = await asyncio.to_thread(
                integers.decode, received.header.codec, received.payload, numel
            )
            return FetchedShare(values, received.header.payload_bytes)
    except grpc.aio.AioRpcError as rpc_error:
        raise error_from_rpc(rpc_error) from None
    raise BoundaryHoleError(f"{name} has no share of boundary {request.boundary}", "")
