# SPDX-License-Identifier: Apache-2.0
"""A stage's computation on a thread of its own: tensors and samples in, encoded tensors out.

The event loop must answer heartbeats while a kernel runs, and kernels of one stage never overlap,
so all of them run on one thread, in the order asked for.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from shoal.compression.codec import CodecContext, Leg
from shoal.compression.registry import Boundary
from shoal.node.data import TokenSource
from shoal.node.hardware import Device
from shoal.node.stage import StageRuntime
from shoal.protocol.costs import boundary_shape, graphs_that_fit, reads_token_ids
from shoal.protocol.ids import MicrobatchId, Step
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.schedule import in_flight_window
from shoal.protocol.spec import ResolvedRun
from shoal.protocol.state_file import (
    PARTS,
    StateExpectation,
    StateHeader,
    read_state,
    write_state,
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Computed:
    """What a task gave: an encoded boundary tensor for a neighbour, a loss, the time it took."""

    payload: memoryview | None
    loss_sum: float | None
    busy_s: float


@dataclass(frozen=True, slots=True)
class PreparedSums:
    digest: int
    squared_norms: list[float]


class StageWorker:
    """Owns a `StageRuntime`. All methods may be called from the event loop."""

    def __init__(
        self,
        run: ResolvedRun,
        stage: int,
        *,
        boundary: Boundary,
        device: Device,
        tokens: TokenSource,
    ) -> None:
        self.run = run
        self.spec = run.stage(stage)
        self._boundary = boundary
        self._device = device
        self._tokens = tokens
        self._reads_token_ids = reads_token_ids(run.spec)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"stage-{stage}")
        self._runtime: StageRuntime | None = None

    @property
    def runtime(self) -> StageRuntime:
        assert self._runtime is not None, "the state is loaded first"
        return self._runtime

    async def call(self, function: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ---- state ---------------------------------------------------------------------------

    async def create(self) -> None:
        """Allocate the stage; its state is nothing until one of the loads below."""

        def build() -> None:
            torch.set_num_threads(self._device.num_threads)
            self._runtime = StageRuntime(
                self.run,
                self.spec.stage,
                device=self._device.torch_device,
                compute_dtype=self._device.compute_dtype,
            )
            self._runtime.max_graphs = self._graphs_kept()

        await self.call(build)

    def _graphs_kept(self) -> int:
        """Graphs to keep between forward and backward: what the spec says, or memory allows."""
        spec = self.run.spec
        shape = boundary_shape(spec)
        window = in_flight_window(self.spec.stage, self.spec.num_stages)
        return {
            "always": 0,
            "never": window,
            "auto": graphs_that_fit(
                spec,
                self.spec,
                self._device.memory_bytes,
                window=window,
                forward_bytes=self._boundary.forward.max_encoded_bytes(shape),
                backward_bytes=self._boundary.backward.max_encoded_bytes(shape),
            ),
        }[spec.pipeline.recompute]

    async def initialise(self) -> None:
        await self.call(lambda: self.runtime.initialise())

    async def load(self, path: Path, step: int) -> int:
        """A whole state; returns the digest of its weights. Raises what `read_state` does."""

        def load() -> int:
            expect = StateExpectation.of(self.run, self.spec.stage, step)
            _, arrays = read_state(path, expect)
            self.runtime.load_state({k: torch.from_numpy(a) for k, a in arrays.items()}, step)
            return self.runtime.weights_digest()

        return await self.call(load)

    async def load_weights(self, path: Path, step: int) -> int:
        """Only the weights; returns their digest. Raises what `read_state` does."""

        def load() -> int:
            part = types_pb2.STATE_PART_WEIGHTS
            expect = StateExpectation.of(self.run, self.spec.stage, step, part=part)
            _, arrays = read_state(path, expect)
            self.runtime.load_weights({k: torch.from_numpy(a) for k, a in arrays.items()}, step)
            return self.runtime.weights_digest()

        return await self.call(load)

    async def load_moments(self, path: Path, step: int) -> None:
        """Only the moments, of `step`. Raises what `read_state` does."""

        def load() -> None:
            part = types_pb2.STATE_PART_MOMENTS
            expect = StateExpectation.of(self.run, self.spec.stage, step, part=part)
            _, arrays = read_state(path, expect)
            self.runtime.load_moments({k: torch.from_numpy(a) for k, a in arrays.items()})

        await self.call(load)

    async def projections(self) -> dict[str, torch.Tensor]:
        """What `advance_moments` needs of the weights as they are now."""
        return await self.call(lambda: self.runtime.projections())

    async def advance_moments(
        self,
        totals: torch.Tensor,
        commit: coordinator_pb2.Commit,
        projections: Mapping[str, torch.Tensor],
    ) -> None:
        """Bring the moments over a committed step; `projections` are of before it."""
        await self.call(
            lambda: self.runtime.advance_moments(
                totals,
                num_tokens=commit.num_tokens,
                clip_scale=commit.clip_scale,
                scale_exponent=commit.scale_exponent,
                projections=projections,
            )
        )

    async def save(
        self,
        path: Path,
        *,
        part: types_pb2.StatePart.ValueType = types_pb2.STATE_PART_ALL,
        durable: bool = True,
    ) -> tuple[int, int]:
        """Write a part of the state as it is now, at the place of this call among the others;
        returns its step and the weights' digest. Training may go on meanwhile."""

        def copy() -> tuple[int, int, dict[str, torch.Tensor]]:
            runtime = self.runtime
            return runtime.step, runtime.weights_digest(), runtime.state_tensors(PARTS[part])

        step, digest, tensors = await self.call(copy)
        header = StateHeader(
            run_id=self.run.run_id,
            run_digest=self.run.digest,
            stage=self.spec.stage,
            step=Step(step),
            weights_digest=digest,
        )
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        await asyncio.to_thread(write_state, path, arrays, header, durable=durable)
        return step, digest

    async def weights_digest(self) -> int:
        return await self.call(lambda: self.runtime.weights_digest())

    # ---- a step --------------------------------------------------------------------------

    async def begin_step(self, opened: coordinator_pb2.StepOpen) -> None:
        await self.call(
            lambda: self.runtime.begin_step(opened.step, opened.scale_exponent, opened.loss_scale)
        )

    async def ensure_samples(
        self, step: int, training: Sequence[int], validation: Sequence[int]
    ) -> None:
        """Fetch the token shards that these microbatches need, where this stage needs tokens."""
        if self.spec.is_first or self.spec.is_last or self._reads_token_ids:
            if training:
                await self._tokens.ensure_training(step, training)
            if validation:
                await self._tokens.ensure_validation(validation)

    async def forward(
        self, step: int, microbatch: MicrobatchId, x: torch.Tensor | None, *, validation: bool
    ) -> Computed:
        """Forward of a stage that isn't the last; `x` is None at stage 0."""

        def work() -> Computed:
            started = time.perf_counter()
            tokens = None
            if x is None or self._reads_token_ids:
                tokens = self._samples(step, microbatch, validation)[0]
            source = x if x is not None else tokens
            assert source is not None, "stage 0 reads its input from its samples"
            runtime = self.runtime
            if validation:
                hidden = runtime.evaluate(source, tokens)
            else:
                hidden = runtime.forward(microbatch, source, tokens)
            payload = self._encode(hidden, step, microbatch, "forward")
            return Computed(payload, None, time.perf_counter() - started)

        return await self.call(work)

    async def backward(
        self, step: int, microbatch: MicrobatchId, gradient: torch.Tensor
    ) -> Computed:
        """Backward of a stage that isn't the last."""

        def work() -> Computed:
            started = time.perf_counter()
            input_gradient = self.runtime.backward(microbatch, gradient)
            payload = None
            if input_gradient is not None:
                payload = self._encode(input_gradient, step, microbatch, "backward")
            return Computed(payload, None, time.perf_counter() - started)

        return await self.call(work)

    async def loss(
        self, step: int, microbatch: MicrobatchId, x: torch.Tensor | None, *, validation: bool
    ) -> Computed:
        """The last stage's forward, loss and backward; `x` is None when one stage is all."""

        def work() -> Computed:
            started = time.perf_counter()
            tokens, targets = self._samples(step, microbatch, validation)
            source = x if x is not None else tokens
            runtime = self.runtime
            if validation:
                loss = runtime.evaluate_loss(source, targets, tokens)
                return Computed(None, loss, time.perf_counter() - started)
            loss, gradient = runtime.forward_backward_loss(microbatch, source, targets, tokens)
            payload = None
            if gradient is not None:
                payload = self._encode(gradient, step, microbatch, "backward")
            return Computed(payload, loss, time.perf_counter() - started)

        return await self.call(work)

    async def give_back(self, microbatch: MicrobatchId) -> bool:
        """Forget a microbatch that gave bad numbers. False when its gradient is in the sums."""

        def forget() -> bool:
            self.runtime.drop(microbatch)
            return microbatch not in self.runtime.accumulated

        return await self.call(forget)

    def _samples(
        self, step: int, microbatch: MicrobatchId, validation: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if validation:
            return self._tokens.validation(microbatch - self.run.spec.batch.microbatches)
        return self._tokens.training(step, microbatch)

    def _encode(
        self, tensor: torch.Tensor, step: int, microbatch: MicrobatchId, leg: Leg
    ) -> memoryview:
        stage = self.spec.stage
        context = CodecContext(
            run_seed=self.run.spec.seed,
            step=step,
            microbatch=microbatch,
            boundary=stage if leg == "forward" else stage - 1,
            leg=leg,
        )
        codec = self._boundary.forward if leg == "forward" else self._boundary.backward
        return codec.encode(tensor, context)

    # ---- the step's end ------------------------------------------------------------------

    async def shares(self, totals: torch.Tensor) -> dict[int, torch.Tensor]:
        """By boundary, this stage's share of what both of its sides hold: for the other side."""

        def work() -> dict[int, torch.Tensor]:
            return {b: self.runtime.share(totals, b) for b in self.runtime.mirrored}

        return await self.call(work)

    async def add_shares(
        self, totals: torch.Tensor, shares: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """Totals with the other sides' shares: what is prepared and applied. Raises as
        `StageRuntime.add_shares`."""
        return await self.call(lambda: self.runtime.add_shares(totals, shares))

    async def prepare(self, totals: torch.Tensor) -> PreparedSums:
        def work() -> PreparedSums:
            num_tokens = self.run.spec.tokens_per_step
            return PreparedSums(
                self.runtime.sums_digest(totals), self.runtime.squared_norms(totals, num_tokens)
            )

        return await self.call(work)

    async def apply(self, totals: torch.Tensor, commit: coordinator_pb2.Commit) -> int:
        """Apply a committed step; returns the digest of the new weights."""

        def work() -> int:
            self.runtime.apply(
                totals,
                step=commit.step,
                num_tokens=commit.num_tokens,
                learning_rate=commit.learning_rate,
                clip_scale=commit.clip_scale,
                scale_exponent=commit.scale_exponent,
            )
            return self.runtime.weights_digest()

        return await self.call(work)
