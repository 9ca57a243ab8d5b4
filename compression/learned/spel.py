# SPDX-License-Identifier: Apache-2.0
"""Steepest descent in the spectral norm on the Stiefel manifold: how MAPL's projections learn.

SPEL (MAPL, arXiv 2606.05484) with the tangent gradient g - A sym(Aᵀg) in an EMA momentum, the
polar factor of the momentum as direction, and the polar factor again as retraction. Polar factors
come from PolarExpress (arXiv 2505.16932), polished by a Newton-Schulz iteration of order five.

Everything is fp64 on the CPU, whatever the device of the stage, with exact products (exact.py), and
rounded to fp32 once: the two stages that mirror a projection compute the same bits on any two
machines.
"""

import torch
from torch import Tensor

from shoal.compression.learned.exact import frobenius_norm, odd_polynomial, on_grid

MOMENTUM = 0.95
"""The paper gives none."""
MAX_ORTHOGONALITY_ERROR = 1e-4

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
"""Optimal for singular values from 0.001 to 1; smaller ones grow, and reach less than 1. None gets
above 2, norm products stay below 16."""
_NEWTON_SCHULZ = (1.875, -1.25, 0.375)
_POLISH = 3
_RETRACTION = 7
"""Iterations from singular values within [0.5, 1.5] to 1, with some to spare."""


@torch.no_grad()
def apply_spel(projection: Tensor, momentum: Tensor, gradient: Tensor, *, lr: float) -> None:
    """Update a matrix [D, R] with orthonormal columns, and its momentum, in place. `lr` is at most
    `protocol.learned.MAX_PROJECTION_LR`. fp32 on any device."""
    a = projection.detach().to("cpu", torch.float64).T
    advance_spel_momentum(projection, momentum, gradient)
    direction = polar_direction(momentum.to("cpu", torch.float64).T)
    updated = _retracted(a - direction * lr).T.to(torch.float32)
    error = orthogonality_error(updated)
    assert error < MAX_ORTHOGONALITY_ERROR, f"columns are orthonormal but for {error:g}"
    projection.copy_(updated)


@torch.no_grad()
def advance_spel_momentum(projection: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    """What `apply_spel` does to the momentum, to the same bits, from the projection *before* the
    step."""
    a, g = (t.detach().to("cpu", torch.float64) for t in (projection, gradient))
    length = frobenius_norm(g) or 1.0
    a, g = on_grid(a), on_grid(g / length)
    product = a.T @ g
    tangent = (g - a @ on_grid((product + product.T) * 0.5)) * length
    momentum.mul_(MOMENTUM).add_((tangent * (1.0 - MOMENTUM)).to(momentum.device, torch.float32))


def polar_direction(matrix: Tensor) -> Tensor:
    """UVᵀ of the singular value decomposition, for singular values of at least 0.001 of the
    Frobenius norm; zero gives zero. fp64 [R, D], R <= D."""
    x = on_grid(matrix / ((frobenius_norm(matrix) or 1.0) * 1.01))
    for coefficients in _POLAR_EXPRESS:
        x = odd_polynomial(x, coefficients)
    for _ in range(_POLISH):
        x = odd_polynomial(x, _NEWTON_SCHULZ)
    return x


def _retracted(matrix: Tensor) -> Tensor:
    matrix = on_grid(matrix)
    for _ in range(_RETRACTION):
        matrix = odd_polynomial(matrix, _NEWTON_SCHULZ)
    return matrix


def orthogonality_error(columns: Tensor) -> float:
    """max |AᵀA - I|."""
    a = columns.to(torch.float64)
    return float((a.T @ a - torch.eye(a.shape[1], dtype=torch.float64)).abs().max())
