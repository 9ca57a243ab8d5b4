# SPDX-License-Identifier: Apache-2.0
"""The inputs of a replay, out of the boundary logs of others: a step at a time, checked."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
from torch import Tensor

from shoal.compression.codec import CodecContext, Leg, WireCodec
from shoal.compression.registry import Boundary
from shoal.node.logged_boundaries import LEGS
from shoal.node.share_fetch import ask_for_share, request_of
from shoal.node.shares import ShareKey, mirrored_numel
from shoal.protocol.costs import boundary_shape
from shoal.protocol.errors import (
    BoundaryHoleError,
    ShoalError,
    UnreachableError,
    WrongCodecError,
    WrongLeaseError,
    WrongShapeError,
)
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2, peer_pb2, types_pb2
from shoal.protocol.rpc import Credentials, backoff, error_from_rpc
from shoal.protocol.spec import ResolvedRun
from shoal.protocol.wire import Payload, RefusedTensor, fetch_boundary, receive_tensors

R = TypeVar("R")

_TRIES = 3
_DEADLINE_S = 30.0
_LEAST_BYTES_PER_S = 500_000
"""A fetch may take `_DEADLINE_S` and a second per so many bytes."""


@dataclass(frozen=True, slots=True)
class Logged:
    """An encoded tensor, where it came from, and what its codec must know."""

    payload: Payload
    source: types_pb2.Member
    context: CodecContext


@dataclass(frozen=True, slots=True)
class StepInputs:
    """By microbatch; empty where the stage has no neighbour."""

    inputs: Mapping[int, Logged]
    gradients: Mapping[int, Logged]
    shares: Mapping[int, Tensor] = field(default_factory=dict)
    """By boundary: the other side's share of what both sides hold (node/shares.py)."""

    @property
    def num_bytes(self) -> int:
        payloads = (x.payload for x in (*self.inputs.values(), *self.gradients.values()))
        return sum(map(len, payloads)) + sum(share.nbytes for share in self.shares.values())


