# SPDX-License-Identifier: Apache-2.0
"""Tensors that are a function of (seed, name, shape): first weights, and tables that never learn.

Nobody sends or stores the frozen ones; every stage draws them alike, on the CPU. Randomness is
drawn in fp64 and rounded once, and orthonormal columns come from sums in a fixed order: fp32
normals and LAPACK's factorisations differ between CPUs.
"""

import hashlib

import torch
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
    vectors = torch.randn(columns, rows, generator=generator, dtype=torch.float64)
    for i in range(columns):
        vector = vectors[i]
        for _ in range(2 if 2 * columns > rows else 1):
            done = vectors[:i]
            along = _row_sums(done * vector)
            vector = vector - _row_sums((done * along[:, None]).T.contiguous())
        length = _row_sums((vector * vector)[None])[0].sqrt()
        vectors[i] = vector / length
    return vectors.T.to(torch.float32).contiguous()


def _generator(seed: int, name: str) -> torch.Generator:
    key = hashlib.sha256(f"shoal/initialise/{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


def _row_sums(matrix: Tensor) -> Tensor:
    """By halving: the same order everywhere."""
    width = matrix.shape[1]
    if width == 0:
        return matrix.new_zeros(matrix.shape[0])
    while width > 1:
        half = width // 2
        folded = matrix[:, :half] + matrix[:, half : 2 * half]
        if width % 2:
            folded = torch.cat((folded, matrix[:, 2 * half : width]), dim=1)
        matrix, width = folded, half + width % 2
    return matrix[:, 0]
