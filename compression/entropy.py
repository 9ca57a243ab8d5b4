# SPDX-License-Identifier: Apache-2.0
"""Byte codecs: they take the payload of a quantizer and give it back without a bit of loss.

`shuffle` orders bytes by their place in a number, which makes them more alike for a compressor
after it; the length stays. `zstd:N` and `lz4` compress; the length then depends on the data, and
grows a little where nothing can be gained. A receiver knows how long the payload inside must be
(it follows from the shape), and nothing is decompressed into more than that.

zstd: one frame (RFC 8878) that states its content's size; no checksum, dictionary or second frame.
lz4: one block of the LZ4 block format, without a size. Another release of either library may write
other bytes; what they decompress to is the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import lz4.block
import numpy as np
import numpy.typing as npt
import zstandard

from shoal.compression.codec import Run
from shoal.protocol.errors import CodecError

MIN_ZSTD_LEVEL, MAX_ZSTD_LEVEL = 1, 19

Bytes = npt.NDArray[np.uint8]
"""One dimension, contiguous."""


class ByteCodec(ABC):
    """Lossless. Thread-safe."""

    spec: str
    compresses: bool
    """Whether the length depends on the data."""

    @abstractmethod
    def pack(self, payload: Bytes, layout: Sequence[Run]) -> Bytes:
        """A new array. `layout` is the payload's."""

    @abstractmethod
    def unpack(self, packed: Bytes, layout: Sequence[Run], num_bytes: int) -> Bytes:
        """The payload of `num_bytes`; may be a view. Raises `CodecError` for anything else, having
        allocated no more than that."""

    @abstractmethod
    def max_bytes(self, num_bytes: int) -> int:
        """The longest that `pack` returns for a payload of so many bytes."""


class Shuffle(ByteCodec):
    """Each run of the layout becomes its items' first bytes, then their second bytes, …"""

    spec = "shuffle"
    compresses = False

    def pack(self, payload: Bytes, layout: Sequence[Run]) -> Bytes:
        out, start = np.empty_like(payload), 0
        for run in layout:
            stop = start + run.count * run.item_bytes
            items = payload[start:stop].reshape(run.count, run.item_bytes)
            out[start:stop].reshape(run.item_bytes, run.count)[:] = items.T
            start = stop
        return out

    def unpack(self, packed: Bytes, layout: Sequence[Run], num_bytes: int) -> Bytes:
        if len(packed) != num_bytes:
            raise CodecError(f"shuffle: {len(packed)} bytes instead of {num_bytes}")
        out, start = np.empty_like(packed), 0
        for run in layout:
            stop = start + run.count * run.item_bytes
            planes = packed[start:stop].reshape(run.item_bytes, run.count)
            out[start:stop].reshape(run.count, run.item_bytes)[:] = planes.T
            start = stop
        return out

    def max_bytes(self, num_bytes: int) -> int:
        return num_bytes


class Zstd(ByteCodec):
    compresses = True

    def __init__(self, level: int) -> None:
        assert MIN_ZSTD_LEVEL <= level <= MAX_ZSTD_LEVEL
        self.spec = f"zstd:{level}"
        self._level = level

    def pack(self, payload: Bytes, layout: Sequence[Run]) -> Bytes:
        # A compressor of its own for every call: they aren't thread-safe.
        compressor = zstandard.ZstdCompressor(level=self._level)
        return np.frombuffer(compressor.compress(payload.data), dtype=np.uint8)

    def unpack(self, packed: Bytes, layout: Sequence[Run], num_bytes: int) -> Bytes:
        try:
            frame = zstandard.get_frame_parameters(packed.data)
            if frame.content_size != num_bytes:
                raise CodecError(
                    f"zstd frame of {_size(frame.content_size)}; the plan's payload has {num_bytes}"
                )
            # The size that the frame states is what is allocated, and zstd writes no further.
            content = zstandard.ZstdDecompressor().decompress(packed.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"zstd: {error}") from None
        if len(content) != num_bytes:
            raise CodecError(f"zstd frame of {len(content)} bytes instead of {num_bytes}")
        return np.frombuffer(content, dtype=np.uint8)

    def max_bytes(self, num_bytes: int) -> int:
        """ZSTD_COMPRESSBOUND of zstd.h."""
        small = max(0, (128 << 10) - num_bytes) >> 11
        return num_bytes + (num_bytes >> 8) + small


class Lz4(ByteCodec):
    spec = "lz4"
    compresses = True

    def pack(self, payload: Bytes, layout: Sequence[Run]) -> Bytes:
        return np.frombuffer(lz4.block.compress(payload, store_size=False), dtype=np.uint8)

    def unpack(self, packed: Bytes, layout: Sequence[Run], num_bytes: int) -> Bytes:
        try:
            content = lz4.block.decompress(packed, uncompressed_size=num_bytes)
        except lz4.block.LZ4BlockError as error:
            raise CodecError(f"lz4: {error}") from None
        if len(content) != num_bytes:
            raise CodecError(f"lz4 block of {len(content)} bytes instead of {num_bytes}")
        return np.frombuffer(content, dtype=np.uint8)

    def max_bytes(self, num_bytes: int) -> int:
        """LZ4_COMPRESSBOUND of lz4.h."""
        return num_bytes + num_bytes // 255 + 16


def _size(content_size: int) -> str:
    if content_size == zstandard.CONTENTSIZE_UNKNOWN:
        return "unknown size"
    return f"{content_size} bytes"
