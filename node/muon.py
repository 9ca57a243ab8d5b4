# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/): momentum, orthogonalised.

Momentum is elementwise and rounded operation by operation, as AdamW's (node/optimizer.py). The
orthogonalisation multiplies matrices in fp32: its bits are those of a kernel class with its number
of threads, like the forward's, and not of every machine.
"""

import math

import torch
from torch import Tensor

from shoal.protocol.spec import OptimizerSpec

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
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

    Five quintic Newton-Schulz iterations X ← aX + (bXXᵀ + c(XXᵀ)²)X on the matrix over its
    Frobenius norm, with the smaller side as rows. A new tensor; zero gives zero.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T.contiguous() if is_tall else matrix
    x = x / (x.norm() + _EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = x * a + (gram * b + (gram @ gram) * c) @ x
    result: Tensor = x.T.contiguous() if is_tall else x
    return result
