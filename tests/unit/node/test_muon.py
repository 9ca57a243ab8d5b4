# SPDX-License-Identifier: Apache-2.0
"""Muon against Jordan's own few lines, and what its orthogonalisation promises."""

import pytest
import torch
from torch import Tensor

from shoal.node.muon import advance_momentum, apply_muon, orthogonalised
from shoal.protocol.spec import OptimizerSpec

SPEC = OptimizerSpec(name="muon", muon_lr=0.02, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def zeropower(g: Tensor) -> Tensor:
    """`zeropower_via_newtonschulz5`, in fp64."""
    x = g.double()
    if g.size(0) > g.size(1):
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    return x.T if g.size(0) > g.size(1) else x


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (1, 9)])
@pytest.mark.parametrize("decay", [True, False])
def test_update_follows_the_reference_implementation(shape: tuple[int, int], decay: bool) -> None:
    weights, momentum = draw(shape, 0), torch.zeros(shape)
    theirs, buffer = weights.double(), torch.zeros(shape, dtype=torch.float64)
    for step in range(1, 11):
        gradient, lr = draw(shape, step), 0.02 / step
        apply_muon(weights, momentum, gradient, lr=lr, spec=SPEC, decay=decay)
        buffer.lerp_(gradient.double(), 1 - 0.95)
        update = zeropower(gradient.double().lerp(buffer, 0.95))
        theirs.mul_(1 - lr * (0.1 if decay else 0.0))
        theirs.add_(update, alpha=-lr * max(1, shape[0] / shape[1]) ** 0.5)
    torch.testing.assert_close(weights.double(), theirs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(momentum.double(), buffer, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(weights, draw(shape, 0), atol=1e-3)


def test_singular_vectors_are_kept_and_singular_values_come_near_one() -> None:
    matrix = draw((20, 50), 3)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ orthogonalised(matrix) @ v.T
    assert s.max() / s.min() > 3
    assert inner.diagonal().min() > 0.5
    assert inner.diagonal().max() < 1.5
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-4


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(orthogonalised(draw((200, 700), 4)))
    torch.set_num_threads(1)
    assert torch.equal(*results)


def test_no_gradient_moves_nothing() -> None:
    weights = draw((4, 6), 0)
    apply_muon(weights, torch.zeros(4, 6), torch.zeros(4, 6), lr=0.1, spec=SPEC, decay=False)
    assert torch.equal(weights, draw((4, 6), 0))


def test_the_gradients_length_does_not_matter() -> None:
    moved = []
    for scale in (1.0, 1024.0):
        weights = torch.zeros(8, 6)
        gradient = draw((8, 6), 1) * scale
        apply_muon(weights, torch.zeros(8, 6), gradient, lr=0.1, spec=SPEC, decay=False)
        moved.append(weights)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-6)


def test_momentum_alone_advances_to_the_same_bits_and_the_gradient_is_left_alone() -> None:
    gradient, applied, advanced = draw((5, 7), 1), draw((5, 7), 2), draw((5, 7), 2)
    apply_muon(draw((5, 7), 3), applied, gradient, lr=0.1, spec=SPEC, decay=True)
    advance_momentum(advanced, gradient, spec=SPEC)
    assert torch.equal(applied, advanced)
    assert torch.equal(gradient, draw((5, 7), 1))
