# SPDX-License-Identifier: Apache-2.0
"""AdamW against PyTorch's, and the learning rate."""

import math

import numpy as np
import pytest
import torch

from shoal.node.optimizer import apply_update
from shoal.protocol.learning_rate import learning_rate
from shoal.protocol.spec import OptimizerSpec

SPEC = OptimizerSpec(lr=3e-3, weight_decay=0.1, beta1=0.9, beta2=0.95)


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("decay", [True, False])
def test_update_follows_pytorchs_adamw(decay: bool) -> None:
    weights = draw((31, 17), 0)
    exp_avg, exp_avg_sq = torch.zeros_like(weights), torch.zeros_like(weights)
    theirs = torch.nn.Parameter(weights.clone())
    adamw = torch.optim.AdamW(
        [theirs], betas=(SPEC.beta1, SPEC.beta2), eps=SPEC.eps, weight_decay=0.1 if decay else 0.0
    )
    for step in range(1, 21):
        gradient, lr = draw((31, 17), step), SPEC.lr / step
        apply_update(
            weights, exp_avg, exp_avg_sq, gradient, step=step, lr=lr, spec=SPEC, decay=decay
        )
        adamw.param_groups[0]["lr"] = lr
        theirs.grad = gradient
        adamw.step()
    torch.testing.assert_close(weights, theirs.detach(), atol=1e-6, rtol=1e-5)
    assert not torch.equal(weights, draw((31, 17), 0))


def test_an_elements_update_does_not_depend_on_its_neighbours() -> None:
    n = 300_007
    whole = [draw((n,), 0), draw((n,), 1), draw((n,), 2).square(), draw((n,), 3)]
    part = [t[12_345:290_002].clone() for t in whole]
    for tensors in (whole, part):
        apply_update(*tensors, step=7, lr=1e-3, spec=SPEC, decay=True)
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[12_345:290_002], b)


def test_every_operation_is_rounded_on_its_own() -> None:
    """No fused multiply-add, no approximate root: as NumPy's separate fp32 operations."""
    tensors = [
        draw((10_007,), 0),
        draw((10_007,), 1),
        draw((10_007,), 2).square(),
        draw((10_007,), 3),
    ]
    w, m, v, g = (t.numpy().copy() for t in tensors)
    apply_update(*tensors, step=1, lr=1e-3, spec=SPEC, decay=True)
    f = np.float32
    w = w * f(1 - 1e-3 * SPEC.weight_decay)
    m = m * f(SPEC.beta1) + g * f(1 - SPEC.beta1)
    v = v * f(SPEC.beta2) + g * g * f(1 - SPEC.beta2)
    scale = np.sqrt(v) * f(1 / math.sqrt(1 - SPEC.beta2)) + f(SPEC.eps)
    w = w - m / scale * f(1e-3 / (1 - SPEC.beta1))
    for ours, expected in zip(tensors, (w, m, v), strict=False):
        assert np.array_equal(ours.numpy(), expected)


def test_gradient_is_left_alone() -> None:
    gradient = draw((9,), 3)
    apply_update(
        torch.ones(9),
        torch.zeros(9),
        torch.zeros(9),
        gradient,
        step=1,
        lr=1.0,
        spec=SPEC,
        decay=True,
    )
    assert torch.equal(gradient, draw((9,), 3))


def test_learning_rate_warms_up_then_falls_to_its_minimum() -> None:
    spec = OptimizerSpec(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(spec, 20, step) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[11] == pytest.approx(0.55)  # half-way
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(spec, 20, 99) == pytest.approx(0.1)


def test_a_tenth_of_the_steps_warms_up_by_default() -> None:
    spec = OptimizerSpec(lr=1.0)
    assert learning_rate(spec, 100, 5) == 0.5
    assert learning_rate(spec, 100, 10) == 1.0
    assert learning_rate(spec, 1, 1) == 1.0
