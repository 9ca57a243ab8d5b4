# SPDX-License-Identifier: Apache-2.0
"""The Walsh–Hadamard transform against the matrix it stands for."""

import pytest
import torch

from shoal.compression.rotation import hadamard_rows


def sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]]), matrix)
    return matrix


@pytest.mark.parametrize("size", [1, 2, 8, 64, 1024])
def test_rows_are_multiplied_by_sylvesters_matrix(size: int) -> None:
    rows = torch.randint(-9, 10, (5, size), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(hadamard_rows(rows), rows @ sylvester(size))  # small integers: exact


def test_twice_is_the_size_times_the_input() -> None:
    rows = torch.randint(-9, 10, (3, 16), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(hadamard_rows(hadamard_rows(rows)), 16 * rows)


def test_input_is_left_alone_and_rows_do_not_mix() -> None:
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    before = rows.clone()
    together = hadamard_rows(rows)
    assert torch.equal(together[2:3], hadamard_rows(rows[2:3]))
    assert torch.equal(rows, before)
