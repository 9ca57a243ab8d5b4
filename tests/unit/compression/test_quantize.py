# SPDX-License-Identifier: Apache-2.0
"""Blockwise int8: layout, rounding, and payloads that no encoder writes."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.codec import CodecContext
from shoal.compression.quantize import Int8Codec
from shoal.protocol.errors import CodecError

CONTEXT = CodecContext(run_seed=0, step=1, microbatch=0, boundary=0, leg="backward")


def test_layout_is_scales_then_codes_with_a_short_last_block() -> None:
    codec = Int8Codec(8)
    tensor = torch.tensor([127.0, -127, 1, -1, 0.4, 0.6, 0, 2, 254, 127])
    payload = bytes(codec.encode(tensor, CONTEXT))
    # 127 / 2 = 63.5 is a tie and goes to the even 64.
    assert payload == struct.pack("<2f10b", 1.0, 2.0, 127, -127, 1, -1, 0, 1, 0, 2, 127, 64)


def test_blocks_do_not_influence_each_other() -> None:
    codec = Int8Codec(8)
    tensor = torch.cat([torch.full((8,), 1e-6), torch.full((8,), 1e6)])
    decoded = codec.decode(codec.encode(tensor, CONTEXT), (16,), CONTEXT)
    torch.testing.assert_close(decoded, tensor, rtol=1e-6, atol=0)


def test_block_below_the_smallest_normal_scale_is_sent_as_zeros() -> None:
    codec = Int8Codec(8)
    payload = codec.encode(torch.full((8,), 1e-37), CONTEXT)
    assert bytes(payload) == bytes(4 + 8)


@pytest.mark.parametrize("scale", [-1.0, 2.7e36])
def test_scale_that_no_encoder_writes_is_refused(scale: float) -> None:
    payload = struct.pack("<f3b", scale, 1, 2, 3)
    with pytest.raises(CodecError, match="scale lies outside"):
        Int8Codec(8).decode(payload, (3,), CONTEXT)


def test_code_that_no_encoder_writes_is_refused() -> None:
    with pytest.raises(CodecError, match="-128"):
        Int8Codec(8).decode(struct.pack("<f3b", 1.0, 1, -128, 3), (3,), CONTEXT)


def test_int8_costs_less_than_bf16_by_the_stated_ratio() -> None:
    count = 64 * 1000
    assert 2 * count / Int8Codec(64).encoded_bytes((count,)) == pytest.approx(1.882, abs=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40
    )
)
def test_any_finite_tensor_comes_back_within_half_a_level(values: list[float]) -> None:
    codec = Int8Codec(16)
    tensor = torch.tensor(values, dtype=torch.float32)
    decoded = codec.decode(codec.encode(tensor, CONTEXT), tensor.shape, CONTEXT)
    for start in range(0, len(values), 16):
        block = tensor[start : start + 16].double()
        error = (decoded[start : start + 16].double() - block).abs().max()
        assert error <= block.abs().max() / 254 * (1 + 1e-4) + 127 * 2.0**-126
