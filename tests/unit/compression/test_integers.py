# SPDX-License-Identifier: Apache-2.0
"""Packed integers: whatever goes in comes out, and whatever else comes in is refused by name."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.compression import integers
from shoal.compression.integers import PACKED, RAW
from shoal.protocol.errors import CodecError, OversizedStreamError, ProtocolError, WrongCodecError

TILE = 65_536
LENGTHS = [0, 1, 2, 63, 64, 65, 127, 129, 1000, TILE - 1, TILE, TILE + 1, 2 * TILE + 64 * 5 + 3]


def random_integers(count: int, *, width: int, shift: int = 0, seed: int = 0) -> Tensor:
    """Of `width` significant bits at most, sign included, with `shift` zeros below."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-(2**63), 2**63 - 1, size=count, endpoint=True)
    return torch.from_numpy((values >> (64 - width)) << shift)


def gradient_like(count: int, *, terms: int, exponent: int, seed: int = 0) -> Tensor:
    """Sums of fp32 terms in fixed point, some rows of them zero."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(count, dtype=torch.int64)
    for _ in range(terms):
        term = torch.randn(count, generator=generator)
        sums += (term.double() * 2.0**exponent).round().to(torch.int64)
    sums.view(-1)[: count // 5] = 0
    return sums


def packed(values: Tensor) -> bytes:
    codec, payload = integers.encode(values)
    assert codec == PACKED
    return bytes(payload)


def assert_comes_back(values: Tensor) -> None:
    before = values.clone()
    codec, payload = integers.encode(values)
    integers.check_length(codec, len(payload), values.numel())
    assert len(payload) <= 8 * values.numel()
    decoded = integers.decode(codec, payload, values.numel())
    assert torch.equal(decoded, before)
    assert torch.equal(values, before)
    assert decoded.dtype == torch.int64
    decoded.add_(1)  # in memory of its own
    assert torch.equal(values, before)


def by_the_book(payload: bytes, count: int) -> list[int]:
    """The layout that the module describes, bit by bit."""
    num_blocks = -(-count // 64)
    widths, shifts = payload[:num_blocks], payload[num_blocks : 2 * num_blocks]
    position = 2 * num_blocks
    values = [0] * (64 * num_blocks)
    done = [0] * num_blocks
    for start in range(0, num_blocks, 1024):
        for bits in (64, 32, 16, 8, 4, 2, 1):
            for block in range(start, min(start + 1024, num_blocks)):
                if not widths[block] & bits:
                    continue
                field = int.from_bytes(payload[position : position + 8 * bits], "little")
                position += 8 * bits
                for i in range(64):
                    part = field >> (i * bits) & ((1 << bits) - 1)
                    values[64 * block + i] |= part << done[block]
                done[block] += bits
    assert position == len(payload)
    for i, value in enumerate(values):
        width, shift = widths[i // 64], shifts[i // 64]
        if width and value >> (width - 1):
            value -= 1 << width
        values[i] = value << shift
    return values[:count]


# ---- round trips -------------------------------------------------------------------------


@pytest.mark.parametrize("count", LENGTHS)
def test_any_number_of_values_comes_back(count: int) -> None:
    assert_comes_back(gradient_like(count, terms=3, exponent=36))
    assert_comes_back(random_integers(count, width=64))
    assert_comes_back(torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize("width", range(1, 65))
def test_every_width_comes_back_at_every_shift(width: int) -> None:
    for shift in {0, 1, (64 - width) // 2, 64 - width}:
        if width + shift <= 64:
            assert_comes_back(random_integers(200, width=width, shift=shift, seed=shift))


@pytest.mark.parametrize(
    "values",
    [
        [0], [1], [-1], [2**62], [-(2**62)], [2**63 - 1], [-(2**63)], [-(2**63), 2**63 - 1],
        [0, -1], [2**62] * 64, [-(2**63)] * 64, [0] * 63 + [1], [-(2**62), 2**62] * 100,
        [2**53 - 1] * 64, [2**53 + 1] * 64, [-(2**53) - 1] * 64, [2**32] * 64, [2**32 - 1] * 64,
    ],
)  # fmt: skip
def test_extremes_come_back(values: list[int]) -> None:
    assert_comes_back(torch.tensor(values))


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 63), st.booleans()), min_size=1, max_size=6
    ),
    cut=st.integers(0, 63),
    seed=st.integers(0, 2**20),
)
def test_blocks_of_any_widths_side_by_side_come_back(
    blocks: list[tuple[int, int, bool]], cut: int, seed: int
) -> None:
    parts = []
    for index, (width, shift, zero) in enumerate(blocks):
        part = random_integers(64, width=min(width, 64 - shift), shift=shift, seed=seed + index)
        parts.append(torch.zeros_like(part) if zero else part)
    values = torch.cat(parts)
    assert_comes_back(values[: len(values) - cut])


def test_blocks_of_different_widths_come_back_over_several_tiles() -> None:
    rng = np.random.default_rng(1)
    widths = rng.integers(1, 64, size=3000)
    values = [random_integers(64, width=int(w), seed=i) for i, w in enumerate(widths)]
    assert_comes_back(torch.cat(values)[:-7])


def test_a_slice_of_a_larger_vector_comes_back() -> None:
    assert_comes_back(gradient_like(1000, terms=2, exponent=30)[37:900])


# ---- the layout --------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(40, 200), width=st.integers(1, 50), shift=st.integers(0, 13),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_payload_is_laid_out_as_described(count: int, width: int, shift: int, seed: int) -> None:
    values = random_integers(count, width=width, shift=shift, seed=seed)
    values[70:] >>= 3  # the blocks differ
    codec, payload = integers.encode(values)
    if codec == PACKED:
        assert by_the_book(bytes(payload), count) == values.tolist()


def test_layout_does_not_change_unnoticed() -> None:
    values = torch.arange(64) * 4 - 128  # -32 to 31, shifted by two
    payload = packed(values)
    # Six bits: a field of 4 and a field of 2.
    low = bytes((i - 32 & 15) | (i - 31 & 15) << 4 for i in range(0, 64, 2))
    high = bytes(sum((i + k - 32 >> 4 & 3) << 2 * k for k in range(4)) for i in range(0, 64, 4))
    assert payload == bytes([6, 2]) + low + high


def test_tiles_follow_each_other_as_described() -> None:
    values = gradient_like(TILE + 130, terms=1, exponent=3)
    assert by_the_book(packed(values), len(values)) == values.tolist()


def test_payload_depends_on_the_values_alone() -> None:
    values = gradient_like(5000, terms=4, exponent=30)
    wide = torch.stack([values, values], dim=1)[:, 0]  # the same values with gaps in memory
    assert packed(values) == packed(values.clone()) == packed(wide)


def test_zeros_take_a_quarter_bit_each() -> None:
    assert len(packed(torch.zeros(6400, dtype=torch.int64))) == 200


def test_gradients_of_few_terms_take_much_less_than_six_bytes() -> None:
    values = gradient_like(64_000, terms=8, exponent=40)
    assert len(packed(values)) < 4.2 * 64_000


@pytest.mark.parametrize("count", [0, 1, 5, 64, 100])
def test_what_packing_does_not_shrink_goes_raw(count: int) -> None:
    values = random_integers(count, width=64)
    codec, payload = integers.encode(values)
    assert codec == RAW
    assert bytes(payload) == values.numpy().tobytes()


# ---- what a peer may send ----------------------------------------------------------------


def test_unknown_codec_is_refused() -> None:
    with pytest.raises(WrongCodecError, match="pack65"):
        integers.check_length("pack65", 3, 1)
    with pytest.raises(WrongCodecError):
        integers.decode("", bytes(8), 1)


@pytest.mark.parametrize(
    ("codec", "num_bytes", "count"),
    [(RAW, 0, 1), (RAW, 7, 1), (RAW, 9, 1), (RAW, 8, 0), (PACKED, 8, 1), (PACKED, 0, 0),
     (PACKED, 800, 100), (PACKED, 10**12, 100)],
)  # fmt: skip
def test_length_that_no_encoder_gives_is_refused_before_anything_is_there(
    codec: str, num_bytes: int, count: int
) -> None:
    with pytest.raises(OversizedStreamError):
        integers.check_length(codec, num_bytes, count)


@pytest.mark.parametrize(
    ("payload", "count"),
    [
        (b"", 64),
        (b"\0", 64),
        (bytes([0, 0]), 65),  # two blocks have four such bytes
        (bytes([0, 0, 0]), 64),  # zeros, and a byte too many
        (bytes([1, 0]) + bytes(7), 64),
        (bytes([1, 0]) + bytes(9), 64),
        (bytes([65, 0]) + bytes(8), 64),
        (bytes([255, 0]) + bytes(100), 64),
        (bytes([0, 64]), 64),
        (bytes([0, 255]), 64),
        (bytes([60, 5]) + bytes(480), 64),
        (bytes([32, 33]) + bytes(256), 64),
    ],
)
def test_payload_that_no_encoder_writes_is_refused(payload: bytes, count: int) -> None:
    with pytest.raises(CodecError):
        integers.decode(PACKED, payload, count)


@settings(max_examples=300, deadline=None)
@given(payload=st.binary(max_size=600), count=st.integers(0, 300))
def test_random_bytes_are_refused_or_are_integers(payload: bytes, count: int) -> None:
    with contextlib.suppress(ProtocolError):
        assert integers.decode(PACKED, payload, count).shape == (count,)


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(64, 400), width=st.integers(0, 20), places=st.lists(st.integers(0, 10**6)),
    data=st.data(),
)  # fmt: skip
def test_damaged_payload_is_refused_or_gives_as_many_integers(
    count: int, width: int, places: list[int], data: st.DataObject
) -> None:
    payload = bytearray(packed(random_integers(count, width=max(width, 1), shift=3)))
    for place in places:
        payload[place % len(payload)] = data.draw(st.integers(0, 255))
    del payload[data.draw(st.integers(0, 3)) + len(payload) - 3 :]
    with contextlib.suppress(ProtocolError):
        assert integers.decode(PACKED, payload, count).shape == (count,)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_payload_may_come_in_any_buffer(make: type) -> None:
    values = gradient_like(500, terms=2, exponent=20)
    payload = b"x" + packed(values)  # unaligned
    assert torch.equal(integers.decode(PACKED, memoryview(make(payload))[1:], 500), values)
    raw = b"x" + values.numpy().tobytes()
    assert torch.equal(integers.decode(RAW, memoryview(make(raw))[1:], 500), values)
