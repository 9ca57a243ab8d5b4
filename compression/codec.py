# SPDX-License-Identifier: Apache-2.0
"""What crosses a stage boundary, and how: the two interfaces that every codec implements.

A `WireCodec` turns one fp32 tensor into bytes and back, outside autograd. A `GraphCodec` is a pair
of modules under autograd with parameters of its own; what its sender half emits still passes
through a wire codec. Both are deterministic: a replayed microbatch yields the same bytes.

Payloads are little-endian, like every machine Shoal runs on.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

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


# ---- learned codecs ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SyncMessage:
    """What the two halves of a learned codec tell each other once per optimizer step: a gradient
    on its way to the owner, or the owner's new value on its way back. Named tensors, bounded and
    checked against the spec like any tensor on the wire."""

    boundary: int
    name: str
    version: int
    tensor: Tensor


class GraphCodec(Protocol):
    """A learned codec: narrows the residual stream before it is quantized, widens it after.

    The halves live on the two sides of a boundary and run under autograd. Each half's parameters
    are parameters of the stage that runs it: that stage's optimizer, digests, reductions and
    snapshots contain them. What both halves need (a projection A: z = x A, x̂ = z Aᵀ) belongs to
    the *sender's* stage; the receiver's part of its gradient returns through `step_export`, once
    per step, and is summed in fixed point like every other gradient.
    """

    spec: str

    @property
    def version(self) -> int:
        """Committed steps contained in the parameters. Travels with every tensor; a microbatch's
        backward uses the version that its forward used."""

    @property
    def width(self) -> int:
        """Values per token on the wire."""

    @property
    def needs_token_ids(self) -> bool:
        """Whether the halves read the microbatch's token ids (anchor embeddings do)."""

    def sender(self) -> nn.Module:
        """(hidden [B, T, dim], token ids [B, T] or None) -> narrow [B, T, width]."""

    def receiver(self) -> nn.Module:
        """(narrow [B, T, width], token ids [B, T] or None) -> hidden [B, T, dim]."""

    def step_export(self) -> Sequence[SyncMessage]:
        """What the other side must hear of this step."""

    def step_import(self, messages: Sequence[SyncMessage]) -> None:
        """Take in what the other side exported; refuses other versions with `WrongCodecError`."""
