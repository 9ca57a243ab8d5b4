# SPDX-License-Identifier: Apache-2.0
"""Blockwise int8: N consecutive values of the flattened tensor share one fp32 scale.

Symmetric absmax: scale = max|x| / 127, q = round(x / scale), x̂ = q · scale, so that
|x - x̂| <= scale / 2. The last block may be shorter. Both legs round to nearest even: the bytes are
a function of the tensor alone. Scales are fp32 because gradients of 1e-6 underflow in fp16.

Payload: ceil(n / N) scales (fp32), then n codes (int8 from -127 to 127; -128 is never written).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.compression.codec import CodecContext, WireCodec, element_count
from shoal.protocol.errors import CodecError, NonFiniteError

DEFAULT_BLOCK = 64
MIN_BLOCK, MAX_BLOCK = 8, 65_536

_LEVELS = 127
_SCALE_BYTES = 4
_MIN_SCALE = 2.0**-126
"""The smallest normal fp32. A smaller scale would be subnormal, which some devices flush to zero:
such a block is sent as zeros, for all devices alike."""
_MAX_SCALE = float.fromhex("0x1.020406p+121")
"""The largest fp32 whose product with 127 is finite."""


class Int8Codec(WireCodec):
    """`block` is N; 64 costs 1 + 4/64 bytes per value, 1.88 times less than bf16."""

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        assert MIN_BLOCK <= block <= MAX_BLOCK
        self.block = block
        self.spec = f"int8:g{block}"

    def encoded_bytes(self, shape: Sequence[int]) -> int:
        count = element_count(shape)
        return _SCALE_BYTES * self._num_blocks(count) + count

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _whole(self, count: int) -> tuple[int, int]:
        """How many blocks are full, and how many values these cover."""
        full = count // self.block
        return full, full * self.block

    def _encode(self, flat: Tensor, context: CodecContext) -> Tensor:
        count = flat.numel()
        scale_bytes = _SCALE_BYTES * self._num_blocks(count)
        out = torch.empty(scale_bytes + count, dtype=torch.uint8)
        scales, codes = out[:scale_bytes].view(torch.float32), out[scale_bytes:].view(torch.int8)
        full, split = self._whole(count)
        finite = True
        if full:
            finite = _quantize(flat[:split].view(full, self.block), scales[:full], codes[:split])
        if finite and split < count:
            finite = _quantize(flat[split:].view(1, -1), scales[full:], codes[split:])
        if not finite:
            raise NonFiniteError(f"encoding {context} as {self.spec}: NaN or infinity")
        return out

    def _decode(self, payload: Tensor, count: int, context: CodecContext) -> Tensor:
        scale_bytes = _SCALE_BYTES * self._num_blocks(count)
        scales = payload[:scale_bytes].view(torch.float32)
        codes = payload[scale_bytes:].view(torch.int8)
        if not torch.isfinite(scales).all():
            raise NonFiniteError(f"{self.spec} payload of {context}: a scale is NaN or infinite")
        if scales.min().item() < 0 or scales.max().item() > _MAX_SCALE:
            raise CodecError(
                f"{self.spec} payload of {context}: a scale lies outside 0 … {_MAX_SCALE:.6g}"
            )
        if codes.min().item() < -_LEVELS:
            raise CodecError(f"{self.spec} payload of {context}: code -128 is never written")
        out = torch.empty(count, dtype=torch.float32, device=payload.device)
        full, split = self._whole(count)
        if full:
            body = codes[:split].view(full, self.block)
            torch.mul(body, scales[:full].unsqueeze(1), out=out[:split].view(full, self.block))
        if split < count:
            torch.mul(codes[split:], scales[full:], out=out[split:])
        return out


def _quantize(blocks: Tensor, scales_out: Tensor, codes_out: Tensor) -> bool:
    """blocks [n, block] fp32 -> scales [n] fp32, codes [n * block] int8. False, with nothing
    written, when a value is not finite."""
    absmax = blocks.abs().amax(dim=1)  # carries NaN and infinity
    if not torch.isfinite(absmax).all():
        return False
    scales = (absmax / _LEVELS).clamp_(max=_MAX_SCALE)
    scales = torch.where(scales < _MIN_SCALE, 0.0, scales)
    divisors = torch.where(scales == 0, 1.0, scales)
    # No clamp to ±127: max|x| / scale is 127 within two roundings, which rounds to 127.
    codes_out.copy_((blocks / divisors.unsqueeze(1)).round_().view(-1))
    scales_out.copy_(scales)
    return True