class BoundaryFetch:
    """`async with BoundaryFetch(…) as fetch`: one channel to each log, for as long."""

    def __init__(
        self,
        run: ResolvedRun,
        stage: int,
        logs: Iterable[types_pb2.Member],
        *,
        boundary: Boundary,
        credentials: Credentials,
    ) -> None:
        self._run = run
        self._stage = stage
        self._logs = list(logs)
        self._boundary = boundary
        self._credentials = credentials
        self._shape = boundary_shape(run.spec)
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def __aenter__(self) -> "BoundaryFetch":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    async def step(self, step: coordinator_pb2.ReplayStep) -> StepInputs:
        """Everything that the step needs. Raises `BoundaryHoleError`, which names whose log lacks
        something, or can't be reached."""
        number = step.commit.step
        try:
            async with asyncio.TaskGroup() as group:
                inputs = [
                    group.create_task(self._fetch(number, types_pb2.DIRECTION_FORWARD, source))
                    for source in step.inputs
                ]
                gradients = [
                    group.create_task(self._fetch(number, types_pb2.DIRECTION_BACKWARD, source))
                    for source in step.gradients
                ]
                shares = {
                    source.boundary: group.create_task(self._fetch_share(step.commit, source))
                    for source in step.shares
                }
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return StepInputs(
            inputs=_merged(task.result() for task in inputs),
            gradients=_merged(task.result() for task in gradients),
            shares={boundary: task.result() for boundary, task in shares.items()},
        )

    async def _fetch(
        self,
        step: int,
        direction: types_pb2.Direction.ValueType,
        source: coordinator_pb2.BoundarySource,
    ) -> dict[int, Logged]:
        log = self._log(source.log)
        leg = LEGS[direction]
        request = peer_pb2.BoundaryRequest(
            run_id=self._run.run_id,
            step=step,
            stage=self._stage,
            direction=direction,
            microbatches=source.microbatches,
        )
        where = f"{log.name}'s log of step {step}"
        try:
            payloads = await self._ask(source.log, log, request)
        except ShoalError as error:
            raise BoundaryHoleError(f"{where}: {error}", log.peer_id) from None
        missing = [m for m in source.microbatches if m not in payloads]
        if missing:
            raise BoundaryHoleError(
                f"{where} lacks the {leg} tensor of microbatch {missing[0]}"
                + (f" and of {len(missing) - 1} more" if len(missing) > 1 else ""),
                log.peer_id,
            )
        boundary = self._stage - (leg == "forward")
        return {
            m: Logged(
                payloads[m],
                log,
                CodecContext(
                    run_seed=self._run.spec.seed,
                    step=step,
                    microbatch=m,
                    boundary=boundary,
                    leg=leg,
                ),
            )
            for m in source.microbatches
        }

    async def _fetch_share(
        self, commit: coordinator_pb2.Commit, source: coordinator_pb2.ShareSource
    ) -> Tensor:
        log = self._log(source.log)
        key = ShareKey(commit.step, source.boundary, commit.scale_exponent, commit.loss_scale)
        other = source.boundary if source.boundary != self._stage else self._stage + 1
        request = request_of(self._run.run_id, key, other)
        numel = mirrored_numel(self._run.spec)
        try:
            share = await _persistently(
                lambda: ask_for_share(self._channel(source.log, log), request, numel, name=log.name)
            )
            return share.values
        except ShoalError as error:
            where = f"{log.name}'s log of step {commit.step}"
            raise BoundaryHoleError(f"{where}: {error}", log.peer_id) from None

    def _log(self, index: int) -> types_pb2.Member:
        if index >= len(self._logs):
            raise WrongLeaseError(f"the plan names log {index} of {len(self._logs)}")
        return self._logs[index]

    def _channel(self, index: int, log: types_pb2.Member) -> grpc.aio.Channel:
        channel = self._channels.get(index)
        if channel is None:
            channel = self._credentials.channel(log.address, PeerId(log.peer_id))
            self._channels[index] = channel
        return channel

    async def _ask(
        self, index: int, log: types_pb2.Member, request: peer_pb2.BoundaryRequest
    ) -> dict[int, Payload]:
        """What the log has of it."""
        return await _persistently(lambda: self._ask_once(self._channel(index, log), request))

    async def _ask_once(
        self, channel: grpc.aio.Channel, request: peer_pb2.BoundaryRequest
    ) -> dict[int, Payload]:
        codec = self._codec(LEGS[request.direction])
        most, wanted = codec.max_encoded_bytes(self._shape), set(request.microbatches)

        def admit(header: types_pb2.TensorHeader) -> int:
            key = header.key
            asked = (request.run_id, request.step, request.stage, request.direction)
            if (key.run_id, key.step, key.stage, key.direction) != asked or (
                key.microbatch not in wanted
            ):
                raise WrongLeaseError("a tensor that was not asked for")
            if header.codec != codec.spec or header.codec_version != codec.version:
                raise WrongCodecError(f"codec {header.codec[:64]!r}; the run's is {codec.spec!r}")
            if tuple(header.shape) != self._shape or header.dtype != types_pb2.DTYPE_FLOAT32:
                raise WrongShapeError(f"shape {list(header.shape)[:8]}, dtype {header.dtype}")
            wanted.discard(key.microbatch)
            return codec.admitted_bytes(self._shape, header.payload_bytes)

        timeout_s = _DEADLINE_S + most * len(wanted) / _LEAST_BYTES_PER_S
        found: dict[int, Payload] = {}
        try:
            messages = fetch_boundary(channel, request, timeout_s=timeout_s)
            async for received in receive_tensors(messages, admit):
                if isinstance(received, RefusedTensor):
                    raise received.error
                found[received.header.key.microbatch] = received.payload
        except grpc.aio.AioRpcError as rpc_error:
            raise error_from_rpc(rpc_error) from None
        return found

    def _codec(self, leg: Leg) -> WireCodec:
        return self._boundary.forward if leg == "forward" else self._boundary.backward


async def _persistently(ask: Callable[[], Awaitable[R]]) -> R:
    """A connection that fails is tried again, twice."""
    rng = random.Random()
    for attempt in range(_TRIES):
        try:
            return await ask()
        except UnreachableError:
            if attempt + 1 == _TRIES:
                raise
        await asyncio.sleep(backoff(attempt, rng))
    raise AssertionError("the last try returns or raises")


def _merged(parts: Iterable[Mapping[int, Logged]]) -> dict[int, Logged]:
    return {m: logged for part in parts for m, logged in part.items()}
