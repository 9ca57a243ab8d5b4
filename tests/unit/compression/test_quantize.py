# SPDX-License-Identifier: Apache-2.0
"""Blockwise int8 and int4: layout, rounding, and payloads that no encoder writes."""

import dataclasses
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import blocks
from shoal.compression.codec import CodecContext
from shoal.compression.quantize import Grid, Int4Codec, Int8Codec, IntegerCodec
from shoal.compression.rotation import hadamard_rows
from shoal.protocol.errors import CodecError, NonFiniteError

FORWARD = CodecContext(run_seed=0, step=1, microbatch=0, boundary=0, leg="forward")
BACKWARD = dataclasses.replace(FORWARD, leg="backward")


def int8(block: int, **parameters: object) -> Int8Codec:
    return Int8Codec(Grid(block=block, **parameters))  # type: ignore[arg-type]


def int4(block: int, **parameters: object) -> Int4Codec:
    return Int4Codec(Grid(block=block, **parameters))  # type: ignore[arg-type]


def through(codec: IntegerCodec, tensor: torch.Tensor, context: CodecContext) -> torch.Tensor:
    return codec.decode(codec.encode(tensor, context), tensor.shape, context)


# ---- layout ------------------------------------------------------------------------------


def test_int8_is_scales_then_codes_with_a_short_last_block() -> None:
    tensor = torch.tensor([127.0, -127, 1, -1, 0.4, 0.6, 0, 2, 254, 127])
    payload = bytes(int8(8).encode(tensor, FORWARD))
    # 127 / 2 = 63.5 is a tie and goes to the even 64.
    assert payload == struct.pack("<2f10b", 1.0, 2.0, 127, -127, 1, -1, 0, 1, 0, 2, 127, 64)


def test_int4_is_scales_then_two_codes_a_byte_the_first_in_the_low_half() -> None:
    tensor = torch.tensor([7.0, -7, 1, -1, 0.4, 0.6, 0, 2, 14.0, -2, 4])
    payload = bytes(int4(8).encode(tensor, FORWARD))
    codes = [7, -7, 1, -1, 0, 1, 0, 2, 7, -1, 2, 0]  # the last fills up
    halves = [code + 8 for code in codes]
    pairs = bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True))
    assert payload == struct.pack("<2H", 0x3F80, 0x4000) + pairs


def test_int4_scales_round_up_so_that_no_code_clips() -> None:
    # 1.001 lies between the bf16 numbers 1 and 1 + 2^-7.
    payload = bytes(int4(8).encode(torch.full((8,), 7 * 1.001), FORWARD))
    assert payload[:2] == struct.pack("<H", 0x3F81)
    decoded = through(int4(8), torch.full((8,), 7 * 1.001), FORWARD)
    assert decoded.tolist() == [7 * (1 + 2.0**-7)] * 8


def test_channels_follow_each_other_in_the_payload() -> None:
    # Two channels of ten tokens: the bodies of eight, then the tails of two.
    tokens = torch.stack([torch.arange(10.0), 100 * torch.arange(10.0)], dim=1)
    tokens[7, 0], tokens[7, 1] = 127, 12_700
    payload = bytes(int8(8, by_channel=True).encode(tokens, FORWARD))
    scales = struct.unpack("<4f", payload[:16])
    assert scales == pytest.approx((1, 100, 9 / 127, 900 / 127))
    codes = struct.unpack("<20b", payload[16:])
    assert codes[:8] == codes[8:16] == (0, 1, 2, 3, 4, 5, 6, 127)
    assert codes[16:] == (113, 127, 113, 127)


