# SPDX-License-Identifier: Apache-2.0
"""The undisturbed run: every stage of a run in this one process, one microbatch after another.

No network, no ledger, no replicas; just the model's arithmetic as the run spec fixes it. A swarm
must end with these bits whatever happened to its nodes. What two stages mirror gets both shares of
its gradient here without a wire.
"""

import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec import CodecContext, Leg
from shoal.compression.registry import parse_boundary
from shoal.coordinator.step_scale import COARSEN_BITS
from shoal.node.data import ShardCache, TokenSource
from shoal.node.stage import StageRuntime
from shoal.protocol.errors import NumericOverflowError
from shoal.protocol.learned import learned_codec
from shoal.protocol.learning_rate import learning_rate
from shoal.protocol.scale import scale_exponent
from shoal.protocol.spec import ResolvedRun
from shoal.protocol.tensors import Fp32, TensorSpec, owned_tensors, weights_sha256

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class StepTruth:
    """What a committed step must have given."""

    step: int
    loss: float
    validation_loss: float | None
    grad_norm: float
    learning_rate: float
    clip_scale: float
    sums_digests: tuple[int, ...]
    """By stage, as all tuples."""
    weights_digests: tuple[int, ...]
    """After the step."""


class Reference:
    """Computes steps as they are asked for, and keeps what it found."""

    def __init__(self, run: ResolvedRun, run_folder: Path) -> None:
        """`run_folder` holds the run's token shards."""
        torch.set_num_threads(1)  # as a node's default: more threads may add in another order
        self.run = run
        self._tokens = TokenSource(run, ShardCache(run_folder / "shards", _nobody))
        self._boundary = parse_boundary(run.spec.pipeline.boundary)
        self._stages = [
            StageRuntime(run, stage, device=torch.device("cpu"), compute_dtype="fp32")
            for stage in range(run.spec.pipeline.stages)
        ]
        for stage in self._stages:
            stage.initialise()
        self.initial_digests = tuple(stage.weights_digest() for stage in self._stages)
        """Of the weights at step 0, by stage."""
        self._coarsen = 0
        self._truths: list[StepTruth] = []
        self._sha256s: list[str] = []

    def truth(self, step: int) -> StepTruth:
        """Of step `step`, from 1."""
        assert step >= 1
        while len(self._truths) < step:
            self._truths.append(self._next_step())
            self._sha256s.append(weights_sha256(self._weights()))
        return self._truths[step - 1]

    def weights_sha256(self, step: int) -> str:
        """Of the whole model after `step`."""
        self.truth(step)
        return self._sha256s[step - 1]

    # ---- a step --------------------------------------------------------------------------

    def _next_step(self) -> StepTruth:
        while True:
            try:
                return self._step_at(scale_exponent(self.run.spec.tokens_per_step, self._coarsen))
            except NumericOverflowError:  # the same step again, coarser, and so it stays
                self._coarsen += COARSEN_BITS

    def _step_at(self, exponent: int) -> StepTruth:
        spec, step = self.run.spec, len(self._truths) + 1
        for stage in self._stages:
            stage.begin_step(step, exponent, 1.0)
        validation = self._validation_loss(step)
        loss = sum(self._microbatch(step, m) for m in range(spec.batch.microbatches))

        totals = self._with_shares([stage.sums.clone() for stage in self._stages])
        norms = [
            stage.squared_norms(sums, spec.tokens_per_step)
            for stage, sums in zip(self._stages, totals, strict=True)
        ]
        grad_norm = math.sqrt(math.fsum(n for of_stage in norms for n in of_stage))
        clip = spec.optimizer.clip_norm
        clip_scale = min(1.0, clip / (grad_norm + _CLIP_EPS)) if clip else 1.0
        rate = learning_rate(spec.optimizer, spec.steps, step)
        for stage, sums in zip(self._stages, totals, strict=True):
            stage.apply(
                sums,
                step=step,
                num_tokens=spec.tokens_per_step,
                learning_rate=rate,
                clip_scale=clip_scale,
                scale_exponent=exponent,
            )
        return StepTruth(
            step=step,
            loss=loss / spec.tokens_per_step,
            validation_loss=validation,
            grad_norm=grad_norm,
            learning_rate=rate,
            clip_scale=clip_scale,
            sums_digests=tuple(
                stage.sums_digest(sums) for stage, sums in zip(self._stages, totals, strict=True)
            ),
            weights_digests=tuple(stage.weights_digest() for stage in self._stages),
        )

    def _with_shares(self, totals: list[Tensor]) -> list[Tensor]:
        """Every stage's totals, with its neighbours' shares of what it mirrors."""
        whole = []
        for number, (stage, sums) in enumerate(zip(self._stages, totals, strict=True)):
            others = {b: number + 1 if b == number else number - 1 for b in stage.mirrored}
            shares = {b: self._stages[s].share(totals[s], b) for b, s in others.items()}
            whole.append(stage.add_shares(sums, shares))
        return whole

    def _microbatch(self, step: int, microbatch: int) -> float:
        """All stages forward, then backward; returns the summed loss."""
        tokens, targets = self._tokens.training(step, microbatch)
        x = tokens
        for boundary, stage in enumerate(self._stages[:-1]):
            hidden = stage.forward(microbatch, x, tokens)
            x = self._cross(hidden, step, microbatch, boundary, "forward")
        loss, gradient = self._stages[-1].forward_backward_loss(microbatch, x, targets, tokens)
        for boundary in range(len(self._stages) - 2, -1, -1):
            assert gradient is not None, "only the first stage has no input gradient"
            received = self._cross(gradient, step, microbatch, boundary, "backward")
            gradient = self._stages[boundary].backward(microbatch, received)
        return loss

    def _validation_loss(self, step: int) -> float | None:
        spec = self.run.spec
        every, count = spec.validation.every, spec.validation.microbatches
        if not every or (step - 1) % every or not self.run.data.validation:
            return None
        total = 0.0
        for index in range(count):
            tokens, targets = self._tokens.validation(index)
            x, microbatch = tokens, spec.batch.microbatches + index
            for boundary, stage in enumerate(self._stages[:-1]):
                hidden = stage.evaluate(x, tokens)
                x = self._cross(hidden, step, microbatch, boundary, "forward")
            total += self._stages[-1].evaluate_loss(x, targets, tokens)
        return total / (spec.tokens_per_microbatch * count)

    def _cross(self, tensor: Tensor, step: int, microbatch: int, boundary: int, leg: Leg) -> Tensor:
        """What arrives on the other side of a boundary."""
        codec = self._boundary.forward if leg == "forward" else self._boundary.backward
        context = CodecContext(
            run_seed=self.run.spec.seed,
            step=step,
            microbatch=microbatch,
            boundary=boundary,
            leg=leg,
        )
        return codec.decode(codec.encode(tensor, context), tuple(tensor.shape), context)

    def _weights(self) -> Iterator[tuple[TensorSpec, Fp32]]:
        learned = learned_codec(self.run.spec.pipeline.boundary)
        for stage in self._stages:
            for tensor in owned_tensors(self.run.spec.model, stage.spec, learned):
                yield tensor, np.asarray(stage.weights[tensor.name].numpy(), dtype=np.float32)


def undisturbed(run: ResolvedRun, run_folder: Path) -> list[StepTruth]:
    """Every step of the run."""
    reference = Reference(run, run_folder)
    return [reference.truth(step) for step in range(1, run.spec.steps + 1)]


def _nobody(sha256: str) -> AsyncIterator[bytes]:
    raise AssertionError(f"shard {sha256} isn't in the run folder")
