# SPDX-License-Identifier: Apache-2.0
"""Top-k: of each row (a token), the K % of values that are largest in size; the others become 0.

A baseline, to compare with: what isn't sent isn't remembered either (no error feedback: the error
of one sample's activations says nothing of the next one's), so it costs quality quickly.

Payload, for rows of `width` values of which k = ceil(width · K / 100) are kept: for each row its k
indices, rising (uint16, or uint32 where the width exceeds 65,536), then for each row its k values
(bf16). Among values of equal size the earlier ones are kept. The length follows from the shape.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec import CodecContext, Quantizer, Run, element_count, require_finite
from shoal.protocol.errors import CodecError

_MAX_SHORT_WIDTH = 65_536


class TopKCodec(Quantizer):
    """10 % costs 3.2 bits per value."""

    def __init__(self, percent: Fraction) -> None:
        """`percent` is above 0 and at most 100, with a finite decimal form."""
        assert 0 < percent <= 100
        self._share = percent / 100
        self.spec = f"topk:{_decimal(percent)}%"

    def layout(self, shape: Sequence[int]) -> tuple[Run, ...]:
        rows, width, kept = self._extents(shape)
        return Run(rows * kept, _index_dtype(width).itemsize), Run(rows * kept, 2)

    def _extents(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """(rows, width, values kept of a row)"""
        count = element_count(shape)
        if count == 0:
            return 0, 0, 0
        width = shape[-1] if shape else 1
        return count // width, width, math.ceil(width * self._share)

    def quantize(self, values: Tensor, context: CodecContext) -> Tensor:
        where = f"encoding {context} as {self.spec}"
        require_finite(values, where)
        num_rows, width, kept = self._extents(values.shape)
        rows = values.view(num_rows, width)
        indices = _largest(rows.abs(), kept)
        numbers = rows.gather(1, indices).to(torch.bfloat16)
        require_finite(numbers, f"{where} (or a value is beyond its range)")
        parts = (indices.to(_index_dtype(width)), numbers)
        return torch.cat([part.view(-1).view(torch.uint8) for part in parts]).cpu()

    def dequantize(self, payload: Tensor, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        where = f"{self.spec} payload of {context}"
        num_rows, width, kept = self._extents(shape)
        dtype = _index_dtype(width)
        index_bytes = num_rows * kept * dtype.itemsize
        # Unsigned, whatever the dtype's name: PyTorch does little with unsigned integers.
        indices = payload[:index_bytes].view(dtype).to(torch.int64) & (256**dtype.itemsize - 1)
        indices = indices.view(num_rows, kept)
        if (indices[:, -1] >= width).any() or (indices.diff(dim=1) <= 0).any():
            raise CodecError(f"{where}: indices of a row don't rise from 0 to below {width}")
        numbers = payload[index_bytes:].view(torch.bfloat16)
        require_finite(numbers, where)
        out = torch.zeros(num_rows, width, dtype=torch.float32, device=payload.device)
        return out.scatter_(1, indices, numbers.to(torch.float32).view(num_rows, kept))


def _largest(sizes: Tensor, kept: int) -> Tensor:
    """sizes [m, n] -> int64 [m, kept], rising: the places of each row's largest, of equals the
    earlier ones."""
    threshold = _smallest_of_largest(sizes, kept)
    above = sizes > threshold
    equal = sizes == threshold
    room = kept - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(-1, kept)


def _smallest_of_largest(sizes: Tensor, kept: int) -> Tensor:
    """[m, 1]. `topk` leaves open which of equals it takes, but not their size."""
    if sizes.device.type != "cpu":
        return sizes.topk(kept, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    # Ten times as fast as `topk` on a CPU.
    place = sizes.shape[1] - kept
    return torch.from_numpy(np.partition(sizes.numpy(), place, axis=1)[:, place : place + 1])


def _index_dtype(width: int) -> torch.dtype:
    return torch.int16 if width <= _MAX_SHORT_WIDTH else torch.int32


def _decimal(number: Fraction) -> str:
    """Exact, without an exponent: "10", "0.5"."""
    return f"{float(number):.6f}".rstrip("0").rstrip(".")
