# SPDX-License-Identifier: Apache-2.0
"""Blockwise int8 and int4: N values share a scale, and become small integers times it.

Symmetric absmax with L = 127 or 7: scale = max|x| / L, q = x / scale rounded, x̂ = q · scale. To
nearest even, |x - x̂| <= scale / 2. Stochastically (up with the probability that is missing), the
error is below one scale and its mean over the random numbers is 0, but for 2^-16 of a scale.

Which: nearest on the forward leg, stochastic on the backward leg, unless said otherwise. Errors of
gradients add up over microbatches and steps; a bias would too. The random numbers are a function
of run, tensor and element (`stochastic`), so a replay gives the same bytes.

int8's scales are fp32. int4's are bf16, rounded up so that no code clips: 4.25 bits a value at
N = 64 instead of 4.5, for levels that are coarser by 0.4 % on average. Not fp16, in which gradients
of 1e-6 underflow.

`by_channel`: blocks run over the tokens of one channel (`blocks`). `rotated`: each block of full
length is multiplied by a Hadamard matrix before (`rotation`), x̂ = H ŷ / N; this helps where
max/rms is large, and costs time.

Payload: the scales of all blocks, then n codes; int8 from -127 to 127 (-128 is never written);
int4 as q + 8, from 1 to 15 (0 is never written), two a byte, the first in the low half, and 8 in
the last half of an odd number. Body first, then tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.compression.blocks import Blocks, Chunk
from shoal.compression.codec import CodecContext, Quantizer, Run
from shoal.compression.rotation import hadamard_rows
from shoal.compression.stochastic import stream_key, uniform
from shoal.protocol.errors import CodecError, NonFiniteError

DEFAULT_BLOCK = 64
MIN_BLOCK, MAX_BLOCK = 8, 65_536
MAX_ROTATED_BLOCK = 1024

_MIN_SCALE = 2.0**-126
"""The smallest normal fp32. A smaller scale would be subnormal, which some devices flush to zero:
such a block is sent as zeros, for all devices alike."""


@dataclass(frozen=True, slots=True)
class _Width:
    """What differs between the widths of a code."""

    name: str
    levels: int
    scale_dtype: torch.dtype
    max_scale: float
    """The largest of its dtype whose product with `levels` is finite in fp32."""


_INT8 = _Width("int8", 127, torch.float32, float.fromhex("0x1.020406p+121"))
_INT4 = _Width("int4", 7, torch.bfloat16, float.fromhex("0x1.24p+125"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A quantizer's parameters."""

    block: int = DEFAULT_BLOCK
    """Values that share a scale; even for int4; a power of two up to 1024 when rotated."""
    by_channel: bool = False
    rotated: bool = False
    rounding: Literal["by leg", "nearest", "stochastic"] = "by leg"

    def __str__(self) -> str:
        rounding = {"by leg": "", "nearest": ":rn", "stochastic": ":sr"}[self.rounding]
        return f"g{self.block}{':c' * self.by_channel}{':rot' * self.rotated}{rounding}"

    def is_stochastic(self, context: CodecContext) -> bool:
        if self.rounding == "by leg":
            return context.leg == "backward"
        return self.rounding == "stochastic"


