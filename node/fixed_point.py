# SPDX-License-Identifier: Apache-2.0
"""Order-free sums: gradients as int64 fixed-point numbers, whose addition is associative.

A microbatch's gradient g of the *summed* loss enters a sum as round(g * 2^e), half to even. The
sum over a step is then the same whoever computed what, in any order or grouping.

Error. Each of M microbatches rounds by at most 2^-(e+1), and the step divides by its N tokens:
per element M/N * 2^-(e+1). With the e of `protocol.scale` this is below M * 2^(coarsen-56), that
is, at most 2^-24 * max(|g|, eps) with eps = M * 2^(coarsen-32): for eight microbatches 2e-9,
below the eps of Adam. (The one rounding to fp32 afterwards is what any fp32 gradient has.)

Range. A single term may be as large as 2^62 / M, which a per-token gradient of up to 2^6 never
exceeds. The limit concerns each term, so whether a microbatch overflows does not depend on which
others share its accumulator; and sums of accepted terms can't overflow, across replicas neither.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.protocol.errors import NonFiniteError, NumericOverflowError, WrongShapeError
from shoal.protocol.scale import TOTAL_EXPONENT

_INT64_MAX = 2**63 - 1
_NORM_BLOCK = 1 << 16  # part of the definition of `squared_norms`
_BLOCKS_AT_ONCE = 16


def largest(tensor: Tensor) -> Tensor:
    """The largest absolute value, a scalar on the tensor's device; NaN where any element is NaN.

    `aminmax` propagates NaN and is many times faster than the infinity norm. Not for no elements.
    """
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high)


def sums_device(device: torch.device) -> torch.device:
    """Where sums live: with the weights, but on the CPU where the device has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


class Accumulator:
    """The sum of a stage's gradients over microbatches: one flat int64 vector in tensor order."""

    def __init__(
        self, numels: Sequence[int], *, max_terms: int, device: torch.device | None = None
    ) -> None:
        """`max_terms`: microbatches of a step, in all replicas together."""
        self.device = sums_device(device or torch.device("cpu"))
        self.sums = torch.zeros(sum(numels), dtype=torch.int64, device=self.device)
        self._numels = tuple(numels)
        self._limit = 2.0**TOTAL_EXPONENT / max_terms
        # A chunk stays in a CPU's cache; a GPU wants fewer launches.
        chunk = 1 << 16 if self.device.type == "cpu" else 1 << 22
        self._chunk = max(1, min(chunk, max(numels, default=1)))
        self._scaled = torch.empty(self._chunk, dtype=torch.float64, device=self.device)
        self._rounded = torch.empty(self._chunk, dtype=torch.int64, device=self.device)

    def clear(self) -> None:
        self.sums.zero_()

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], exponent: int) -> None:
        """Add one microbatch's fp32 gradients, one per tensor, as round(g * 2^exponent).

        All or nothing: raises `NonFiniteError` for NaN or infinity and `NumericOverflowError` for
        a term beyond 2^62 / max_terms before anything changes.
        """
        if tuple(g.numel() for g in gradients) != self._numels:
            raise WrongShapeError(
                f"gradients of {len(gradients)} tensors with {sum(g.numel() for g in gradients)} "
                f"elements don't fit a stage of {len(self._numels)} with {len(self.sums)}"
            )
        flats = [g.detach().reshape(-1).to(self.device) for g in gradients]
        scale = math.ldexp(1.0, exponent)
        self._check(flats, scale, exponent)
        start = 0
        for flat in flats:
            for part in torch.split(flat, self._chunk):
                n = len(part)
                scaled, rounded = self._scaled[:n], self._rounded[:n]
                scaled.copy_(part)
                rounded.copy_(scaled.mul_(scale).round_())
                self.sums[start : start + n].add_(rounded)
                start += n

    def _check(self, flats: list[Tensor], scale: float, exponent: int) -> None:
        filled = [(i, flat) for i, flat in enumerate(flats) if flat.numel()]
        if not filled:
            return
        peaks: list[float] = torch.stack([largest(flat) for _, flat in filled]).tolist()
        for (index, _), peak in zip(filled, peaks, strict=True):
            if not math.isfinite(peak):
                raise NonFiniteError(
                    f"gradient of tensor {index} holds {peak}; the microbatch was not added"
                )
            if peak * scale > self._limit:
                raise NumericOverflowError(
                    f"gradient of tensor {index} reaches {peak:g}, beyond {self._limit / scale:g} "
                    f"at scale 2^{exponent}; the microbatch was not added, redo the step coarser"
                )


