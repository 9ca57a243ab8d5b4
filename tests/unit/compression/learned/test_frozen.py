# SPDX-License-Identifier: Apache-2.0
"""Drawn tensors: functions of seed, name and shape."""

import pytest
import torch

from shoal.compression.learned.frozen import gaussian, orthonormal


@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (64, 5), (33, 20), (4, 1)])
def test_columns_are_orthonormal(rows: int, columns: int) -> None:
    matrix = orthonormal(1, "x", rows, columns).double()
    assert matrix.shape == (rows, columns)
    torch.testing.assert_close(
        matrix.T @ matrix, torch.eye(columns, dtype=torch.float64), atol=3e-7, rtol=0
    )


def test_directions_have_no_preference() -> None:
    draws = torch.stack([orthonormal(seed, "x", 4, 2) for seed in range(2000)])
    assert draws.mean(0).abs().max() < 0.05
    torch.testing.assert_close(draws.square().mean(0), torch.full((4, 2), 0.25), atol=0.03, rtol=0)


def test_seed_and_name_decide_and_nothing_else() -> None:
    torch.manual_seed(0)
    first = orthonormal(1, "x", 8, 3), gaussian(1, "x", (8, 3))
    torch.manual_seed(9)
    again = orthonormal(1, "x", 8, 3), gaussian(1, "x", (8, 3))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], orthonormal(2, "x", 8, 3))
    assert not torch.equal(first[1], gaussian(1, "y", (8, 3)))


KNOWN_GAUSSIAN = [-3.2146904468536377, 2.5353469848632812, -4.707250118255615]
KNOWN_ORTHONORMAL = [
    [-0.5152884125709534, -0.7012505531311035],
    [0.4063952565193176, -0.706061840057373],
    [-0.7545334696769714, 0.09861208498477936],
]


def test_known_values_stay_what_they_are() -> None:
    """Another value would be another run for everybody."""
    torch.testing.assert_close(
        gaussian(0, "x", (3,), std=2.0), torch.tensor(KNOWN_GAUSSIAN), atol=0, rtol=0
    )
    torch.testing.assert_close(
        orthonormal(0, "x", 3, 2), torch.tensor(KNOWN_ORTHONORMAL), atol=0, rtol=0
    )
