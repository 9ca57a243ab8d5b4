# SPDX-License-Identifier: Apache-2.0
"""Small runs with a learned codec, trained in one process with the very tensors as boundaries."""

import math

import torch

from shoal.node.stage import StageRuntime
from shoal.protocol.costs import reads_token_ids
from shoal.protocol.ids import RunId
from shoal.protocol.scale import scale_exponent
from shoal.protocol.spec import (
    BatchSpec,
    DataManifest,
    ModelSpec,
    OptimizerSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
)

MODEL = ModelSpec(
    dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48, seq_len=16, vocab_size=67
)
MICROBATCHES = 2
CODECS = (
    "linear:b=8",
    "resbm:b=8",
    "resbm:b=8:identity=off",
    "resbm:b=8:form=iota",
    "resbm:b=8:form=iota:identity=off",
    "ssn:k=8",
    "ssn:k=8:variant=projected",
    "mapl:r=8",
    "mapl:r=8:ra=4:grad=encoder_only",
    "mapl:r=8:anchors=full:proj=fixed",
    "mapl:r=8:anchors=static:proj=unaware",
    "mapl:r=8:anchors=none",
)


def make_run(boundary: str, cuts: tuple[int, ...] = (1, 3), optimizer: str = "muon") -> ResolvedRun:
    spec = RunSpec(
        seed=3,
        model=MODEL,
        optimizer=OptimizerSpec.model_validate({"name": optimizer, "lr": 3e-3, "muon_lr": 0.02}),
        batch=BatchSpec(microbatches=MICROBATCHES, microbatch_size=2),
        pipeline=PipelineSpec(stages=len(cuts) + 1, cuts=cuts, boundary=boundary),
    )
    manifest = DataManifest(
        vocab_size=67, token_bytes=2, train=(), validation=(), tokenizer_sha256=""
    )
    return ResolvedRun(run_id=RunId("run-00000000"), spec=spec, data=manifest)


def new_stage(run: ResolvedRun, stage: int, *, recompute: bool = False) -> StageRuntime:
    runtime = StageRuntime(
        run, stage, device=torch.device("cpu"), compute_dtype="fp32", recompute=recompute
    )
    runtime.initialise()
    return runtime


def new_stages(run: ResolvedRun) -> list[StageRuntime]:
    return [new_stage(run, stage) for stage in range(run.spec.pipeline.stages)]


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that say something about their successors."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    tokens = torch.randint(0, 8, (2, MODEL.seq_len + 1), generator=generator).square()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def exponent(run: ResolvedRun) -> int:
    return scale_exponent(run.spec.tokens_per_step)


def run_microbatch(stages: list[StageRuntime], step: int, microbatch: int) -> float:
    tokens, targets = batch(step, microbatch)
    x, ids = tokens, tokens if reads_token_ids(stages[0].run.spec) else None
    for stage in stages[:-1]:
        x = stage.forward(microbatch, x, ids).clone()
    loss, gradient = stages[-1].forward_backward_loss(microbatch, x, targets, ids)
    for stage in reversed(stages[:-1]):
        assert gradient is not None
        gradient = stage.backward(microbatch, gradient.clone())
    return loss


def exchanged(stages: list[StageRuntime], totals: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every stage's totals with the shares of its neighbours."""
    result = []
    for stage, total in zip(stages, totals, strict=True):
        number = int(stage.spec.stage)
        shares = {}
        for boundary in stage.mirrored:
            other = number + 1 if boundary == number else number - 1
            shares[boundary] = stages[other].share(totals[other], boundary)
        result.append(stage.add_shares(total, shares))
    return result


def train_step(stages: list[StageRuntime], step: int, learning_rate: float = 3e-3) -> float:
    """The step's mean loss."""
    run = stages[0].run
    for stage in stages:
        stage.begin_step(step, exponent(run), 1.0)
    loss = sum(run_microbatch(stages, step, m) for m in range(MICROBATCHES))
    totals = exchanged(stages, [stage.sums for stage in stages])
    norms = [
        norm
        for stage, total in zip(stages, totals, strict=True)
        for norm in stage.squared_norms(total, run.spec.tokens_per_step)
    ]
    clip_scale = min(1.0, 1.0 / math.sqrt(math.fsum(norms)))
    for stage, total in zip(stages, totals, strict=True):
        stage.apply(
            total,
            step=step,
            num_tokens=run.spec.tokens_per_step,
            learning_rate=learning_rate,
            clip_scale=clip_scale,
            scale_exponent=exponent(run),
        )
    return loss / run.spec.tokens_per_step
