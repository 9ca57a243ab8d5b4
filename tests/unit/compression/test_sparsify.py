# SPDX-License-Identifier: Apache-2.0
"""Top-k: which values are kept, and indices that no encoder writes."""

import struct
from fractions import Fraction

import pytest
import torch

from shoal.compression.codec import CodecContext
from shoal.compression.sparsify import TopKCodec
from shoal.protocol.errors import CodecError

CONTEXT = CodecContext(run_seed=0, step=1, microbatch=0, boundary=0, leg="forward")
HALF, TENTH = TopKCodec(Fraction(50)), TopKCodec(Fraction(10))


def through(codec: TopKCodec, tensor: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(tensor, CONTEXT), tensor.shape, CONTEXT)


def test_each_row_keeps_its_own_largest_with_their_signs() -> None:
    tensor = torch.tensor([[1.0, -4, 3, 0], [0.5, 0.25, -0.125, 2]])
    assert through(HALF, tensor).tolist() == [[0, -4, 3, 0], [0.5, 0, 0, 2]]


def test_layout_is_rising_indices_then_values() -> None:
    payload = HALF.encode(torch.tensor([[1.0, -4, 3, 0], [2, 0, 0, 8]]), CONTEXT)
    values = struct.pack("<4H", 0xC080, 0x4040, 0x4000, 0x4100)
    assert bytes(payload) == struct.pack("<4H", 1, 2, 0, 3) + values


def test_of_equal_sizes_the_earlier_ones_are_kept() -> None:
    tensor = torch.tensor([[1.0, -1, 1, 2, -1, 1, 1, 1]])
    assert through(HALF, tensor).tolist() == [[1, -1, 1, 2, 0, 0, 0, 0]]
    assert through(HALF, torch.zeros(1, 5)).tolist() == [[0] * 5]


def test_a_share_keeps_at_least_one_value() -> None:
    assert through(TENTH, torch.tensor([[3.0, -5, 1]])).tolist() == [[0, -5, 0]]
    assert len(TENTH.encode(torch.ones(1, 21), CONTEXT)) == 3 * 4  # 2.1 of 21, rounded up


def test_wide_rows_have_indices_of_four_bytes() -> None:
    tensor = torch.zeros(1, 70_000)
    tensor[0, 69_999] = 1
    assert torch.equal(through(TENTH, tensor), tensor)
    assert TENTH.encoded_bytes((1, 70_000)) == 7_000 * (4 + 2)
    assert TENTH.encoded_bytes((1, 65_536)) == 6_554 * (2 + 2)
    narrower = torch.zeros(1, 65_536)
    narrower[0, 65_535] = 1
    assert torch.equal(through(TENTH, narrower), narrower)


@pytest.mark.parametrize("indices", [(1, 1), (2, 1), (0, 4), (0, 65_535)])
def test_indices_that_no_encoder_writes_are_refused(indices: tuple[int, int]) -> None:
    payload = struct.pack("<2H", *indices) + bytes(4)
    with pytest.raises(CodecError, match="don't rise"):
        HALF.decode(payload, (1, 4), CONTEXT)


def test_spec_writes_the_share_in_full() -> None:
    assert TopKCodec(Fraction("0.5")).spec == "topk:0.5%"
    assert TopKCodec(Fraction(100)).spec == "topk:100%"