class IntegerCodec(Quantizer):
    """What int8 and int4 have in common; codes are int8 tensors in here."""

    _width: _Width

    def __init__(self, grid: Grid | None = None) -> None:
        self.grid = grid or Grid()
        size = self.grid.block
        assert MIN_BLOCK <= size <= MAX_BLOCK
        assert not self.grid.rotated or (size <= MAX_ROTATED_BLOCK and size & (size - 1) == 0)
        self.spec = f"{self._width.name}:{self.grid}"
        # Rotated values are N times as large in the worst case, and divided by N at the end.
        self._min_scale = _MIN_SCALE * (size if self.grid.rotated else 1)

    # ---- layout --------------------------------------------------------------------------

    def layout(self, shape: Sequence[int]) -> tuple[Run, ...]:
        blocks, scale_bytes = self._blocks(shape), self._width.scale_dtype.itemsize
        return Run(blocks.num_blocks, scale_bytes), Run(self._code_bytes(blocks.count), 1)

    def _blocks(self, shape: Sequence[int]) -> Blocks:
        return Blocks.of(shape, self.grid.block, by_channel=self.grid.by_channel)

    def _code_bytes(self, count: int) -> int:
        return count

    def _write_codes(self, codes: Tensor, out: Tensor, chunk: Chunk) -> None:
        """int8 codes of a chunk -> their place in `out`, the uint8 of all."""
        out[chunk.values].view(torch.int8).copy_(codes)

    def _read_codes(self, stored: Tensor, chunk: Chunk) -> Tensor:
        return stored[chunk.values].view(torch.int8)

    def _check_codes(self, stored: Tensor, count: int, where: str) -> None:
        if stored.view(torch.int8).min().item() < -self._width.levels:
            raise CodecError(f"{where}: code -128 is never written")

    # ---- values to bytes -----------------------------------------------------------------

    def quantize(self, values: Tensor, context: CodecContext) -> Tensor:
        blocks, device = self._blocks(values.shape), values.device
        ordered = blocks.ordered(values)
        scale_run, code_run = self.layout(values.shape)
        scale_bytes = scale_run.count * scale_run.item_bytes
        out = torch.empty(scale_bytes + code_run.count, dtype=torch.uint8, device=device)
        scales_out = out[:scale_bytes].view(self._width.scale_dtype)
        codes_out = out[scale_bytes:]
        absmax = torch.empty(blocks.num_blocks, dtype=torch.float32, device=device)
        key = stream_key(context) if self.grid.is_stochastic(context) else None
        for chunk in blocks.chunks(device):
            rows = chunk.rows(ordered)
            if self._is_rotated(chunk):
                rows = hadamard_rows(rows)
            largest = absmax[chunk.blocks]
            torch.amax(rows.abs(), dim=1, out=largest)  # carries NaN and infinity
            scales = self._scales(largest)
            scales_out[chunk.blocks] = scales
            divisors = torch.where(scales == 0, 1.0, scales).unsqueeze(1)
            self._write_codes(self._rounded(rows / divisors, chunk, key), codes_out, chunk)
        if not torch.isfinite(absmax).all():
            beyond = " (or a value is beyond its range)" if self.grid.rotated else ""
            raise NonFiniteError(f"encoding {context} as {self.spec}{beyond}: NaN or infinity")
        return out.cpu()

    def _is_rotated(self, chunk: Chunk) -> bool:
        return self.grid.rotated and chunk.block == self.grid.block

    def _scales(self, absmax: Tensor) -> Tensor:
        """fp32 [blocks], each a number of the scales' own type."""
        scales = (absmax / self._width.levels).clamp_(max=self._width.max_scale)
        if self._width.scale_dtype == torch.bfloat16:
            bits = scales.view(torch.int32)  # bf16 is fp32's upper half
            bits.add_(0xFFFF).bitwise_and_(-0x10000)
        return torch.where(scales < self._min_scale, 0.0, scales)

    def _rounded(self, quotients: Tensor, chunk: Chunk, key: int | None) -> Tensor:
        """fp32 [blocks, block], overwritten -> int8 [values]."""
        flat = quotients.view(-1)
        if key is None:
            # No clamp: max|x| / scale is L within two roundings, which rounds to L.
            return flat.round_().to(torch.int8)
        start = chunk.values.start
        flat.add_(uniform(key, start, flat.numel(), flat.device)).floor_()
        return flat.clamp_(-self._width.levels, self._width.levels).to(torch.int8)

    # ---- bytes to values -----------------------------------------------------------------

    def dequantize(self, payload: Tensor, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        blocks, where = self._blocks(shape), f"{self.spec} payload of {context}"
        scale_run, _ = self.layout(shape)
        scale_bytes = scale_run.count * scale_run.item_bytes
        scales = payload[:scale_bytes].view(self._width.scale_dtype).to(torch.float32)
        stored = payload[scale_bytes:]
        self._check_scales(scales, where)
        self._check_codes(stored, blocks.count, where)
        ordered = torch.empty(blocks.count, dtype=torch.float32, device=payload.device)
        for chunk in blocks.chunks(payload.device):
            codes = self._read_codes(stored, chunk).view(-1, chunk.block)
            factors = scales[chunk.blocks].unsqueeze(1)
            if self._is_rotated(chunk):
                rotated = codes * (factors / chunk.block)
                chunk.rows(ordered).copy_(hadamard_rows(rotated))
            else:
                torch.mul(codes, factors, out=chunk.rows(ordered))
        return blocks.restored(ordered)

    def _check_scales(self, scales: Tensor, where: str) -> None:
        low, high = (bound.item() for bound in torch.aminmax(scales))
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            raise NonFiniteError(f"{where}: a scale is NaN or infinite")
        if low < 0 or high > self._width.max_scale:
            raise CodecError(f"{where}: a scale lies outside 0 … {self._width.max_scale:.6g}")


class Int8Codec(IntegerCodec):
    """N = 64 costs 8.5 bits per value, 1.88 times less than bf16."""

    _width = _INT8


class Int4Codec(IntegerCodec):
    """N = 64 costs 4.25 bits per value, 3.76 times less than bf16."""

    _width = _INT4

    def __init__(self, grid: Grid | None = None) -> None:
        super().__init__(grid)
        assert self.grid.block % 2 == 0, "else a byte belongs to two chunks"

    def _code_bytes(self, count: int) -> int:
        return -(-count // 2)

    def _write_codes(self, codes: Tensor, out: Tensor, chunk: Chunk) -> None:
        halves = codes.add_(8)
        if halves.numel() % 2:
            halves = torch.cat([halves, halves.new_full((1,), 8)])
        pairs = halves.view(torch.int16)  # the second code in the upper byte
        pairs.bitwise_or_(pairs >> 4).bitwise_and_(0xFF)
        out[_bytes_of(chunk)].copy_(pairs)

    def _read_codes(self, stored: Tensor, chunk: Chunk) -> Tensor:
        pairs = stored[_bytes_of(chunk)].to(torch.int16)
        pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
        count = chunk.values.stop - chunk.values.start
        return pairs.view(torch.int8)[:count].sub_(8)

    def _check_codes(self, stored: Tensor, count: int, where: str) -> None:
        if not (stored & 0x0F).all() or stored.min().item() < 0x10:
            raise CodecError(f"{where}: code 0 is never written")
        if count % 2 and int(stored[-1].item()) >> 4 != 8:
            raise CodecError(f"{where}: the half byte after the last code is not 8")


def _bytes_of(chunk: Chunk) -> slice:
    return slice(chunk.values.start // 2, -(-chunk.values.stop // 2))
