# SPDX-License-Identifier: Apache-2.0
"""Casts, against bits known from elsewhere."""

import struct

import pytest
import torch

from shoal.compression import cast
from shoal.compression.codec import CodecContext
from shoal.protocol.errors import NonFiniteError

CONTEXT = CodecContext(run_seed=0, step=1, microbatch=0, boundary=0, leg="forward")


def test_fp32_payload_is_the_little_endian_elements_in_row_major_order() -> None:
    tensor = torch.tensor([[1.5, -2.0], [3.25, 1e-42]])
    assert bytes(cast.fp32().encode(tensor, CONTEXT)) == struct.pack("<4f", 1.5, -2.0, 3.25, 1e-42)


def test_bf16_rounds_to_nearest_even() -> None:
    # 1 + 2^-8 lies between 1 and 1 + 2^-7: a tie, to even. 1 + 3 * 2^-8 goes up.
    tensor = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])
    payload = cast.bf16().encode(tensor, CONTEXT)
    assert bytes(payload) == struct.pack("<2H", 0x3F80, 0x3F82)


def test_bf16_refuses_values_that_round_to_infinity() -> None:
    with pytest.raises(NonFiniteError, match="beyond its range"):
        cast.bf16().encode(torch.tensor([3.4e38]), CONTEXT)


def test_fp16_refuses_values_beyond_its_range() -> None:
    with pytest.raises(NonFiniteError, match="fp16"):
        cast.fp16().encode(torch.tensor([1.0, -70_000.0]), CONTEXT)


def test_fp32_refuses_doubles_beyond_its_range() -> None:
    with pytest.raises(NonFiniteError):
        cast.fp32().encode(torch.tensor([1e300], dtype=torch.float64), CONTEXT)
