# SPDX-License-Identifier: Apache-2.0
"""What crosses a stage boundary, and how: the interface of codecs that keep no state.

A `WireCodec` turns one fp32 tensor into bytes and back, outside autograd. Learned codecs are
modules under autograd (learned/halves.py); what a sender's half emits still passes through a wire
codec. Both are deterministic: a replayed microbatch yields the same bytes.

Payloads are little-endian, like every machine Shoal runs on.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoal.protocol.errors import CodecError, NonFiniteError, WrongShapeError

Leg = Literal["forward", "backward"]
"""Activations go forward, gradients of the loss with respect to them go backward."""


@dataclass(frozen=True, slots=True)
class CodecContext:
    """Which tensor this is. Names the same tensor on both sides and in a replay, so that codecs
    may key randomness by it; who computes or how often is not part of it."""

    run_seed: int
    step: int
    microbatch: int
    boundary: int
    """Boundary b lies between stages b and b+1, on both legs."""
    leg: Leg


class WireCodec(ABC):
    """fp32 tensor to bytes and back. Stateless and thread-safe; subclasses fill in `_encode`,
    `_decode` and `encoded_bytes`, which never see an empty tensor or a payload of wrong length.
    """

    spec: str
    """Canonical spelling, such as "int8:g64"; both sides must agree on it."""

    @property
    def version(self) -> int:
        """Of the codec's state; 0 for codecs without any."""
        return 0

    def encode(self, tensor: Tensor, context: CodecContext) -> memoryview:
        """Read-only bytes, exactly `encoded_bytes(tensor.shape)` many, that share no memory with
        `tensor`. Takes any strides, device and floating dtype; fp32 is what the result stands for.

        Raises `NonFiniteError` for NaN, infinity, and values beyond the codec's range.
        """
        if not tensor.is_floating_point():
            raise CodecError(f"codec {self.spec} takes floating tensors, got {tensor.dtype}")
        if tensor.numel() == 0:
            return memoryview(b"")
        flat = tensor.detach().to(torch.float32).contiguous().view(-1)
        return self._encode(flat, context).numpy().data.toreadonly()

    def decode(
        self,
        payload: bytes | bytearray | memoryview,
        shape: Sequence[int],
        context: CodecContext,
        *,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """A contiguous fp32 tensor of `shape` in memory of its own, aligned as torch aligns it:
        kernels may give other bits at other alignments.

        `shape` comes from the plan, `payload` from a peer. Raises `CodecError` for a payload that
        no encoder writes for this shape, `NonFiniteError` for one with NaN or infinity in it.
        """
        expected = self.encoded_bytes(shape)
        view = memoryview(payload).cast("B")
        if view.nbytes != expected:
            raise CodecError(
                f"codec {self.spec}: {view.nbytes} bytes for shape {tuple(shape)}, which takes "
                f"exactly {expected}; the sender runs another codec, or the payload is damaged"
            )
        if expected == 0:
            return torch.empty(tuple(shape), dtype=torch.float32, device=device)
        staging = torch.empty(expected, dtype=torch.uint8)
        np.copyto(staging.numpy(), np.frombuffer(view, dtype=np.uint8))
        flat = self._decode(staging.to(device), element_count(shape), context)
        return flat.view(tuple(shape))

    @abstractmethod
    def encoded_bytes(self, shape: Sequence[int]) -> int:
        """The exact payload length for a tensor of `shape`: what a receiver accepts."""

    @abstractmethod
    def _encode(self, flat: Tensor, context: CodecContext) -> Tensor:
        """`flat` is contiguous fp32 on any device; the result is a new uint8 CPU tensor."""

    @abstractmethod
    def _decode(self, payload: Tensor, count: int, context: CodecContext) -> Tensor:
        """`payload` is a uint8 tensor on the target device that belongs to the callee; the result
        holds `count` fp32 values there."""


def element_count(shape: Sequence[int]) -> int:
    if any(extent < 0 for extent in shape):
        raise WrongShapeError(f"shape {tuple(shape)} has a negative extent")
    return math.prod(shape)


def require_finite(tensor: Tensor, what: str) -> None:
    """Raise `NonFiniteError` naming `what`. One pass without a temporary: the extremes carry NaN
    and infinity."""
    low, high = torch.aminmax(tensor)
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise NonFiniteError(f"{what}: NaN or infinity")
