# SPDX-License-Identifier: Apache-2.0
"""Polar factors and SPEL, against the singular value decomposition."""

import pytest
import torch
from torch import Tensor

from shoal.compression.learned.frozen import orthonormal
from shoal.compression.learned.spel import (
    MOMENTUM,
    advance_spel_momentum,
    apply_spel,
    orthogonality_error,
    polar_direction,
)
from shoal.protocol.learned import MAX_PROJECTION_LR


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def polar(matrix: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


@pytest.mark.parametrize("shape", [(8, 40), (16, 16), (1, 9)])
def test_direction_is_the_polar_factor(shape: tuple[int, int]) -> None:
    scales = torch.logspace(0, -2, shape[0], dtype=torch.float64)
    matrix = draw(shape, 0) * scales[:, None]
    torch.testing.assert_close(polar_direction(matrix), polar(matrix), atol=1e-5, rtol=0)


def test_a_direction_of_nothing_is_nothing() -> None:
    assert polar_direction(torch.zeros(3, 6, dtype=torch.float64)).abs().max() == 0


@pytest.mark.parametrize("lr", [0.002, MAX_PROJECTION_LR])
def test_update_follows_the_equations(lr: float) -> None:
    projection = orthonormal(0, "p", 32, 6)
    momentum = torch.zeros_like(projection)
    theirs, m = projection.double(), torch.zeros(32, 6, dtype=torch.float64)
    for step in range(1, 11):
        gradient = draw((32, 6), step).float()
        apply_spel(projection, momentum, gradient, lr=lr)
        g = gradient.double()
        tangent = g - theirs @ (theirs.T @ g + g.T @ theirs) / 2
        m = MOMENTUM * m + (1 - MOMENTUM) * tangent
        theirs = polar(theirs - lr * polar(m))
        assert orthogonality_error(projection) < 4e-7
    torch.testing.assert_close(projection.double(), theirs, atol=1e-4, rtol=0)
    torch.testing.assert_close(momentum.double(), m, atol=1e-6, rtol=1e-5)
    assert (projection - orthonormal(0, "p", 32, 6)).norm() > lr


def test_descent_along_a_quadratic_finds_the_leading_directions() -> None:
    """max tr AᵀSA is reached at the leading eigenvectors."""
    spectrum = torch.tensor([9.0, 7.0, 5.0] + [1.0] * 9)
    projection = orthonormal(1, "p", 12, 3)
    momentum = torch.zeros_like(projection)
    for step in range(400):
        gradient = -2 * spectrum[:, None] * projection
        apply_spel(projection, momentum, gradient, lr=0.05 if step < 300 else 0.001)
    assert torch.trace(projection.T @ (spectrum[:, None] * projection)) > 20.9


def test_orthonormality_lasts_a_thousand_steps() -> None:
    projection = orthonormal(2, "p", 24, 5)
    momentum = torch.zeros_like(projection)
    for step in range(1000):
        apply_spel(projection, momentum, draw((24, 5), step).float(), lr=0.02)
    assert orthogonality_error(projection) < 4e-7


def test_momentum_alone_advances_to_the_same_bits() -> None:
    projection = orthonormal(3, "p", 10, 4)
    before, applied, advanced = projection.clone(), torch.ones(10, 4), torch.ones(10, 4)
    apply_spel(projection, applied, draw((10, 4), 1).float(), lr=0.1)
    advance_spel_momentum(before, advanced, draw((10, 4), 1).float())
    assert torch.equal(applied, advanced)
    advance_spel_momentum(projection, torch.ones(10, 4), draw((10, 4), 1).float())
    assert not torch.equal(before, projection)
