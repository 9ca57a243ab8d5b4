# SPDX-License-Identifier: Apache-2.0
"""Byte codecs: shuffled order, and compressed payloads that lie about what is in them."""

import tracemalloc

import lz4.block
import numpy as np
import pytest
import zstandard

from shoal.compression.codec import CodecContext, Run
from shoal.compression.entropy import Lz4, Shuffle, Zstd
from shoal.compression.registry import parse_boundary
from shoal.protocol.errors import CodecError

CONTEXT = CodecContext(run_seed=0, step=1, microbatch=0, boundary=0, leg="forward")
SHAPE = (10, 10)
NUM_BYTES = 200
"""Of SHAPE in bf16."""
BOMB_BYTES = 64 << 20


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def test_shuffle_puts_equal_places_of_a_runs_items_together() -> None:
    layout = (Run(2, 4), Run(3, 1), Run(2, 2))
    payload = array(b"abcdABCD" + b"xyz" + b"mnMN")
    packed = Shuffle().pack(payload, layout)
    assert packed.tobytes() == b"aAbBcCdD" + b"xyz" + b"mMnN"
    assert Shuffle().unpack(packed, layout, len(payload)).tobytes() == payload.tobytes()


def test_shuffled_bf16_compresses_better() -> None:
    values = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    payload = array((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    layout = (Run(20_000, 2),)
    plain = Zstd(3).pack(payload, layout)
    assert len(Zstd(3).pack(Shuffle().pack(payload, layout), layout)) < 0.99 * len(plain)


@pytest.mark.parametrize("codec", [Zstd(1), Zstd(19), Lz4()])
@pytest.mark.parametrize("num_bytes", [1, 200, 5_000, 200_000])
def test_noise_grows_no_further_than_the_bound(codec: Zstd | Lz4, num_bytes: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
    packed = codec.pack(noise, ())
    assert len(packed) <= codec.max_bytes(num_bytes)
    assert codec.unpack(packed, (), num_bytes).tobytes() == noise.tobytes()


def zstd_bomb() -> bytes:
    """64 MiB of zeros in a few kilobytes, as the frame says itself."""
    return zstandard.ZstdCompressor(level=1).compress(bytes(BOMB_BYTES))


def lying_zstd_bomb() -> bytes:
    """The same, in a frame that announces what the plan expects."""
    frame = bytearray(zstd_bomb())
    assert frame[4] >> 6 == 2, "a content size of four bytes"
    place = 5 if frame[4] & 0x20 else 6  # after the window byte, where there is one
    assert int.from_bytes(frame[place : place + 4], "little") == BOMB_BYTES
    frame[place : place + 4] = NUM_BYTES.to_bytes(4, "little")
    return bytes(frame)


def unsized_zstd_bomb() -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(BOMB_BYTES))


@pytest.mark.parametrize("bomb", [zstd_bomb, lying_zstd_bomb, unsized_zstd_bomb])
def test_zstd_bomb_is_refused_without_being_unpacked(bomb: object) -> None:
    assert callable(bomb)
    payload = array(bomb())
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="zstd"):
            Zstd(3).unpack(payload, (), NUM_BYTES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_lz4_bomb_is_refused_without_being_unpacked() -> None:
    payload = array(lz4.block.compress(bytes(BOMB_BYTES), store_size=False))
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="lz4"):
            Lz4().unpack(payload, (), NUM_BYTES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("spec", ["bf16|zstd:3", "bf16|lz4"])
def test_bomb_is_longer_than_a_receiver_admits(spec: str) -> None:
    codec = parse_boundary(spec).forward
    with pytest.raises(CodecError, match="at most"):
        codec.decode(zstd_bomb(), SHAPE, CONTEXT)


@pytest.mark.parametrize(
    "content",
    [bytes(NUM_BYTES - 1), bytes(NUM_BYTES + 1), b""],
    ids=["shorter", "longer", "empty"],
)
def test_other_content_than_the_shapes_is_refused(content: bytes) -> None:
    zstd, plain_lz4 = parse_boundary("bf16|zstd:3").forward, parse_boundary("bf16|lz4").forward
    with pytest.raises(CodecError, match=r"the plan's payload has 200"):
        zstd.decode(zstandard.ZstdCompressor().compress(content), SHAPE, CONTEXT)
    with pytest.raises(CodecError, match="lz4"):
        plain_lz4.decode(lz4.block.compress(content, store_size=False), SHAPE, CONTEXT)


def test_second_frame_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(NUM_BYTES))
    with pytest.raises(CodecError, match="zstd"):
        parse_boundary("bf16|zstd:3").forward.decode(frame + frame, SHAPE, CONTEXT)


def test_any_level_reads_any_other() -> None:
    payload = array(bytes(range(200)))
    assert Zstd(1).unpack(Zstd(19).pack(payload, ()), (), 200).tobytes() == payload.tobytes()
