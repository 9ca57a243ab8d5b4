# SPDX-License-Identifier: Apache-2.0
"""Tensors that are a function of (seed, name, shape): first weights, and tables that never learn.

Nobody sends or stores the frozen ones; every stage draws them alike, on the CPU. Randomness is
drawn in fp64 and rounded once, and orthonormal columns come from sums in a fixed order: fp32
normals and LAPACK's factorisations differ between CPUs.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 1 << 20  # part of the definition: another chunk length draws other values


def gaussian(seed: int, name: str, shape: tuple[int, ...], *, std: float = 1.0) -> Tensor:
    """Independent N(0, std²), fp32."""
    generator = _generator(seed, name)
    flat = torch.empty(torch.Size(shape).numel(), dtype=torch.float32)
    for part in torch.split(flat, _CHUNK):
        part.copy_(torch.randn(len(part), generator=generator, dtype=torch.float64).mul_(std))
    return flat.view(shape)


def orthonormal(seed: int, name: str, rows: int, columns: int) -> Tensor:
    """A matrix with orthonormal columns, uniformly distributed; fp32, `rows` >= `columns`.

    Gram-Schmidt on a Gaussian matrix in fp64; twice where it comes near to square, and so to
    singular.
    """
    assert rows >= columns, f"{columns} columns of {rows} values can't be orthonormal"
    generator = _generator(seed, name)
    drawn = torch.randn(columns, rows, generator=generator, dtype=torch.float64)
    passes = 2 if 2 * columns > rows else 1
    done = torch.zeros(_power_of_two(columns), _power_of_two(rows), dtype=torch.float64)
    for i in range(columns):
        vector = F.pad(drawn[i], (0, done.shape[1] - rows))
        for _ in range(passes if i else 0):
            others = done[: _power_of_two(i)]
            along = _folded(others * vector, dim=1)
            vector = vector - _folded(others * along, dim=0)[0]
        done[i] = vector / _folded((vector * vector)[None], dim=1)[0].sqrt()
    return done[:columns, :rows].T.to(torch.float32).contiguous()


def _generator(seed: int, name: str) -> torch.Generator:
    key = hashlib.sha256(f"shoal/initialise/{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


def _power_of_two(n: int) -> int:
    """The least one that isn't smaller."""
    return 1 << (n - 1).bit_length()


def _folded(matrix: Tensor, dim: int) -> Tensor:
    """Sums along a dimension of a power of two's length, which stays with length 1. By halving:
    the same order everywhere."""
    while matrix.shape[dim] > 1:
        half = matrix.shape[dim] // 2
        matrix = matrix.narrow(dim, 0, half) + matrix.narrow(dim, half, half)
    return matrix
