# SPDX-License-Identifier: Apache-2.0
"""The codec suite over every registered codec."""

import struct

import torch
from torch import Tensor

from shoal.compression.registry import codec_names

from .codec_suite import WireCodecSuite  # relative: plain `pytest` has no root on its path

SUBNORMAL = 2.0**-126


class TestFp32(WireCodecSuite):
    spec = "fp32"

    def error_bound(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def expected_bytes(self, count: int) -> int:
        return 4 * count


class TestBf16(WireCodecSuite):
    spec = "bf16"

    def error_bound(self, tensor: Tensor) -> Tensor:
        return tensor.double().abs() * 2.0**-8 + 2.0**-134

    def expected_bytes(self, count: int) -> int:
        return 2 * count

    def non_finite_encodings(self) -> list[bytes]:
        return [struct.pack("<H", bits) for bits in (0x7F80, 0xFF80, 0x7FC0)]


class TestFp16(WireCodecSuite):
    spec = "fp16"

    def error_bound(self, tensor: Tensor) -> Tensor:
        return tensor.double().abs() * 2.0**-11 + 2.0**-25

    def expected_bytes(self, count: int) -> int:
        return 2 * count

    def non_finite_encodings(self) -> list[bytes]:
        return [struct.pack("<e", value) for value in (float("nan"), float("inf"))]


class Int8Suite(WireCodecSuite):
    block: int

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Half a level of each block's own scale; a block below the smallest normal is zeros."""
        flat = tensor.double().reshape(-1)
        bound = torch.empty_like(flat)
        for start in range(0, flat.numel(), self.block):
            absmax = flat[start : start + self.block].abs().max()
            half_level = absmax / 254 * (1 + 2.0**-15)
            bound[start : start + self.block] = half_level + 127 * SUBNORMAL
        return bound.view(tensor.shape)

    def expected_bytes(self, count: int) -> int:
        num_blocks = len(range(0, count, self.block))
        return 4 * num_blocks + count


class TestInt8(Int8Suite):
    spec = "int8"
    block = 64


class TestInt8LargeBlocks(Int8Suite):
    spec = "int8:g256"
    block = 256


class TestInt8SmallBlocks(Int8Suite):
    spec = "int8:g8"
    block = 8


def test_every_registered_codec_runs_through_the_suite() -> None:
    pending = [WireCodecSuite]
    covered = set()
    while pending:
        suite = pending.pop()
        pending.extend(suite.__subclasses__())
        if hasattr(suite, "spec"):
            covered.add(suite.spec.partition(":")[0])
    assert covered == set(codec_names())
