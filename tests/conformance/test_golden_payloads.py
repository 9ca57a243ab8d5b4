# SPDX-License-Identifier: Apache-2.0
"""Payloads as they were when a codec's format was set: peers of other builds read them.

What zstd and lz4 write may change with their release, so only reading is held for them. A changed
file means a changed format, which takes a new PROTOCOL_VERSION.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from shoal.compression.codec import CodecContext, Leg
from shoal.compression.registry import parse_boundary

GOLDEN: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "codec-payloads.json").read_text(encoding="utf-8")
)
SHAPE = (2, 9, 4)
LEGS: tuple[Leg, ...] = ("forward", "backward")


def tensor() -> torch.Tensor:
    """72 values of many sizes, by arithmetic alone."""
    values = [
        (i * 7919 % 1009 - 504) / 64 * (20 if i % 13 == 0 else 2.0 ** -(i % 5))
        for i in range(math.prod(SHAPE))
    ]
    return torch.tensor(values).view(SHAPE)


def context(leg: Leg) -> CodecContext:
    return CodecContext(run_seed=2**40 + 1, step=12, microbatch=3, boundary=2, leg=leg)


@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("spec", GOLDEN)
def test_payload_is_the_recorded_one(spec: str, leg: Leg) -> None:
    codec = parse_boundary(spec).forward
    assert codec.spec == spec
    recorded = bytes.fromhex(GOLDEN[spec][leg])
    if codec.encoded_bytes(SHAPE) is not None:
        assert bytes(codec.encode(tensor(), context(leg))).hex() == recorded.hex()
    quantizer = parse_boundary(spec.partition("|")[0]).forward
    plain = quantizer.encode(tensor(), context(leg))
    expected = quantizer.decode(plain, SHAPE, context(leg))
    assert torch.equal(codec.decode(recorded, SHAPE, context(leg)), expected)
