# SPDX-License-Identifier: Apache-2.0
"""Blockwise fp8: N values share a power of two, each is an 8-bit float times it.

e4m3 (`torch.float8_e4m3fn`: 4 significant bits, to 448) on the forward leg, e5m2 (3 bits, to
57344) on the backward leg, unless one is named; Micikevicius et al., "FP8 formats for deep
learning", arXiv 2209.05433. Within a block large and small values keep the same relative error, of
2^-4 or 2^-3, where int8 has one absolute error for all.

The scale is 2^k, k the smallest with max|x| / 2^k within the format; k + 127 is one byte, as in
the OCP microscaling formats' E8M0. A power of two suffices, since the codes have exponents of their
own: 8.125 bits a value at N = 64. Values round to nearest even, on both legs.

Payload: one byte per block, then n codes (row-major; the last block may be shorter).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from shoal.compression.blocks import Blocks
from shoal.compression.codec import CodecContext, Quantizer, Run
from shoal.protocol.errors import CodecError, NonFiniteError

DEFAULT_BLOCK = 64
MIN_BLOCK, MAX_BLOCK = 8, 65_536

Format = Literal["e4m3", "e5m2"]

_BIAS = 127
_NAN_SCALE = 255
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_TOP_EXPONENT = {"e4m3": 8, "e5m2": 15}
"""Both formats' largest number is 1.75 times two to this."""
_LEAST_K = {"e4m3": -116, "e5m2": -109}
"""With it, what is subnormal in fp32 (flushed to zero by some devices) becomes zero on all."""
_MOST_K = {fmt: 127 - top for fmt, top in _TOP_EXPONENT.items()}
_LIMIT = 1.75 * 2.0**127
"""Larger values are refused: some of them would round to infinity at the receiver."""


class Float8Codec(Quantizer):
    def __init__(self, block: int = DEFAULT_BLOCK, fmt: Format | None = None) -> None:
        """`fmt` is None for each leg's own."""
        assert MIN_BLOCK <= block <= MAX_BLOCK
        self.block = block
        self._format = fmt
        self.spec = f"fp8:g{block}" + (f":{fmt}" if fmt else "")

    def layout(self, shape: Sequence[int]) -> tuple[Run, ...]:
        blocks = self._blocks(shape)
        return Run(blocks.num_blocks, 1), Run(blocks.count, 1)

    def _blocks(self, shape: Sequence[int]) -> Blocks:
        return Blocks.of(shape, self.block, by_channel=False)

    def _format_for(self, context: CodecContext) -> Format:
        return self._format or ("e4m3" if context.leg == "forward" else "e5m2")

    def quantize(self, values: Tensor, context: CodecContext) -> Tensor:
        fmt, blocks, device = self._format_for(context), self._blocks(values.shape), values.device
        out = torch.empty(blocks.num_blocks + blocks.count, dtype=torch.uint8, device=device)
        scales, codes = out[: blocks.num_blocks], out[blocks.num_blocks :].view(_DTYPES[fmt])
        flat = values.view(-1)
        absmax = torch.empty(blocks.num_blocks, dtype=torch.float32, device=device)
        for chunk in blocks.chunks(device):
            rows, largest = chunk.rows(flat), absmax[chunk.blocks]
            torch.amax(rows.abs(), dim=1, out=largest)  # carries NaN and infinity
            k = _exponents(largest, fmt)
            scales[chunk.blocks] = (k + _BIAS).to(torch.uint8)
            scaled = rows * _power_of_two(-k).unsqueeze(1)
            codes[chunk.values].copy_(scaled.view(-1))
        if not (absmax <= _LIMIT).all():
            raise NonFiniteError(
                f"encoding {context} as {self.spec}: NaN, infinity or a value beyond its range"
            )
        return out.cpu()

    def dequantize(self, payload: Tensor, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        fmt, blocks = self._format_for(context), self._blocks(shape)
        where = f"{self.spec} payload of {context}"
        scales, codes = payload[: blocks.num_blocks], payload[blocks.num_blocks :]
        smallest, largest = scales.min().item(), scales.max().item()
        if largest == _NAN_SCALE:
            raise NonFiniteError(f"{where}: a scale is NaN")
        low, high = _LEAST_K[fmt], _MOST_K[fmt]
        if smallest < low + _BIAS or largest > high + _BIAS:
            raise CodecError(f"{where}: a scale lies outside 2^{low} … 2^{high}")
        if ((codes & 0x7F) >= (0x7F if fmt == "e4m3" else 0x7C)).any():
            raise NonFiniteError(f"{where}: NaN or infinity")
        # e4m3 is read as 2^-8 of its value; k + 8 is 127 at most.
        shift = 8 if fmt == "e4m3" else 0
        factors = _power_of_two(scales.to(torch.int32) - _BIAS + shift)
        out = torch.empty(blocks.count, dtype=torch.float32, device=payload.device)
        for chunk in blocks.chunks(payload.device):
            numbers = _as_fp16(chunk.rows(codes), fmt)
            torch.mul(numbers, factors[chunk.blocks].unsqueeze(1), out=chunk.rows(out))
        return out


def _exponents(absmax: Tensor, fmt: Format) -> Tensor:
    """int32 [blocks]: the smallest k with absmax / 2^k <= 1.75 · 2^top, by the bits of absmax."""
    bits = absmax.view(torch.int32)
    exponent = (bits >> 23) - _BIAS
    above = (bits & 0x7FFFFF) > 0x600000  # a significand over 1.75
    k = exponent + above - _TOP_EXPONENT[fmt]
    return k.clamp_(_LEAST_K[fmt], _MOST_K[fmt])


def _as_fp16(codes: Tensor, fmt: Format) -> Tensor:
    """uint8 -> fp16 of the same value (e5m2), or of 2^-8 of it (e4m3); exact, subnormals too.

    e5m2 is fp16's upper half. e4m3's exponent is a bit shorter, its bias 8 less. PyTorch's own
    conversions give the same, but take several times as long on a CPU.
    """
    if fmt == "e5m2":
        return (codes.to(torch.int16) << 8).view(torch.float16)
    wide = codes.view(torch.int8).to(torch.int16)  # the sign stands in the upper byte
    return ((wide << 7).bitwise_and_(0x3F80) | (wide & -0x8000)).view(torch.float16)


def _power_of_two(k: Tensor) -> Tensor:
    """fp32 2^k for int32 k from -126 to 127, exactly."""
    return ((k + _BIAS) << 23).view(torch.float32)
