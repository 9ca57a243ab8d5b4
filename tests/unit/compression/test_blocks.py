# SPDX-License-Identifier: Apache-2.0
"""Blocks along values and along channels: order, extents and chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import blocks as blocks_module
from shoal.compression.blocks import Blocks

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def test_flat_tensor_is_one_line_in_row_major_order() -> None:
    blocks = Blocks.of((2, 3, 7), 8, by_channel=False)
    assert (blocks.lines, blocks.num_full, blocks.rest, blocks.num_blocks) == (1, 5, 2, 6)
    values = torch.arange(42.0).view(2, 3, 7)
    assert torch.equal(blocks.ordered(values), values.view(-1))


def test_by_channel_the_body_comes_before_the_tail() -> None:
    # Two channels of five tokens in blocks of two.
    blocks = Blocks.of((5, 2), 2, by_channel=True)
    values = torch.tensor([[0, 10], [1, 11], [2, 12], [3, 13], [4, 14]])
    assert blocks.ordered(values).tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 4, 14]
    assert (blocks.num_full, blocks.rest, blocks.num_blocks) == (4, 1, 6)


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES, block=st.integers(2, 9), by_channel=st.booleans())
def test_order_is_undone(shape: tuple[int, ...], block: int, by_channel: bool) -> None:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    blocks = Blocks.of(shape, block, by_channel=by_channel)
    assert torch.equal(blocks.restored(blocks.ordered(values)), values.view(-1))


@pytest.mark.parametrize("whole", [1, 6, 100, 10_000])
@pytest.mark.parametrize("by_channel", [False, True])
def test_chunks_cover_everything_once_in_order(
    whole: int, by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "_CPU_CHUNK", whole)
    blocks = Blocks.of((4, 5, 13), 6, by_channel=by_channel)
    chunks = list(blocks.chunks(torch.device("cpu")))
    values = [i for chunk in chunks for i in range(chunk.values.start, chunk.values.stop)]
    numbers = [i for chunk in chunks for i in range(chunk.blocks.start, chunk.blocks.stop)]
    assert values == list(range(260))
    assert numbers == list(range(blocks.num_blocks))
    assert all(chunk.values.start % 2 == 0 for chunk in chunks)
    ordered = torch.arange(260)
    assert all(len(c.rows(ordered)) == c.blocks.stop - c.blocks.start for c in chunks)
