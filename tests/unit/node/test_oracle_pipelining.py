# SPDX-License-Identifier: Apache-2.0
"""Our split gradients against `torch.distributed.pipelining` on the same microbatches.

Both stages live in one process of a world of one; nothing is sent.
"""

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from shoal.node.fixed_point import to_gradient
from shoal.node.model.transformer import build_stage_model
from shoal.node.stage import StageRuntime
from shoal.protocol.ids import RunId
from shoal.protocol.scale import scale_exponent
from shoal.protocol.spec import (
    BatchSpec,
    DataManifest,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
)

CPU = torch.device("cpu")
MICROBATCHES, SEQUENCES = 4, 2
RUN = ResolvedRun(
    run_id=RunId("run-00000000"),
    spec=RunSpec(
        seed=3,
        model=ModelSpec(
            dim=64,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            ffn_dim=172,
            seq_len=32,
            vocab_size=257,
        ),
        batch=BatchSpec(microbatches=MICROBATCHES, microbatch_size=SEQUENCES),
        pipeline=PipelineSpec(stages=2, cuts=(2,)),
    ),
    data=DataManifest(vocab_size=257, token_bytes=2, train=(), validation=(), tokenizer_sha256=""),
)


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def summed_cross_entropy(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum"
    )


@pytest.mark.usefixtures("world_of_one")
def test_split_gradients_equal_pytorchs_pipeline() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 257, (MICROBATCHES * SEQUENCES, 33), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    ours = [StageRuntime(RUN, s, device=CPU, compute_dtype="fp32") for s in range(2)]
    modules = [build_stage_model(RUN.spec.model, RUN.stage(s)) for s in range(2)]
    exponent = scale_exponent(RUN.spec.tokens_per_step)
    for stage, module in zip(ours, modules, strict=True):
        stage.initialise()
        stage.begin_step(1, exponent, 1.0)
        module.load_state_dict(stage.weights)

    losses: list[torch.Tensor] = []
    schedule = ScheduleInterleaved1F1B(
        [PipelineStage(module, i, 2, CPU) for i, module in enumerate(modules)],
        MICROBATCHES,
        loss_fn=summed_cross_entropy,
        scale_grads=False,
    )
    schedule.step(inputs, target=targets, losses=losses)

    for microbatch in range(MICROBATCHES):
        rows = slice(microbatch * SEQUENCES, (microbatch + 1) * SEQUENCES)
        hidden = ours[0].forward(microbatch, inputs[rows].clone())
        loss, gradient = ours[1].forward_backward_loss(
            microbatch, hidden.clone(), targets[rows].clone()
        )
        assert gradient is not None
        ours[0].backward(microbatch, gradient.clone())
        assert loss == pytest.approx(losses[microbatch].item(), rel=1e-6)

    for stage, module in zip(ours, modules, strict=True):
        parts = torch.split(stage.sums, list(stage.numels))
        for part, (name, parameter) in zip(parts, module.named_parameters(), strict=True):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 1e-3, name
            # Theirs adds microbatches in fp32: one rounding each, relative to the largest.
            torch.testing.assert_close(
                to_gradient(part, exponent, 1, parameter.shape),
                parameter.grad,
                rtol=1e-5,
                atol=1e-6 * parameter.grad.abs().max().item(),
                msg=lambda text, name=name: f"{name}: {text}",
            )