def test_blocks_do_not_influence_each_other() -> None:
    tensor = torch.cat([torch.full((8,), 1e-6), torch.full((8,), 1e6)])
    torch.testing.assert_close(through(int8(8), tensor, FORWARD), tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", [int8(8), int4(8), int8(8, rotated=True)])
def test_block_below_the_smallest_normal_scale_is_sent_as_zeros(codec: IntegerCodec) -> None:
    tensor = torch.full((8,), 1e-38)
    assert not through(codec, tensor, FORWARD).any()
    scale_bytes = codec.layout((8,))[0].item_bytes
    assert bytes(codec.encode(tensor, FORWARD))[:scale_bytes] == bytes(scale_bytes)


@pytest.mark.parametrize(
    ("codec", "ratio"), [(int8(64), 1.882), (int4(64), 3.765), (int4(64, by_channel=True), 3.765)]
)
def test_ratio_to_bf16_is_the_stated_one(codec: IntegerCodec, ratio: float) -> None:
    """Also in a tensor of width 8: a scale for 64 tokens of a channel, not for every token."""
    shape = (2, 512, 8)
    bytes_sent = len(codec.encode(torch.ones(shape), FORWARD))
    assert 2 * 2 * 512 * 8 / bytes_sent == pytest.approx(ratio, abs=1e-3)


# ---- rounding ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40
    )
)
def test_any_finite_tensor_comes_back_within_half_a_level(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    for codec, levels, coarser in ((int8(16), 127, 1.0), (int4(16), 7, 1 + 2.0**-7)):
        decoded = through(codec, tensor, FORWARD)
        for start in range(0, len(values), 16):
            block = tensor[start : start + 16].double()
            error = (decoded[start : start + 16].double() - block).abs().max()
            half_level = block.abs().max() / (2 * levels) * coarser * (1 + 1e-4)
            assert error <= half_level + levels * 2.0**-126


@pytest.mark.parametrize("codec", [int8(64), int4(64), int4(64, rotated=True)])
def test_stochastic_rounding_has_no_bias(codec: IntegerCodec) -> None:
    """Over 4,096 draws the mean error of every element lies within 6 standard deviations: a
    level's half, at most, over the root of 4,096; plus the stated 2^-16 of a level."""
    block = torch.randn(64, generator=torch.Generator().manual_seed(0))
    tensor, total = block.repeat(64), torch.zeros(64, dtype=torch.float64)
    for microbatch in range(64):
        decoded = through(codec, tensor, dataclasses.replace(BACKWARD, microbatch=microbatch))
        total += decoded.view(64, 64).double().sum(dim=0)
    error = (total / 4_096 - block.double()).abs().max().item()
    grid = codec.grid
    # Rotated, an element's error is the sum of 64 codes' errors over 64: smaller still.
    rotated = hadamard_rows(block.view(1, 64)) if grid.rotated else block
    level = rotated.abs().max().item() / (127 if isinstance(codec, Int8Codec) else 7)
    spread = level * (1 + 2.0**-7) * 0.5 / (8 if grid.rotated else 1)
    assert error < 6 * spread / 64 + level * 2.0**-16
    nearest = through(type(codec)(dataclasses.replace(grid, rounding="nearest")), block, BACKWARD)
    assert (nearest.double() - block.double()).abs().max().item() > 3 * error  # it can see a bias


def test_each_leg_has_its_own_rounding_unless_one_is_named() -> None:
    tensor = torch.randn(256, generator=torch.Generator().manual_seed(1))
    default, nearest = int8(64), int8(64, rounding="nearest")
    stochastic = int8(64, rounding="stochastic")
    assert default.encode(tensor, FORWARD) == nearest.encode(tensor, FORWARD)
    assert default.encode(tensor, BACKWARD) == stochastic.encode(tensor, BACKWARD)
    assert nearest.encode(tensor, BACKWARD) == nearest.encode(tensor, FORWARD)
    assert stochastic.encode(tensor, BACKWARD) != stochastic.encode(tensor, FORWARD)


def test_whole_levels_are_never_moved_by_stochastic_rounding() -> None:
    tensor = torch.arange(-127.0, 128).repeat(8)
    assert torch.equal(through(int8(255, rounding="stochastic"), tensor, BACKWARD), tensor)


def test_largest_value_never_rounds_beyond_the_largest_code() -> None:
    """Its quotient may be 127 and one bit more; the largest random number then makes it 128."""
    candidates = torch.rand(1000, generator=torch.Generator().manual_seed(6)) + 1
    over = candidates[candidates / (candidates / 127) > 127]
    tensor = torch.cat([over[0].repeat(1 << 18), -over[0].repeat(1 << 18)])
    codes = int8(64).encode(tensor, BACKWARD)[4 * (1 << 13) :].cast("b")
    assert set(codes.tolist()) == {127, -127}


def test_another_microbatch_rounds_otherwise_and_the_same_one_alike() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    other = dataclasses.replace(BACKWARD, microbatch=1)
    assert int8(64).encode(tensor, BACKWARD) == int8(64).encode(tensor, BACKWARD)
    assert int8(64).encode(tensor, BACKWARD) != int8(64).encode(tensor, other)


@pytest.mark.parametrize(
    "codec",
    [int8(9), int8(10, by_channel=True), int4(10), int4(10, by_channel=True),
     int4(16, rotated=True)],
    ids=lambda codec: codec.spec,
)  # fmt: skip
def test_bytes_do_not_depend_on_chunks(
    codec: IntegerCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(3, 37, 11, generator=torch.Generator().manual_seed(3))
    payloads, decoded = set(), []
    for whole in (1, 40, 1 << 20):
        monkeypatch.setattr(blocks, "_CPU_CHUNK", whole)
        payload = bytes(codec.encode(tensor, BACKWARD))
        payloads.add(payload)
        decoded.append(codec.decode(payload, tensor.shape, BACKWARD))
    assert len(payloads) == 1
    assert torch.equal(decoded[0], decoded[1])
    assert torch.equal(decoded[0], decoded[2])


# ---- what the options are for ------------------------------------------------------------


def error_of(codec: IntegerCodec, tensor: torch.Tensor) -> float:
    return ((through(codec, tensor, FORWARD) - tensor).norm() / tensor.norm()).item()


def test_scales_by_channel_help_narrow_tensors_with_channels_of_many_sizes() -> None:
    generator = torch.Generator().manual_seed(4)
    tensor = torch.randn(4, 128, 8, generator=generator) * torch.logspace(-3, 0, 8)
    small = tensor[..., :4]

    def lost(codec: IntegerCodec) -> float:
        return ((through(codec, tensor, FORWARD)[..., :4] - small).norm() / small.norm()).item()

    assert lost(int4(64)) > 0.5
    assert lost(int4(64, by_channel=True)) < 0.15


def test_rotation_helps_where_blocks_have_outliers() -> None:
    tensor = torch.randn(64 * 64, generator=torch.Generator().manual_seed(5))
    tensor[::64] *= 25
    assert error_of(int4(64, rotated=True), tensor) < 0.7 * error_of(int4(64), tensor)


# ---- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [-1.0, 2.7e36])
def test_scale_that_no_encoder_writes_is_refused(scale: float) -> None:
    with pytest.raises(CodecError, match="scale lies outside"):
        int8(8).decode(struct.pack("<f3b", scale, 1, 2, 3), (3,), FORWARD)


def test_code_that_no_encoder_writes_is_refused() -> None:
    with pytest.raises(CodecError, match="-128"):
        int8(8).decode(struct.pack("<f3b", 1.0, 1, -128, 3), (3,), FORWARD)


@pytest.mark.parametrize("pair", [0x08, 0x80])
def test_half_byte_that_no_encoder_writes_is_refused(pair: int) -> None:
    with pytest.raises(CodecError, match="code 0 is never written"):
        int4(8).decode(struct.pack("<HBB", 0x3F80, 0x99, pair), (4,), FORWARD)


def test_filling_after_an_odd_number_of_codes_must_be_a_zero() -> None:
    assert (
        int4(8).decode(struct.pack("<HBB", 0x3F80, 0x99, 0x89), (3,), FORWARD).tolist() == [1] * 3
    )
    with pytest.raises(CodecError, match="is not 8"):
        int4(8).decode(struct.pack("<HBB", 0x3F80, 0x99, 0x99), (3,), FORWARD)


@pytest.mark.parametrize("codec", [int8(8, rotated=True), int4(8, rotated=True)])
def test_rotated_values_beyond_the_range_are_refused(codec: IntegerCodec) -> None:
    with pytest.raises(NonFiniteError, match="beyond its range"):
        codec.encode(torch.full((8,), 1e38), FORWARD)


@pytest.mark.parametrize("codec", [int8(8, rotated=True), int4(8, rotated=True)])
def test_no_rotated_payload_decodes_to_infinity(codec: IntegerCodec) -> None:
    scale = struct.pack("<f", 2.0**121) if isinstance(codec, Int8Codec) else b"\x12\x7e"
    codes = b"\x7f" * 8 if isinstance(codec, Int8Codec) else b"\xff" * 4
    assert torch.isfinite(codec.decode(scale + codes, (8,), FORWARD)).all()
