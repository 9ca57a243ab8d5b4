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

from shoal.protocol.errors import (
    CodecError,
    NonFiniteError,
    OversizedStreamError,
    WrongShapeError,
)

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
    """fp32 tensor to bytes and back. Stateless and thread-safe; subclasses fill in the abstract
    methods, of which `_encode` and `_decode` never see an empty tensor or an impossible length.
    """

    spec: str
    """Canonical spelling, such as "int8:g64"; both sides must agree on it."""

    @property
    def version(self) -> int:
        """Of the codec's state; 0 for codecs without any."""
        return 0

    def encode(self, tensor: Tensor, context: CodecContext) -> memoryview:
        """Read-only bytes that share no memory with `tensor`; as many as `encoded_bytes` and
        `max_encoded_bytes` say. Takes any strides, device and floating dtype; fp32 is what the
        result stands for.

        Raises `NonFiniteError` for NaN, infinity, and values beyond the codec's range.
        """
        if not tensor.is_floating_point():
            raise CodecError(f"codec {self.spec} takes floating tensors, got {tensor.dtype}")
        if tensor.numel() == 0:
            return memoryview(b"")
        return self._encode(tensor.detach().to(torch.float32).contiguous(), context)

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
        Allocates no more than the shape's own size and a few times `max_encoded_bytes`, whatever
        the payload says.
        """
        view = memoryview(payload).cast("B")
        self._check_length(view.nbytes, shape)
        if element_count(shape) == 0:
            return torch.empty(tuple(shape), dtype=torch.float32, device=device)
        return self._decode(view, tuple(shape), context, torch.device(device)).view(tuple(shape))

    @abstractmethod
    def encoded_bytes(self, shape: Sequence[int]) -> int | None:
        """The exact payload length for a tensor of `shape`; None where it depends on the data."""

    @abstractmethod
    def max_encoded_bytes(self, shape: Sequence[int]) -> int:
        """The longest payload for a tensor of `shape`, whatever the data: what a receiver accepts
        at most, and what memory is planned by. Equals `encoded_bytes` where that exists."""

    def admitted_bytes(self, shape: Sequence[int], announced: int) -> int:
        """The payload length that a receiver expects of a sender who announces so many bytes.

        Raises `OversizedStreamError` for more than any encoder writes (or none at all), where the
        length depends on the data; elsewhere it is the exact one, whatever was announced."""
        exact, most = self.encoded_bytes(shape), self.max_encoded_bytes(shape)
        if exact is not None:
            return exact
        if not 0 < announced <= most:
            raise OversizedStreamError(
                f"payload of {announced} bytes announced; {self.spec} takes 1 to {most} for shape "
                f"{tuple(shape)}"
            )
        return announced

    def _check_length(self, length: int, shape: Sequence[int]) -> None:
        exact, most = self.encoded_bytes(shape), self.max_encoded_bytes(shape)
        if length == exact or (exact is None and 0 < length <= most):
            return
        raise CodecError(
            f"codec {self.spec}: {length} bytes for shape {tuple(shape)}, which takes "
            f"{'at most' if exact is None else 'exactly'} {most}; the sender runs another codec, "
            "or the payload is damaged"
        )

    @abstractmethod
    def _encode(self, values: Tensor, context: CodecContext) -> memoryview:
        """`values` is contiguous fp32 on any device, and may be the caller's: it is only read."""

    @abstractmethod
    def _decode(
        self,
        payload: memoryview,
        shape: tuple[int, ...],
        context: CodecContext,
        device: torch.device,
    ) -> Tensor:
        """Contiguous fp32 values on `device`, in row-major order."""


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of a payload: `count` items of `item_bytes` each."""

    count: int
    item_bytes: int


class Quantizer(WireCodec):
    """A wire codec whose payload's length and layout follow from the shape alone. What byte codecs
    build upon; on its own it is a chain of one."""

    @abstractmethod
    def layout(self, shape: Sequence[int]) -> tuple[Run, ...]:
        """What the payload consists of, in order."""

    @abstractmethod
    def quantize(self, values: Tensor, context: CodecContext) -> Tensor:
        """Contiguous fp32 values of any shape, on any device, not empty -> a new uint8 CPU tensor,
        laid out as `layout` says. The bytes don't depend on device or threads."""

    @abstractmethod
    def dequantize(self, payload: Tensor, shape: tuple[int, ...], context: CodecContext) -> Tensor:
        """`payload` is a uint8 tensor of the exact length on the target device that belongs to the
        callee; the result holds fp32 values there, in row-major order. Raises as `decode` does."""

    def encoded_bytes(self, shape: Sequence[int]) -> int:
        return sum(run.count * run.item_bytes for run in self.layout(shape))

    def max_encoded_bytes(self, shape: Sequence[int]) -> int:
        return self.encoded_bytes(shape)

    def _encode(self, values: Tensor, context: CodecContext) -> memoryview:
        return self.quantize(values, context).numpy().data.toreadonly()

    def _decode(
        self,
        payload: memoryview,
        shape: tuple[int, ...],
        context: CodecContext,
        device: torch.device,
    ) -> Tensor:
        staging = torch.empty(payload.nbytes, dtype=torch.uint8)
        np.copyto(staging.numpy(), np.frombuffer(payload, dtype=np.uint8))
        return self.dequantize(staging.to(device), shape, context)


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
