# SPDX-License-Identifier: Apache-2.0
"""One stage against plain PyTorch training: to rounding, and to the bit with our sum."""

import math

import pytest
import torch

from shoal.node.fixed_point import squared_norms, to_gradient
from shoal.node.model.transformer import StageModel, build_stage_model
from shoal.node.optimizer import apply_update
from shoal.node.stage import StageRuntime
from shoal.protocol.ids import RunId
from shoal.protocol.learning_rate import learning_rate
from shoal.protocol.scale import scale_exponent
from shoal.protocol.spec import (
    BatchSpec,
    DataManifest,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
)
from shoal.protocol.tensors import TensorSpec
from shoal.protocol.update_rules import update_rule

STEPS = 20
RUN = ResolvedRun(
    run_id=RunId("run-00000000"),
    spec=RunSpec(
        seed=11,
        steps=STEPS,
        model=ModelSpec(
            dim=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            ffn_dim=172,
            seq_len=32,
            vocab_size=257,
        ),
        batch=BatchSpec(microbatches=4, microbatch_size=2),
        pipeline=PipelineSpec(stages=1, cuts=()),
    ),
    data=DataManifest(vocab_size=257, token_bytes=2, train=(), validation=(), tokenizer_sha256=""),
)
SPEC = RUN.spec.optimizer
TOKENS = RUN.spec.tokens_per_step
EXPONENT = scale_exponent(TOKENS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    tokens = torch.randint(0, 64, (2, 33), generator=generator).square() % 257
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def decays(name: str, parameter: torch.Tensor) -> bool:
    return update_rule(RUN.spec, TensorSpec(name, tuple(parameter.shape))).decays


def new_stage() -> StageRuntime:
    stage = StageRuntime(RUN, 0, device=torch.device("cpu"), compute_dtype="fp32")
    stage.initialise()
    return stage


def new_plain_model() -> StageModel:
    plain = build_stage_model(RUN.spec.model, RUN.stage(0))
    plain.load_state_dict(new_stage().weights)
    return plain


def loss_of(plain: StageModel, step: int, microbatch: int) -> torch.Tensor:
    tokens, targets = batch(step, microbatch)
    return torch.nn.functional.cross_entropy(
        plain(tokens).flatten(0, 1), targets.flatten(), reduction="sum"
    )


@pytest.fixture(scope="module")
def trained() -> StageRuntime:
    torch.set_num_threads(1)
    stage = new_stage()
    for step in range(1, STEPS + 1):
        stage.begin_step(step, EXPONENT, 1.0)
        for microbatch in range(4):
            stage.forward_backward_loss(microbatch, *batch(step, microbatch))
        norm = math.sqrt(math.fsum(stage.squared_norms(stage.sums, TOKENS)))
        stage.apply(
            stage.sums,
            step=step,
            num_tokens=TOKENS,
            learning_rate=learning_rate(SPEC, STEPS, step),
            clip_scale=min(1.0, SPEC.clip_norm / norm),
            scale_exponent=EXPONENT,
        )
    return stage


def test_twenty_steps_follow_plain_pytorch(trained: StageRuntime) -> None:
    plain = new_plain_model()
    named = list(plain.named_parameters())
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": SPEC.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(SPEC.beta1, SPEC.beta2), eps=SPEC.eps)
    for step in range(1, STEPS + 1):
        adamw.zero_grad()
        for microbatch in range(4):
            (loss_of(plain, step, microbatch) / TOKENS).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), SPEC.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(SPEC, STEPS, step)
        adamw.step()
    ours = torch.cat([w.flatten() for w in trained.weights.values()]).double()
    theirs = torch.cat([p.detach().flatten() for p in plain.parameters()]).double()
    start = torch.cat([w.flatten() for w in new_stage().weights.values()]).double()
    assert (ours - start).norm() / ours.norm() > 0.1, "it should have learnt something"
    assert (ours - theirs).norm() / theirs.norm() <= 1e-5


def test_twenty_steps_equal_a_plain_loop_with_the_same_sum_bit_for_bit(
    trained: StageRuntime,
) -> None:
    plain = new_plain_model()
    named = list(plain.named_parameters())
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in named}
    for step in range(1, STEPS + 1):
        sums = {n: torch.zeros(p.numel(), dtype=torch.int64) for n, p in named}
        for microbatch in (3, 1, 0, 2):
            plain.zero_grad()
            loss_of(plain, step, microbatch).backward()
            for name, parameter in named:
                assert parameter.grad is not None
                scaled = parameter.grad.double() * 2.0**EXPONENT
                sums[name] += scaled.round().to(torch.int64).flatten()
        squared = [squared_norms(s, (len(s),), EXPONENT, TOKENS)[0] for s in sums.values()]
        clip_scale = min(1.0, SPEC.clip_norm / math.sqrt(math.fsum(squared)))
        for name, parameter in named:
            gradient = to_gradient(sums[name], EXPONENT, TOKENS, parameter.shape) * clip_scale
            apply_update(
                parameter.detach(),
                *moments[name],
                gradient,
                step=step,
                lr=learning_rate(SPEC, STEPS, step),
                spec=SPEC,
                decay=decays(name, parameter),
            )
    different = [n for n, p in named if not torch.equal(p.detach(), trained.weights[n])]
    assert different == []
