# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose bits don't depend on the order of their sums, so on no device or library.

Operands lie on a grid of multiples of 2^-24 and have bounded norms. A product of two such numbers
is a multiple of 2^-48; by Cauchy and Schwarz, every partial sum of a dot product is at most the
product of the two vectors' norms. Where that stays below 32, each sum is a multiple of 2^-48 below
2^5: it fits the 53 bits of fp64, and adding in any order, fused or not, is exact.

The grid costs what fp32 costs: an absolute error of 2^-25 for numbers around one.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

GRID_BITS = 24
MAX_NORM_PRODUCT = 32.0
"""Of a row and a column, in a product that is exact."""

_BLOCK = 1 << 16  # part of the definition of `frobenius_norm`


def on_grid(values: Tensor) -> Tensor:
    """fp64, each rounded to a multiple of 2^-24, half to even. Elementwise: the same everywhere."""
    return values.mul(2.0**GRID_BITS).round_().mul_(2.0**-GRID_BITS)


def frobenius_norm(values: Tensor) -> float:
    """Of an fp64 tensor; blocks are summed by halving, then in order: the same everywhere."""
    total = 0.0
    for part in torch.split(values.reshape(-1), _BLOCK):
        width = 1 << max(0, part.numel() - 1).bit_length()
        squares = F.pad(part * part, (0, width - part.numel()))
        while width > 1:
            width //= 2
            squares = squares[:width] + squares[width:]
        total += squares.item()
    return math.sqrt(total)


def odd_polynomial(x: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """ax + (bG + cG²)x with G = xxᵀ, a step of a Newton-Schulz iteration: the polynomial of x's
    singular values s, as + bs³ + cs⁵. `x` [rows, columns] is fp64 on the grid, the result too.

    Its products are exact where max s² · max s² and max |bs² + cs⁴| · max s are below
    `MAX_NORM_PRODUCT`.
    """
    a, b, c = coefficients
    gram = on_grid(x @ x.T)
    factor = on_grid((gram * b).add_((gram @ gram).mul_(c)))
    return on_grid((x * a).add_(factor @ x))


def within_span(columns: Tensor, basis: Tensor) -> Tensor:
    """U(UᵀW) for an orthonormal basis U [D, R]: each of the columns [D, N] brought into its span.

    fp32 in and out, with an error of about 2^-20 of a column's norm.
    """
    w, u = columns.double(), on_grid(basis.double())
    peaks = w.abs().amax(dim=0, keepdim=True).mul_(math.sqrt(w.shape[0]))
    exponents = torch.frexp(peaks).exponent  # 2^exponent is above the column's norm
    coordinates = on_grid(u.T @ on_grid(w * _powers_of_two(-exponents)))
    return (u @ coordinates).mul_(_powers_of_two(exponents)).float()


def _powers_of_two(exponents: Tensor) -> Tensor:
    """fp64, by their bits: a library's power function may err."""
    return (exponents.to(torch.int64) + 1023).bitwise_left_shift(52).view(torch.float64)
