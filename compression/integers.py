# SPDX-License-Identifier: Apache-2.0
"""Lossless packing of int64 vectors: what replicas of a stage exchange when they sum up.

Sums of fp32 gradients in fixed point have few significant bits: those below the smallest term's
last one are zero, those above the largest sum's first one repeat the sign. Both ends are cut off
per block of 64 neighbours. (Frame of reference without a reference: zero is always near the
middle. Lemire and Boytsov, arXiv 1209.2137, survey the family.)

Payload "pack64" for n values in B = ceil(n / 64) blocks, the last one filled up with zeros:

    widths  uint8 [B]: w, bits per value, 0 to 64
    shifts  uint8 [B]: t, low bits that are zero in all of the block's values; w + t <= 64
    fields: for each tile of 1,024 blocks, for c = 64, 32, 16, 8, 4, 2, 1, for each block of the
            tile whose w has the bit c: the next c bits of its 64 values, from the lowest on

A value is its w bits in two's complement, times 2^t. So w is taken apart into powers of two, and
everything is a cast or a shift of whole arrays. Little-endian; within a byte the lower bits come
first. The bytes are a function of the values alone, and the values those that went in: packing
can't change a sum.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.protocol.errors import CodecError, OversizedStreamError, WrongCodecError

RAW = "raw"
"""Eight bytes a value, little-endian: what packing does not make smaller."""
PACKED = "pack64"

Buffer = bytes | bytearray | memoryview

_BLOCK = 64
_TILE = 1024  # blocks; 512 KiB stay in a core's cache
_FIELDS = (64, 32, 16, 8, 4, 2, 1)

_I64 = NDArray[np.int64]
_U64 = NDArray[np.uint64]
_U8 = NDArray[np.uint8]


def encode(values: Tensor) -> tuple[str, Buffer]:
    """(codec, payload) of a flat int64 CPU tensor, whichever codec is shorter.

    A raw payload shares the tensor's memory. May run in any thread.
    """
    flat = values.numpy()
    packed = _pack(flat)
    if len(packed) < flat.nbytes:
        return PACKED, packed
    return RAW, flat.data.cast("B") if flat.size else b""


def check_length(codec: str, num_bytes: int, count: int) -> None:
    """Whether `count` values may come in so many bytes, before any of them is there.

    Raises `WrongCodecError` for an unknown codec and `OversizedStreamError` for a length that no
    encoder gives.
    """
    if codec not in (RAW, PACKED):
        raise WrongCodecError(f"integers as {codec[:64]!r}; this node reads {RAW} and {PACKED}")
    raw_bytes = 8 * count
    if codec == RAW and num_bytes != raw_bytes:
        raise OversizedStreamError(
            f"{num_bytes} bytes for {count} raw integers, which take exactly {raw_bytes}"
        )
    if codec == PACKED and num_bytes >= raw_bytes:
        raise OversizedStreamError(
            f"{num_bytes} bytes for {count} integers as {PACKED}, which take less than {raw_bytes}"
        )


def decode(codec: str, payload: Buffer, count: int) -> Tensor:
    """`count` values as a flat int64 tensor in memory of its own.

    `count` comes from the plan, the rest from a peer. Raises what `check_length` raises, and
    `CodecError` for bytes that no encoder writes. May run in any thread.
    """
    view = memoryview(payload).cast("B")
    check_length(codec, view.nbytes, count)
    if codec == PACKED:
        return torch.from_numpy(_unpack(np.frombuffer(view, np.uint8), count))
    return torch.from_numpy(np.frombuffer(view, np.int64).copy())


# ---- packing -----------------------------------------------------------------------------


def _pack(values: _I64) -> bytes:
    num_blocks = -(-values.size // _BLOCK)
    header = np.empty((2, num_blocks), np.uint8)
    fields: list[_U8] = [header.reshape(-1)]
    for start in range(0, num_blocks, _TILE):
        blocks = _blocks(values[start * _BLOCK : (start + _TILE) * _BLOCK])
        widths, shifts = header[:, start : start + _TILE]
        widths[:], shifts[:] = _significant(blocks)
        rest = (blocks >> shifts[:, None].astype(np.int64)).view(np.uint64)
        for bits in _FIELDS:
            rows = np.flatnonzero(widths & bits)
            if not rows.size:
                continue
            everywhere = rows.size == len(widths)
            part = rest if everywhere else rest[rows]
            fields.append(_to_field(part, bits))
            if (widths[rows] & (bits - 1)).any():  # narrower fields follow
                part = part >> np.uint64(bits)
                if everywhere:
                    rest = part
                else:
                    rest[rows] = part
    return b"".join(field.data for field in fields)


def _blocks(values: _I64) -> _I64:
    """[blocks, 64]; a copy only where the last block must be filled up."""
    if values.size % _BLOCK:
        filled = np.zeros(-(-values.size // _BLOCK) * _BLOCK, np.int64)
        filled[: values.size] = values
        values = filled
    return np.ascontiguousarray(values).reshape(-1, _BLOCK)


def _significant(blocks: _I64) -> tuple[_U8, _U8]:
    """Widths and shifts: the narrowest that hold every value of a block."""
    magnitude = _union(blocks ^ (blocks >> 63))  # the sign's repetitions become zeros
    used = _union(blocks)
    shifts = np.maximum(_bit_length(used & (~used + np.uint64(1))), 1) - 1
    widths = np.where(used != 0, _bit_length(magnitude) + 1 - shifts, 0)
    return widths.astype(np.uint8), shifts.astype(np.uint8)


def _union(blocks: _I64) -> _U64:
    """Bitwise or over each block, by halving: numpy's own reduction is several times slower."""
    half = _BLOCK // 2
    union = blocks[:, :half] | blocks[:, half:]
    while half > 1:
        half //= 2
        union[:, :half] |= union[:, half : 2 * half]
    return union[:, 0].copy().view(np.uint64)


