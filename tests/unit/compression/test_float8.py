# SPDX-License-Identifier: Apache-2.0
"""Blockwise fp8: which format on which leg, scales, and payloads that no encoder writes."""

import dataclasses

import pytest
import torch

from shoal.compression.codec import CodecContext
from shoal.compression.float8 import Float8Codec
from shoal.protocol.errors import CodecError, NonFiniteError

FORWARD = CodecContext(run_seed=0, step=1, microbatch=0, boundary=0, leg="forward")
BACKWARD = dataclasses.replace(FORWARD, leg="backward")


def test_each_leg_has_its_own_format_unless_one_is_named() -> None:
    tensor = torch.randn(256, generator=torch.Generator().manual_seed(0))
    default, e4m3, e5m2 = Float8Codec(), Float8Codec(fmt="e4m3"), Float8Codec(fmt="e5m2")
    assert default.encode(tensor, FORWARD) == e4m3.encode(tensor, BACKWARD)
    assert default.encode(tensor, BACKWARD) == e5m2.encode(tensor, FORWARD)
    assert e4m3.encode(tensor, FORWARD) != e5m2.encode(tensor, FORWARD)


def test_layout_is_exponents_then_codes() -> None:
    # 448 is e4m3's largest: scale 2^0. 449 needs 2^1, and 449 / 2 rounds to 224.
    tensor = torch.tensor([448.0, 1, -1.125, 0, 0, 0, 0, 0, 449])
    payload = bytes(Float8Codec(8).encode(tensor, FORWARD))
    assert payload == bytes([127, 128, 0x7E, 0x38, 0xB9, 0, 0, 0, 0, 0, 0x76])


@pytest.mark.parametrize(("context", "finite"), [(FORWARD, 0x7F), (BACKWARD, 0x7C)])
def test_every_code_decodes_as_pytorch_converts_it(context: CodecContext, finite: int) -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F < finite], dtype=torch.uint8)
    dtype = torch.float8_e4m3fn if context.leg == "forward" else torch.float8_e5m2
    payload = bytes([127 + 3]) + bytes(codes.tolist())
    decoded = Float8Codec(256).decode(payload, (len(codes),), context)
    assert torch.equal(decoded, codes.view(dtype).to(torch.float32) * 8)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_powers_of_two_come_back_exactly(fmt: str) -> None:
    tensor = 2.0 ** torch.arange(-100, 127, 1.0)
    codec = Float8Codec(8, fmt)  # type: ignore[arg-type]
    assert torch.equal(codec.decode(codec.encode(tensor, FORWARD), (227,), FORWARD), tensor)


@pytest.mark.parametrize("context", [FORWARD, BACKWARD])
def test_subnormals_become_zero_whatever_stands_beside_them(context: CodecContext) -> None:
    tensor = torch.tensor([2.0**-126 - 2.0**-149, 0.0, 2.0**-120])
    decoded = Float8Codec().decode(Float8Codec().encode(tensor, context), (3,), context)
    assert decoded.tolist() == [0.0, 0.0, 2.0**-120]


def test_values_that_might_round_to_infinity_are_refused() -> None:
    Float8Codec().encode(torch.tensor([1.75 * 2.0**127]), FORWARD)
    with pytest.raises(NonFiniteError, match="beyond its range"):
        Float8Codec().encode(torch.tensor([1.76 * 2.0**127]), FORWARD)


@pytest.mark.parametrize(("context", "code"), [(FORWARD, 0x7F), (FORWARD, 0xFF), (BACKWARD, 0x7C)])
def test_codes_that_are_no_numbers_are_refused(context: CodecContext, code: int) -> None:
    with pytest.raises(NonFiniteError):
        Float8Codec().decode(bytes([127, 0x38, code]), (2,), context)


@pytest.mark.parametrize("exponent", [10, 247, 254])
def test_scale_that_no_encoder_writes_is_refused(exponent: int) -> None:
    with pytest.raises(CodecError, match="scale lies outside"):
        Float8Codec().decode(bytes([exponent, 0x38]), (1,), FORWARD)
