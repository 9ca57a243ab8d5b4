# SPDX-License-Identifier: Apache-2.0
"""The codec suite over every registered codec, and over chains of them."""

import math
import struct
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec import CodecContext, Quantizer, WireCodec
from shoal.compression.registry import codec_names, parse_boundary
from shoal.compression.spellings import BYTE_CODECS

from .codec_suite import FORWARD, WireCodecSuite, sample  # plain `pytest` has no root on its path

SUBNORMAL = 2.0**-126


class TestFp32(WireCodecSuite):
    spec = "fp32"

    def error_bound(self, tensor: Tensor, context: CodecContext) -> Tensor:
        return torch.zeros_like(tensor)

    def expected_bytes(self, shape: tuple[int, ...]) -> int:
        return 4 * math.prod(shape)


class TestBf16(WireCodecSuite):
    spec = "bf16"

    def error_bound(self, tensor: Tensor, context: CodecContext) -> Tensor:
        return tensor.double().abs() * 2.0**-8 + 2.0**-134

    def expected_bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * math.prod(shape)

    def non_finite_encodings(self) -> list[bytes]:
        return [struct.pack("<H", bits) for bits in (0x7F80, 0xFF80, 0x7FC0)]


class TestFp16(WireCodecSuite):
    spec = "fp16"

    def error_bound(self, tensor: Tensor, context: CodecContext) -> Tensor:
        return tensor.double().abs() * 2.0**-11 + 2.0**-25

    def expected_bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * math.prod(shape)

    def non_finite_encodings(self) -> list[bytes]:
        return [struct.pack("<e", value) for value in (float("nan"), float("inf"))]


# ---- blocks ------------------------------------------------------------------------------


def flat_blocks(shape: tuple[int, ...], block: int) -> Iterator[slice]:
    count = math.prod(shape)
    return (slice(start, min(start + block, count)) for start in range(0, count, block))


def channel_blocks(shape: tuple[int, ...], block: int) -> Iterator[slice]:
    """As slices of the row-major values."""
    width, count = shape[-1], math.prod(shape)
    step = width * block
    for channel in range(width):
        for start in range(channel, count, step):
            yield slice(start, min(start + step, count), width)


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64), matrix)
    return matrix


class IntegerSuite(WireCodecSuite):
    block = 64
    levels: int
    scale_bytes: int
    coarser = 1.0
    """How much larger than max|x| / levels a scale may be."""
    by_channel = False
    rotated = False
    stochastic = ("backward",)

    def blocks_of(self, shape: tuple[int, ...]) -> list[slice]:
        return list((channel_blocks if self.by_channel else flat_blocks)(shape, self.block))

    def error_bound(self, tensor: Tensor, context: CodecContext) -> Tensor:
        """Half a level of each block's own scale, or a whole one with stochastic rounding; a block
        below the smallest normal is zeros."""
        flat = tensor.double().reshape(-1)
        bound = torch.empty_like(flat)
        for block in self.blocks_of(tuple(tensor.shape)):
            values, lowest = flat[block], SUBNORMAL
            if self.rotated and len(values) == self.block:
                values, lowest = values @ hadamard(self.block), self.block * SUBNORMAL
            level = values.abs().max() / self.levels * self.coarser * (1 + 2.0**-15)
            part = 1 if context.leg in self.stochastic else 0.5
            bound[block] = level * part + self.levels * lowest
        return bound.view(tensor.shape)

    def code_bytes(self, count: int) -> int:
        return count

    def expected_bytes(self, shape: tuple[int, ...]) -> int:
        if 0 in shape:
            return 0
        num_blocks = len(self.blocks_of(shape))
        return self.scale_bytes * num_blocks + self.code_bytes(math.prod(shape))


class Int8Suite(IntegerSuite):
    levels, scale_bytes = 127, 4


class TestInt8(Int8Suite):
    spec = "int8"


class TestInt8LargeBlocks(Int8Suite):
    spec = "int8:g256"
    block = 256


class TestInt8SmallBlocks(Int8Suite):
    spec = "int8:g8"
    block = 8


class TestInt8ByChannel(Int8Suite):
    spec = "int8:g8:c"
    block, by_channel = 8, True


class TestInt8OddBlocksByChannel(Int8Suite):
    spec = "int8:g9:c"
    block, by_channel = 9, True


class TestInt8Rotated(Int8Suite):
    spec = "int8:g32:rot"
    block, rotated = 32, True


class TestInt8Stochastic(Int8Suite):
    spec = "int8:sr"
    stochastic = ("forward", "backward")


class TestInt8Nearest(Int8Suite):
    spec = "int8:rn"
    stochastic = ()


class Int4Suite(IntegerSuite):
    levels, scale_bytes, coarser = 7, 2, 1 + 2.0**-7

    def code_bytes(self, count: int) -> int:
        return math.ceil(count / 2)

    def non_finite_encodings(self) -> list[bytes]:
        return [struct.pack("<H", bits) for bits in (0x7F80, 0xFF80, 0x7FC0)]


class TestInt4(Int4Suite):
    spec = "int4"


class TestInt4ByChannel(Int4Suite):
    spec = "int4:g10:c"
    block, by_channel = 10, True


class TestInt4Rotated(Int4Suite):
    spec = "int4:g16:rot"
    block, rotated = 16, True


class TestInt4RotatedByChannelNearest(Int4Suite):
    spec = "int4:g8:c:rot:rn"
    block, by_channel, rotated, stochastic = 8, True, True, ()


