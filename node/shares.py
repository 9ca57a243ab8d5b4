# SPDX-License-Identifier: Apache-2.0
"""What this stage contributes to the gradient of parameters that both sides of a boundary hold.

A learned codec's projection acts on both sides. Each side sums up its own share of the gradient,
in int64 and at the step's scale; the neighbours fetch it, add it to theirs, and so both sides
apply the same update to the same bits. A share depends on the step and its scale alone, not on
who summed it up or in which attempt: any replica of the stage may answer.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from shoal.compression import integers
from shoal.node.boundary_log import BoundaryLog
from shoal.protocol.errors import (
    ImpossibleLeaseError,
    WrongLeaseError,
    WrongRunError,
    WrongStepError,
)
from shoal.protocol.learned import learned_codec
from shoal.protocol.learned_tensors import has_projection
from shoal.protocol.proto import peer_pb2, types_pb2
from shoal.protocol.spec import ResolvedRun, RunSpec
from shoal.protocol.wire import Payload, checksum, frames

WAIT_S = 20.0
"""How long a request waits for the stage's sums; whoever asks asks again."""


@dataclass(frozen=True, slots=True)
class ShareKey:
    """At another scale the share is another. Boundary b lies between stages b and b+1."""

    step: int
    boundary: int
    scale_exponent: int
    loss_scale: float


@dataclass(frozen=True, slots=True)
class Share:
    """Int64 values, packed (compression/integers.py)."""

    codec: str
    payload: Payload

    @classmethod
    def of(cls, values: Tensor) -> "Share":
        """`values` are flat int64 on the CPU, and don't change afterwards."""
        return cls(*integers.encode(values))


class ShareDesk:
    """One member's shares of the step that it has summed up last, for whoever asks.
    `committed_step` is the member's."""

    def __init__(self, committed_step: int) -> None:
        self.committed_step = committed_step
        self._shares: Mapping[ShareKey, Share] = {}
        self._closed = False
        self._changed = asyncio.Event()

    def offer(self, shares: Mapping[ShareKey, Share]) -> None:
        """The stage's sums are complete. Takes the place of what was offered before."""
        self._shares = shares
        self._notify()

    def close_step(self, committed_step: int) -> None:
        """Whoever asks for a step that is committed here is sent to the log (`SharedOut`)."""
        self.committed_step = committed_step
        self._notify()

    def close(self) -> None:
        self._closed = True
        self._notify()

    async def get(self, key: ShareKey) -> Share:
        """Waits until the stage has summed up that step at that scale, `WAIT_S` at most.

        Raises `WrongStepError` for a step that isn't the next one, and when the wait is over,
        `WrongLeaseError` when the stage is given up.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                while (share := self._shares.get(key)) is None:
                    if self._closed:
                        raise WrongLeaseError("this node gave up its stage")
                    # A peer may have applied a commit that this node has yet to hear of.
                    if not self.committed_step < key.step <= self.committed_step + 2:
                        raise WrongStepError(
                            f"share of step {key.step}; this node is at {self.committed_step}"
                        )
                    await self._changed.wait()
                return share
        except TimeoutError:
            raise WrongStepError(
                f"step {key.step} is not summed up yet at scale 2^{key.scale_exponent}; ask again"
            ) from None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class SharedOut:
    """Answers `FetchShare`: of the open step from the member's desk, of committed ones out of the
    log."""

    def __init__(self, run: ResolvedRun, log: BoundaryLog) -> None:
        self._run_id = run.run_id
        self._num_boundaries = run.spec.pipeline.stages - 1
        self._numel = mirrored_numel(run.spec)
        self._log = log

    async def frames(
        self, request: peer_pb2.ShareRequest, desk: ShareDesk | None
    ) -> AsyncIterator[bytes]:
        """Serialized frames of a share; none where the log lacks it. `desk` is that of the member
        at the stage asked for, None where there is none. Raises a `ProtocolError`."""
        if request.run_id != self._run_id:
            raise WrongRunError(f"share of run {request.run_id[:64]!r}; this is {self._run_id!r}")
        sides = (request.boundary, request.boundary + 1)
        if (
            request.stage not in sides
            or request.boundary >= self._num_boundaries
            or not self._numel
        ):
            raise ImpossibleLeaseError(
                f"stage {request.stage} shares nothing with another over boundary "
                f"{request.boundary}"
            )
        share: Share | None
        if desk is not None and request.step > desk.committed_step:
            share = await desk.get(key_of(request))
        else:
            share = await self._logged(request)
        if share is None:
            return
        header = types_pb2.TensorHeader(
            key=types_pb2.TensorKey(
                run_id=self._run_id,
                step=request.step,
                microbatch=request.boundary,
                stage=request.stage,
                direction=types_pb2.DIRECTION_SHARE,
            ),
            codec=share.codec,
            dtype=types_pb2.DTYPE_INT64,
            shape=[self._numel],
            payload_bytes=len(share.payload),
            checksum=checksum(share.payload),
        )
        for frame in frames(header, share.payload):
            yield frame

    async def _logged(self, request: peer_pb2.ShareRequest) -> Share | None:
        places = await self._log.places(request.step, request.stage)
        place = places.get(("share", request.boundary))
        payload = await self._log.read(request.step, request.stage, place) if place else None
        if payload is None:
            return None
        # Packed is always shorter.
        codec = integers.RAW if len(payload) == 8 * self._numel else integers.PACKED
        return Share(codec, payload)


def mirrored_numel(spec: RunSpec) -> int:
    """Elements that both sides of each boundary hold; 0 where they hold nothing in common."""
    learned = learned_codec(spec.pipeline.boundary)
    return spec.model.dim * learned.width if learned and has_projection(learned) else 0


def key_of(request: peer_pb2.ShareRequest) -> ShareKey:
    return ShareKey(request.step, request.boundary, request.scale_exponent, request.loss_scale)
