# SPDX-License-Identifier: Apache-2.0
"""Products that no order of summation changes."""

import math

import pytest
import torch
from torch import Tensor

from shoal.compression.learned.exact import (
    GRID_BITS,
    MAX_NORM_PRODUCT,
    frobenius_norm,
    odd_polynomial,
    on_grid,
    within_span,
)
from shoal.compression.learned.frozen import orthonormal

CUBIC = (1.875, -1.25, 0.375)


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def shuffled_product(a: Tensor, b: Tensor, seed: int) -> Tensor:
    order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(seed))
    return a[:, order] @ b[order]


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in reversed(range(a.shape[1])):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


def unit_rows(shape: tuple[int, int], seed: int, length: float) -> Tensor:
    rows = draw(shape, seed)
    return rows / rows.norm(dim=1, keepdim=True) * length


@pytest.mark.parametrize("inner", [64, 3000])
def test_any_order_gives_the_same_bits_up_to_the_bound(inner: int) -> None:
    length = math.sqrt(MAX_NORM_PRODUCT) * 0.999
    a = on_grid(unit_rows((20, inner), 0, length))
    b = on_grid(unit_rows((30, inner), 1, length)).T.contiguous()
    products = [a @ b, shuffled_product(a, b, 0), shuffled_product(a, b, 1), one_by_one(a, b)]
    assert all(torch.equal(product, products[0]) for product in products)


def test_off_the_grid_the_order_shows() -> None:
    a, b = unit_rows((20, 3000), 0, 1.0), unit_rows((30, 3000), 1, 1.0).T.contiguous()
    assert not torch.equal(a @ b, one_by_one(a, b))


def whole(values: Tensor) -> Tensor:
    return (values * 2**GRID_BITS).to(torch.int64)


def test_a_polynomials_bits_are_those_of_whole_numbers() -> None:
    """Every product taken in int64 instead, where nothing is rounded."""
    a, b, c = CUBIC
    x = draw((24, 100), 2)
    x = expected = on_grid(x / frobenius_norm(x))
    for _ in range(8):
        x = odd_polynomial(x, CUBIC)
        gram = on_grid((whole(expected) @ whole(expected).T).double() * 2.0 ** (-2 * GRID_BITS))
        squared = (whole(gram) @ whole(gram)).double() * 2.0 ** (-2 * GRID_BITS)
        factor = on_grid(gram * b + squared * c)
        product = (whole(factor) @ whole(expected)).double() * 2.0 ** (-2 * GRID_BITS)
        expected = on_grid(expected * a + product)
        assert torch.equal(x, expected)


def test_singular_values_go_through_the_polynomial_and_vectors_stay() -> None:
    u, s, v = torch.linalg.svd(draw((6, 9), 3), full_matrices=False)
    s = s / s.sum()
    got = odd_polynomial(on_grid((u * s) @ v), CUBIC)
    expected = (u * (1.875 * s - 1.25 * s**3 + 0.375 * s**5)) @ v
    torch.testing.assert_close(got, expected, atol=4 * 2.0**-GRID_BITS, rtol=0)


@pytest.mark.parametrize("numel", [0, 1, 3, 65_536, 200_001])
def test_the_norm_is_the_norm(numel: int) -> None:
    values = draw((numel,), 4)
    assert frobenius_norm(values) == pytest.approx(float(values.norm()), rel=1e-12)


def test_columns_of_any_size_are_brought_into_the_span() -> None:
    basis = orthonormal(0, "u", 64, 5)
    columns = (draw((64, 40), 5) * torch.logspace(-20, 20, 40, dtype=torch.float64)).float()
    columns[:, 3] = 0
    exact = basis.double() @ (basis.double().T @ columns.double())
    error = (within_span(columns, basis) - exact).norm(dim=0)
    assert (error <= 2.0**-20 * columns.double().norm(dim=0)).all()
    assert exact.norm() > 0


def test_what_lies_in_the_span_stays() -> None:
    basis = orthonormal(0, "u", 64, 5)
    inside = (basis.double() @ draw((5, 40), 6)).float()
    torch.testing.assert_close(within_span(inside, basis), inside, atol=2e-6, rtol=0)