def _bit_length(values: _U64) -> _I64:
    """Exact: halves fit into a float64's mantissa."""
    high, low = values >> np.uint64(32), values & np.uint64(0xFFFFFFFF)
    of_high = np.frexp(high.astype(np.float64))[1]
    of_low = np.frexp(low.astype(np.float64))[1]
    return np.where(high != 0, 32 + of_high, of_low).astype(np.int64)


def _to_field(part: _U64, bits: int) -> _U8:
    """The low `bits` bits of each value."""
    if bits >= 8:
        return part.astype(f"u{bits // 8}").reshape(-1).view(np.uint8)
    low = part.astype(np.uint8).reshape(-1) & np.uint8((1 << bits) - 1)
    if bits == 4:
        pairs = low.view(np.uint16)
        return (pairs | pairs >> 4).astype(np.uint8)
    if bits == 2:
        quads = low.view(np.uint32)
        quads |= quads >> 6
        return (quads | quads >> 12).astype(np.uint8)
    return np.packbits(low, bitorder="little")


# ---- unpacking ---------------------------------------------------------------------------


def _unpack(payload: _U8, count: int) -> _I64:
    num_blocks = -(-count // _BLOCK)
    if payload.size < 2 * num_blocks:
        raise CodecError(
            f"{PACKED}: {payload.size} bytes for {count} integers, whose widths and shifts alone "
            f"take {2 * num_blocks}"
        )
    widths, shifts = payload[: 2 * num_blocks].reshape(2, num_blocks)
    reach = widths.astype(np.int64) + shifts
    if num_blocks and (reach.max() > 64 or shifts.max() > 63):
        raise CodecError(f"{PACKED}: a block reaches beyond 64 bits; no encoder writes that")
    expected = 2 * num_blocks + _BLOCK // 8 * int(widths.sum(dtype=np.int64))
    if payload.size != expected:
        raise CodecError(
            f"{PACKED}: {payload.size} bytes for {count} integers, whose widths make {expected}"
        )
    values = np.zeros((num_blocks, _BLOCK), np.int64)
    position = 2 * num_blocks
    for start in range(0, num_blocks, _TILE):
        tile = slice(start, start + _TILE)
        position += _unpack_tile(payload[position:], widths[tile], values[tile])
        _place(values[tile], widths[tile].astype(np.int64), shifts[tile].astype(np.int64))
    return values.reshape(-1)[:count]


def _unpack_tile(payload: _U8, widths: _U8, values: _I64) -> int:
    """Fills the blocks in with their bits, from bit 0 on; says how many bytes these took."""
    found: list[tuple[int, NDArray[np.intp], _U8]] = []
    position = 0
    for bits in _FIELDS:
        rows = np.flatnonzero(widths & bits)
        if rows.size:
            end = position + rows.size * _BLOCK * bits // 8
            found.append((bits, rows, payload[position:end]))
            position = end
    unsigned = values.view(np.uint64)
    for bits, rows, packed in reversed(found):  # the narrowest field has the highest bits
        field = _from_field(packed, bits).reshape(-1, _BLOCK)
        if bits == 64:
            unsigned[rows] = field
        elif rows.size == len(widths):
            unsigned <<= np.uint64(bits)
            unsigned |= field
        else:
            part = unsigned[rows] << np.uint64(bits)
            part |= field
            unsigned[rows] = part
    return position


def _place(values: _I64, widths: _I64, shifts: _I64) -> None:
    """Extends the signs and puts the zeros back, in place."""
    up = np.minimum(64 - widths, 63)  # a shift by 64 is undefined; a block of width 0 is zero
    values <<= up[:, None]
    values >>= np.maximum(up - shifts, 0)[:, None]


def _from_field(packed: _U8, bits: int) -> NDArray[np.unsignedinteger]:
    """The inverse of `_to_field`."""
    if bits >= 8:
        # A copy: a field may begin at any byte, and unaligned reads are slow.
        return packed.copy().view(f"u{bits // 8}")
    if bits == 4:
        pairs = packed.astype(np.uint16)
        return ((pairs | pairs << 4) & np.uint16(0x0F0F)).view(np.uint8)
    if bits == 2:
        quads = packed.astype(np.uint32)
        quads |= quads << 12
        return ((quads | quads << 6) & np.uint32(0x03030303)).view(np.uint8)
    return np.unpackbits(packed, bitorder="little")