class Float8Suite(WireCodecSuite):
    block = 64
    formats = ("e4m3", "e5m2")
    """(forward, backward)"""

    def error_bound(self, tensor: Tensor, context: CodecContext) -> Tensor:
        fmt = self.formats[context.leg == "backward"]
        relative, largest, least = {
            "e4m3": (2.0**-4, 448, 2.0**-9),
            "e5m2": (2.0**-3, 57344, 2.0**-16),
        }[fmt]
        flat = tensor.double().reshape(-1)
        bound = torch.empty_like(flat)
        for block in flat_blocks(tuple(tensor.shape), self.block):
            scale = 2 * flat[block].abs().max() / largest
            bound[block] = flat[block].abs() * relative + scale * least / 2 + SUBNORMAL
        return bound.view(tensor.shape)

    def expected_bytes(self, shape: tuple[int, ...]) -> int:
        return len(list(flat_blocks(shape, self.block))) + math.prod(shape)

    def non_finite_encodings(self) -> list[bytes]:
        return [b"\xff"]


class TestFp8(Float8Suite):
    spec = "fp8"


class TestFp8SmallBlocks(Float8Suite):
    spec = "fp8:g32:e4m3"
    block, formats = 32, ("e4m3", "e4m3")


class TestFp8WideRange(Float8Suite):
    spec = "fp8:e5m2"
    formats = ("e5m2", "e5m2")


# ---- top-k -------------------------------------------------------------------------------


class TopKSuite(WireCodecSuite):
    percent: int

    def kept(self, width: int) -> int:
        return math.ceil(width * self.percent / 100)

    def error_bound(self, tensor: Tensor, context: CodecContext) -> Tensor:
        """What isn't above the k-th largest may be lost; the others are cast to bf16."""
        rows = tensor.double().reshape(-1, tensor.shape[-1]).abs()
        kept = self.kept(rows.shape[1])
        threshold = rows.sort(dim=1, descending=True).values[:, kept - 1 : kept]
        bound = torch.where(rows > threshold, rows * 2.0**-8 + 2.0**-134, rows)
        return bound.view(tensor.shape)

    def expected_bytes(self, shape: tuple[int, ...]) -> int:
        return 0 if 0 in shape else math.prod(shape[:-1]) * self.kept(shape[-1]) * (2 + 2)

    def non_finite_encodings(self) -> list[bytes]:
        return [struct.pack("<H", bits) for bits in (0x7F80, 0xFF80, 0x7FC0)]

    def with_number(self, codec: WireCodec, number: bytes) -> bytes:
        payload = bytearray(codec.encode(sample((100,)), FORWARD))
        place = 2 * self.kept(100)
        payload[place : place + len(number)] = number
        return bytes(payload)


class TestTopK(TopKSuite):
    spec = "topk:10%"
    percent = 10


class TestTopKOfEverything(TopKSuite):
    spec = "topk:100%"
    percent = 100


# ---- chains ------------------------------------------------------------------------------


class Packed(WireCodecSuite):
    """Mixed into a quantizer's suite, before it: the same numbers, through byte codecs."""

    def inner(self) -> Quantizer:
        codec = parse_boundary(self.spec.partition("|")[0]).forward
        assert isinstance(codec, Quantizer)
        return codec

    def expected_bytes(self, shape: tuple[int, ...]) -> int | range:
        plain = super().expected_bytes(shape)  # type: ignore[safe-super]  # the quantizer's suite
        assert isinstance(plain, int)
        if "zstd" in self.spec:
            most = plain + plain // 256 + max(0, 131_072 - plain) // 2048
        elif "lz4" in self.spec:
            most = plain + plain // 255 + 16
        else:
            return plain
        return range(1, most + 1)

    def with_number(self, codec: WireCodec, number: bytes) -> bytes:
        plain = super().with_number(self.inner(), number)
        payload, layout = np.frombuffer(plain, dtype=np.uint8), self.inner().layout((100,))
        for part in self.spec.split("|")[1:]:
            name, *parameters = part.split(":")
            payload = BYTE_CODECS[name](parameters).pack(payload, layout)
        return payload.tobytes()

    def test_gives_the_bits_that_the_quantizer_alone_gives(self) -> None:
        tensor, inner = sample((3, 70, 8)), self.inner()
        codec = parse_boundary(self.spec).forward
        through = codec.decode(codec.encode(tensor, FORWARD), tensor.shape, FORWARD)
        alone = inner.decode(inner.encode(tensor, FORWARD), tensor.shape, FORWARD)
        assert torch.equal(through.view(torch.int32), alone.view(torch.int32))


class TestShuffledBf16(Packed, TestBf16):
    spec = "bf16|shuffle"


class TestShuffledCompressedBf16(Packed, TestBf16):
    spec = "bf16|shuffle|zstd:3"


class TestCompressedFp32(Packed, TestFp32):
    spec = "fp32|zstd:19"


class TestLz4Fp16(Packed, TestFp16):
    spec = "fp16|shuffle|lz4"


class TestCompressedInt8ByChannel(Packed, TestInt8ByChannel):
    spec = "int8:g8:c|zstd:1"


class TestLz4Int4(Packed, TestInt4):
    spec = "int4:g64|shuffle|lz4"


class TestCompressedRotatedInt4(Packed, TestInt4Rotated):
    spec = "int4:g16:rot|zstd:3"


class TestCompressedFp8(Packed, TestFp8):
    spec = "fp8:g64|zstd:3"


class TestCompressedTopK(Packed, TestTopK):
    spec = "topk:10%|shuffle|zstd:3"


def test_every_registered_codec_runs_through_the_suite() -> None:
    pending = [WireCodecSuite]
    covered = set()
    while pending:
        suite = pending.pop()
        pending.extend(suite.__subclasses__())
        if hasattr(suite, "spec"):
            covered.update(part.partition(":")[0] for part in suite.spec.split("|"))
    assert covered == set(codec_names())
