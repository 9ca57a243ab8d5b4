# SPDX-License-Identifier: Apache-2.0
"""Answers a peer that replays its stage: frames out of this node's boundary log."""

from collections.abc import AsyncIterator

from shoal.compression.codec import Leg
from shoal.compression.registry import parse_boundary
from shoal.node.boundary_log import BoundaryLog
from shoal.protocol.costs import boundary_shape
from shoal.protocol.errors import ImpossibleLeaseError, MalformedFrameError, WrongRunError
from shoal.protocol.proto import peer_pb2, types_pb2
from shoal.protocol.spec import ResolvedRun
from shoal.protocol.wire import checksum, frames

LEGS: dict[int, Leg] = {
    types_pb2.DIRECTION_FORWARD: "forward",
    types_pb2.DIRECTION_BACKWARD: "backward",
}


class LoggedBoundaries:
    def __init__(self, run: ResolvedRun, log: BoundaryLog) -> None:
        self._run = run
        self._log = log
        self._boundary = parse_boundary(run.spec.pipeline.boundary)
        self._shape = boundary_shape(run.spec)

    async def frames(self, request: peer_pb2.BoundaryRequest) -> AsyncIterator[bytes]:
        """Serialized frames of those asked-for tensors that the log has, one tensor in memory at a
        time. Raises a `ProtocolError` for what no step of this run has."""
        leg, sender = self._check(request)
        codec = self._boundary.forward if leg == "forward" else self._boundary.backward
        places = await self._log.places(request.step, sender)
        for microbatch in request.microbatches:
            place = places.get((leg, microbatch))
            payload = await self._log.read(request.step, sender, place) if place else None
            if payload is None:
                continue
            header = types_pb2.TensorHeader(
                key=types_pb2.TensorKey(
                    run_id=self._run.run_id,
                    step=request.step,
                    microbatch=microbatch,
                    stage=request.stage,
                    direction=request.direction,
                ),
                codec=codec.spec,
                codec_version=codec.version,
                dtype=types_pb2.DTYPE_FLOAT32,
                shape=self._shape,
                payload_bytes=len(payload),
                checksum=checksum(payload),
            )
            for frame in frames(header, payload):
                yield frame

    def _check(self, request: peer_pb2.BoundaryRequest) -> tuple[Leg, int]:
        """(leg, the stage that sent it)."""
        if request.run_id != self._run.run_id:
            raise WrongRunError(
                f"boundary tensors of run {request.run_id[:64]!r}; this is {self._run.run_id!r}"
            )
        leg = LEGS.get(request.direction)
        if leg is None:
            raise MalformedFrameError(f"direction {request.direction} is not a boundary's")
        most = self._run.spec.batch.microbatches
        asked = request.microbatches
        sender = request.stage + (-1 if leg == "forward" else 1)
        stages = self._run.spec.pipeline.stages
        if not (0 <= sender < stages and request.stage < stages):
            raise ImpossibleLeaseError(f"stage {request.stage} has no {leg} tensors of others")
        if len(asked) > most or any(microbatch >= most for microbatch in asked):
            raise ImpossibleLeaseError(
                f"{len(asked)} microbatches asked for, up to {max(asked, default=0)}; a step has "
                f"{most}"
            )
        return leg, sender
