# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/): momentum, orthogonalised.

Replicas of a stage must come to the same bits, whatever they compute with. So momentum is
elementwise and rounded operation by operation, as AdamW's (node/optimizer.py), and the products of
the orthogonalisation are exact (compression/learned/exact.py): fp64 in place of Jordan's bf16,
which costs little on a CPU, and time on GPUs that are slow at fp64.
"""

import math

import torch
from torch import Tensor

from shoal.compression.learned.exact import frobenius_norm, odd_polynomial, on_grid
from shoal.protocol.spec import OptimizerSpec

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Singular values stay below 1.21, norm products below 3.5."""
_ITERATIONS = 5
_EPS = 1e-7


@torch.no_grad()
def apply_muon(
    weights: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    *,
    lr: float,
    spec: OptimizerSpec,
    decay: bool,
) -> None:
    """Update a matrix [rows, columns] and its momentum in place.

    With m ← βm + (1-β)g and Nesterov's look-ahead u = βm + (1-β)g, the matrix moves by
    lr · sqrt(max(1, rows / columns)) · orth(u), Jordan's own scale rule: every step changes the
    outputs for typical inputs alike, whatever the shape. Weight decay is decoupled, as AdamW's.
    """
    advance_momentum(momentum, gradient, spec=spec)
    beta = spec.muon_momentum
    direction = orthogonalised((momentum * beta).add_(gradient * (1.0 - beta)))
    rows, columns = weights.shape
    if decay:
        weights.mul_(1.0 - lr * spec.weight_decay)
    weights.sub_(direction.mul_(lr * math.sqrt(max(1.0, rows / columns))))


@torch.no_grad()
def advance_momentum(momentum: Tensor, gradient: Tensor, *, spec: OptimizerSpec) -> None:
    """What `apply_muon` does to the momentum, to the same bits: it doesn't depend on weights."""
    momentum.mul_(spec.muon_momentum).add_(gradient * (1.0 - spec.muon_momentum))


@torch.no_grad()
def orthogonalised(matrix: Tensor) -> Tensor:
    """Nearly the polar factor: singular values between about 0.7 and 1.2, singular vectors kept.
    fp32, on the matrix's device.

    Five quintic Newton-Schulz iterations X ← aX + (bXXᵀ + c(XXᵀ)²)X on the matrix over its
    Frobenius norm, with the smaller side as rows. A new tensor; zero gives zero.
    """
    device = torch.device("cpu") if matrix.device.type == "mps" else matrix.device  # has no fp64
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(device, torch.float64)
    x = x.T.contiguous() if is_tall else x
    x = on_grid(x / (frobenius_norm(x) + _EPS))
    for _ in range(_ITERATIONS):
        x = odd_polynomial(x, _COEFFICIENTS)
    x = x.T.contiguous() if is_tall else x
    return x.to(matrix.device, torch.float32)
