# SPDX-License-Identifier: Apache-2.0
"""Codecs that cast: fp32 (lossless), bf16, fp16. The elements in row-major order, nothing else.

bf16 keeps fp32's range at 8 significant bits (relative error 2^-8 at most). fp16 has 11 (2^-11),
but a narrow range: above 65504 it refuses, and below 6e-5, where gradients often are, it loses
bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.compression.codec import CodecContext, Quantizer, Run, element_count, require_finite


class CastCodec(Quantizer):
    def __init__(self, spec: str, dtype: torch.dtype) -> None:
        self.spec = spec
        self._dtype = dtype

    def layout(self, shape: Sequence[int]) -> tuple[Run, ...]:
        return (Run(element_count(shape), self._dtype.itemsize),)

    def quantize(self, values: Tensor, context: CodecContext) -> Tensor:
        out = torch.empty(values.numel(), dtype=self._dtype)
        out.copy_(values.view(-1))
        # After the cast: a finite fp32 value may round to infinity in the narrower type.
        require_finite(out, f"encoding {context} as {self.spec} (or a value is beyond its range)")
        return out.view(torch.uint8)

    def dequantize(self, payload: Tensor, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        values = payload.view(self._dtype)
        require_finite(values, f"{self.spec} payload of {context}")
        return values.to(torch.float32)


def fp32() -> CastCodec:
    return CastCodec("fp32", torch.float32)


def bf16() -> CastCodec:
    return CastCodec("bf16", torch.bfloat16)


def fp16() -> CastCodec:
    return CastCodec("fp16", torch.float16)