def combine(parts: Sequence[Tensor]) -> Tensor:
    """The sum of replicas' int64 sums, as a new tensor; the parts stay as they are.

    Raises `WrongShapeError` for parts that differ in shape or dtype and `NumericOverflowError`
    where the parts' largest elements together would not fit int64. Sums of one step always do.
    """
    total = parts[0].clone()
    for part in parts:
        if part.shape != total.shape or part.dtype != torch.int64:
            raise WrongShapeError(
                f"sums of {part.dtype} {tuple(part.shape)} where int64 {tuple(total.shape)} belong"
            )
    peak = sum(_peak(part) for part in parts)
    if peak > _INT64_MAX:
        raise NumericOverflowError(
            f"sums reaching 2^{math.log2(peak):.1f} together don't fit 64 bits; "
            "a replica added what it should have refused"
        )
    for part in parts[1:]:
        total.add_(part)
    return total


def _peak(sums: Tensor) -> int:
    if not sums.numel():
        return 0
    low, high = torch.aminmax(sums)
    return max(-int(low.item()), int(high.item()))


@torch.no_grad()
def to_gradient(totals: Tensor, exponent: int, num_tokens: int, shape: Sequence[int]) -> Tensor:
    """The fp32 gradient of the mean loss from a tensor's flat int64 totals, any slice alike."""
    # Multiplied, not divided: CUDA turns a division by a scalar into this, the CPU doesn't.
    factor = math.ldexp(1.0, -exponent) / num_tokens
    gradient = torch.empty(totals.numel(), dtype=torch.float32, device=totals.device)
    size = _NORM_BLOCK * _BLOCKS_AT_ONCE
    for target, part in zip(torch.split(gradient, size), torch.split(totals, size), strict=True):
        target.copy_(part.to(torch.float64).mul_(factor))
    return gradient.view(*shape)


def squared_norms(
    totals: Tensor, numels: Sequence[int], exponent: int, num_tokens: int
) -> list[float]:
    """Squared norm of each tensor's normalised fp32 gradient, in tensor order.

    Squares are fp64, hence exact; each block of 65,536 is summed by halving, and blocks are added
    in order. Fixed and elementwise: the same bits on every device, for any cut into stages.
    """
    bounds = pairwise(accumulate(numels, initial=0))
    return [_squared_norm(totals[a:b], exponent, num_tokens) for a, b in bounds]


@torch.no_grad()
def _squared_norm(totals: Tensor, exponent: int, num_tokens: int) -> float:
    result = 0.0
    for part in torch.split(totals, _NORM_BLOCK * _BLOCKS_AT_ONCE):
        gradient = to_gradient(part, exponent, num_tokens, (-1,))
        # A short block needs no more zeros than to the next power of two: adding them is exact.
        width = min(_NORM_BLOCK, 1 << max(0, part.numel() - 1).bit_length())
        squares = F.pad(gradient.to(torch.float64).square_(), (0, -part.numel() % width))
        blocks = squares.view(-1, width)
        while width > 1:
            width //= 2
            blocks = blocks[:, :width] + blocks[:, width:]
        for block in blocks.view(-1).tolist():  # not sum(): Python 3.12 changed its rounding
            result += block
    return result
