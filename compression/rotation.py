# SPDX-License-Identifier: Apache-2.0
"""The Walsh–Hadamard transform of rows: spreads an outlier over its tile before quantization.

As butterflies of additions and subtractions in a fixed order, without the factor 1/√n: fp32
additions give the same bits on every device, which a matrix product doesn't. H · H = n.
"""

import torch
from torch import Tensor


def hadamard_rows(rows: Tensor) -> Tensor:
    """rows [m, n] fp32, n a power of two -> a new [m, n]: each row times H (Sylvester's order).

    Grows by a factor of up to n, so that large inputs may give infinity.
    """
    num_rows, size = rows.shape
    assert size & (size - 1) == 0, "a power of two"
    # Transposed, every butterfly is over long contiguous stretches.
    current = rows.t().clone(memory_format=torch.contiguous_format)  # also of a single row
    other = torch.empty_like(current)
    half = 1
    while half < size:
        pairs = current.view(size // (2 * half), 2, half, num_rows)
        into = other.view_as(pairs)
        torch.add(pairs[:, 0], pairs[:, 1], out=into[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=into[:, 1])
        current, other = other, current
        half *= 2
    return current.t().contiguous()
