# SPDX-License-Identifier: Apache-2.0
"""Brings a lost stage's state back: from an older snapshot, each committed step computed again out
of what the neighbours logged, and held against its record.

Everything is as in the step itself, but that inputs and gradients come from logs: forward and
backward are pure functions of weights and inputs, sums don't depend on order, and the record says
what the optimizer is told. So the digests must be the recorded ones, or the state is thrown away.
"""

import asyncio
import logging
from collections.abc import Callable

import torch

from shoal.compression.registry import Boundary
from shoal.node.boundary_fetch import BoundaryFetch, Logged, StepInputs
from shoal.node.boundary_log import BoundaryLog
from shoal.node.log_file import Sent
from shoal.node.shares import Share
from shoal.node.stage_worker import StageWorker
from shoal.protocol.costs import boundary_shape
from shoal.protocol.errors import (
    BoundaryHoleError,
    NonFiniteError,
    NumericOverflowError,
    ProtocolError,
    ReplayMismatchError,
)
from shoal.protocol.ids import MicrobatchId
from shoal.protocol.proto import coordinator_pb2

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""(step that the state contains now, bytes from logs so far)."""


class StageReplay:
    """`worker` holds the state at `replay.base_step`; after `run` that of the last step."""

    def __init__(
        self,
        worker: StageWorker,
        replay: coordinator_pb2.Replay,
        *,
        fetch: BoundaryFetch,
        boundary: Boundary,
        device: torch.device,
        log: BoundaryLog,
        progress: Progress,
    ) -> None:
        self._worker = worker
        self._replay = replay
        self._fetch = fetch
        self._boundary = boundary
        self._device = device
        self._log = log
        self._progress = progress
        self._shape = boundary_shape(worker.run.spec)

    async def run(self) -> None:
        """Raises `BoundaryHoleError` where a log lacks something, `ReplayMismatchError` when a
        step gives other bits than its record. The worker's state is then nobody's."""
        num_bytes = 0
        steps = list(self._replay.steps)
        coming: asyncio.Task[StepInputs] | None = None
        try:
            for index, step in enumerate(steps):
                coming = coming or asyncio.create_task(self._fetch.step(step))
                inputs, coming = await coming, None
                if index + 1 < len(steps):  # one step ahead, so that wire and processor overlap
                    coming = asyncio.create_task(self._fetch.step(steps[index + 1]))
                num_bytes += inputs.num_bytes
                try:
                    await self._step(step, inputs)
                except (NonFiniteError, NumericOverflowError) as error:
                    raise ReplayMismatchError(
                        f"step {step.commit.step} of stage {self._worker.spec.stage}: {error}; in "
                        "the run it was not so"
                    ) from None
                self._progress(step.commit.step, num_bytes)
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    async def _step(self, step: coordinator_pb2.ReplayStep, inputs: StepInputs) -> None:
        worker, commit = self._worker, step.commit
        microbatches = range(worker.run.spec.batch.microbatches)
        await worker.begin_step(
            coordinator_pb2.StepOpen(
                step=commit.step,
                scale_exponent=commit.scale_exponent,
                loss_scale=commit.loss_scale,
            )
        )
        await worker.ensure_samples(commit.step, microbatches, ())
        spec = worker.spec
        needed = [inputs.inputs] * (not spec.is_first) + [inputs.gradients] * (not spec.is_last)
        lacking = [m for m in microbatches if any(m not in tensors for tensors in needed)]
        if lacking:
            raise ReplayMismatchError(
                f"the plan of step {commit.step} doesn't say where the tensors of microbatch "
                f"{lacking[0]} are, nor of {len(lacking) - 1} more"
            )
        sent: list[Sent] = []
        for microbatch in microbatches:
            sent += await self._microbatch(commit.step, MicrobatchId(microbatch), inputs)
        totals = worker.runtime.sums
        shares = await worker.shares(totals)
        totals = await worker.add_shares(totals, inputs.shares)
        self._check(commit.step, "sums", (await worker.prepare(totals)).digest, commit.sums_digest)
        digest = await worker.apply(totals, commit)
        if step.has_weights_digest:
            self._check(commit.step, "weights", digest, step.weights_digest)
        if self._log.is_on:
            sent += [Sent("share", b, Share.of(share).payload) for b, share in shares.items()]
            self._log.append(commit.step, worker.spec.stage, sent)
            await self._log.settle()

    async def _microbatch(
        self, step: int, microbatch: MicrobatchId, inputs: StepInputs
    ) -> list[Sent]:
        """Forward and backward at once, since the gradient is there already."""
        worker, spec = self._worker, self._worker.spec
        x = None if spec.is_first else self._decode(inputs.inputs[microbatch])
        if spec.is_last:
            done = await worker.loss(step, microbatch, x, validation=False)
            forward = None
        else:
            forward = await worker.forward(step, microbatch, x, validation=False)
            gradient = self._decode(inputs.gradients[microbatch])
            done = await worker.backward(step, microbatch, gradient)
        sent = []
        if forward is not None and forward.payload is not None:
            sent.append(Sent("forward", microbatch, forward.payload))
        if done.payload is not None:
            sent.append(Sent("backward", microbatch, done.payload))
        return sent

    def _decode(self, logged: Logged) -> torch.Tensor:
        forward = logged.context.leg == "forward"
        codec = self._boundary.forward if forward else self._boundary.backward
        try:
            return codec.decode(logged.payload, self._shape, logged.context, device=self._device)
        except ProtocolError as error:
            name, step = logged.source.name, logged.context.step
            raise BoundaryHoleError(
                f"{name}'s log of step {step}: {error}", logged.source.peer_id
            ) from None

    def _check(self, step: int, what: str, have: int, recorded: int) -> None:
        if have != recorded:
            raise ReplayMismatchError(
                f"step {step} of stage {self._worker.spec.stage}: the replay gives {what} "
                f"{have:#x}, on record are {recorded:#x}; a log holds other bits than were "
                "computed with, or this node computes other bits (docs/assumptions.md)"
            )
