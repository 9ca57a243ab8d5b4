# SPDX-License-Identifier: Apache-2.0
"""Fixed-point sums: exactness, error bound, atomicity, order."""

import math
from fractions import Fraction

import pytest
import torch

from shoal.node.fixed_point import (
    Accumulator,
    combine,
    largest,
    squared_norms,
    to_gradient,
)
from shoal.protocol.errors import NonFiniteError, NumericOverflowError, WrongShapeError
from shoal.protocol.scale import scale_exponent

NUMELS = (70_000, 5, 1)


def draw(seed: int, std: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) * std for n in NUMELS]


@pytest.mark.parametrize(("tokens", "exponent"), [(1, 56), (2, 55), (1024, 46), (1025, 45)])
def test_scale_leaves_room_for_the_largest_token_gradients(tokens: int, exponent: int) -> None:
    assert scale_exponent(tokens) == exponent
    assert tokens * 2**6 * 2**exponent <= 2**62
    assert scale_exponent(tokens, coarsen=3) == exponent - 3


@pytest.mark.parametrize("exponent", [0, 10, 46])
def test_terms_are_rounded_half_to_even_exactly(exponent: int) -> None:
    values = [0.5, 1.5, -0.5, -2.5, 1e-30, 3.3, -7.125]
    gradient = torch.tensor(values, dtype=torch.float32) * 2.0**-exponent
    accumulator = Accumulator((len(values),), max_terms=1)
    accumulator.add([gradient], exponent)
    expected = [round(Fraction(g) * 2**exponent) for g in gradient.tolist()]
    assert accumulator.sums.tolist() == expected


def test_sums_do_not_depend_on_order_or_grouping() -> None:
    terms = [draw(seed) for seed in range(6)]
    whole = Accumulator(NUMELS, max_terms=6)
    for term in terms:
        whole.add(term, 40)
    parts = [Accumulator(NUMELS, max_terms=6) for _ in range(3)]
    for i in (5, 0, 3, 1, 4, 2):
        parts[i % 2].add(terms[i], 40)
    assert torch.equal(combine([p.sums for p in reversed(parts)]), whole.sums)


def test_normalised_sum_meets_the_documented_error_bound() -> None:
    microbatches, tokens = 8, 1024
    exponent = scale_exponent(tokens)
    accumulator = Accumulator(NUMELS, max_terms=microbatches)
    exact = torch.zeros(sum(NUMELS), dtype=torch.float64)
    for seed in range(microbatches):
        gradients = draw(seed, std=1e-6)
        accumulator.add(gradients, exponent)
        exact += torch.cat(gradients).double()
    exact /= tokens
    fixed = accumulator.sums.double() * 2.0**-exponent / tokens
    error = (fixed - exact).abs()
    assert 0 < error.max().item() <= microbatches / tokens * 2.0 ** -(exponent + 1)
    eps = microbatches * 2.0**-32
    assert (error <= 2.0**-24 * exact.abs().clamp(min=eps)).all()


@pytest.mark.parametrize("numel", [1, 7, 64, 70_001])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_largest_value_shows_what_is_not_finite_at_any_place(numel: int, bad: float) -> None:
    for place in {0, numel // 3, numel - 1}:
        tensor = torch.linspace(-2.0, 1.0, numel)
        assert largest(tensor).item() == 2.0
        tensor[place] = bad
        assert not math.isfinite(largest(tensor).item())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_gradient_in_the_last_tensor_changes_nothing(bad: float) -> None:
    accumulator = Accumulator(NUMELS, max_terms=2)
    accumulator.add(draw(0), 40)
    before = accumulator.sums.clone()
    gradients = draw(1)
    gradients[2][0] = bad
    with pytest.raises(NonFiniteError, match="tensor 2"):
        accumulator.add(gradients, 40)
    assert torch.equal(accumulator.sums, before)


def test_overflow_changes_nothing_and_a_coarser_scale_fits() -> None:
    accumulator = Accumulator((2, 3), max_terms=4)
    gradients = [torch.ones(2), torch.tensor([1.0, 2.0**21, 0.0])]
    with pytest.raises(NumericOverflowError, match="tensor 1"):
        accumulator.add(gradients, 40)
    assert accumulator.sums.abs().max() == 0
    accumulator.add(gradients, 39)
    assert accumulator.sums[3] == 2**60


def test_accepted_terms_never_overflow_their_total() -> None:
    accumulator = Accumulator((1,), max_terms=8)
    for _ in range(8):
        accumulator.add([torch.tensor([2.0**19])], 40)
    assert accumulator.sums.item() == 2**62


def test_gradients_of_another_stage_are_refused() -> None:
    with pytest.raises(WrongShapeError):
        Accumulator((2, 3), max_terms=1).add([torch.ones(5)], 0)


def test_combine_leaves_parts_alone_and_refuses_what_does_not_fit() -> None:
    part = torch.tensor([2**62, -(2**62)])
    total = combine([part, torch.tensor([5, -5])])
    assert total.tolist() == [2**62 + 5, -(2**62) - 5]
    assert part.tolist() == [2**62, -(2**62)]
    with pytest.raises(NumericOverflowError):
        combine([part, part])
    with pytest.raises(WrongShapeError):
        combine([part, torch.tensor([1])])
    with pytest.raises(WrongShapeError):
        combine([part, torch.tensor([1.0, 2.0])])


def test_gradient_of_a_slice_is_the_slice_of_the_gradient() -> None:
    totals = torch.randint(
        -(2**60), 2**60, (1_200_000,), generator=torch.Generator().manual_seed(1)
    )
    whole = to_gradient(totals, 46, 1024, (1200, 1000))
    assert whole.dtype == torch.float32
    part = to_gradient(totals[777:1_100_001], 46, 1024, (-1,))
    assert torch.equal(whole.view(-1)[777:1_100_001], part)
    assert whole.view(-1)[0].item() == pytest.approx(totals[0].item() / 2**46 / 1024, rel=1e-7)


@pytest.mark.parametrize("numel", [1, 3, 64, 65_536, 65_537, 1_100_003])
def test_squared_norm_adds_exact_squares_in_fixed_blocks(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    totals = torch.randint(-(2**50), 2**50, (numel + 7,), generator=generator)
    got = squared_norms(totals, (7, numel), 46, 1024)
    gradient = to_gradient(totals[7:], 46, 1024, (-1,)).tolist()
    assert got[1] == pytest.approx(math.fsum(g * g for g in gradient), rel=1e-14)
    assert got == [
        *squared_norms(totals[:7], (7,), 46, 1024),
        *squared_norms(totals[7:].clone(), (numel,), 46, 1024),
    ]
