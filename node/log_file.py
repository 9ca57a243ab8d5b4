# SPDX-License-Identifier: Apache-2.0
"""One step of a boundary log: a file of encoded boundary tensors, each with a checksum.

A file is written whole and renamed into place, but not synced. What a power cut tore, or a disk
damaged, is a hole: reading gives what is whole and leaves out the rest.

    "SHOALBL1" | u16 length, boundary spec | entries
    entry: "ENTR" | u8 kind | u32 number | u64 length | XXH3-128 of the 13 bytes before and the
    payload | payload          (little-endian)
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from shoal.compression.codec import Leg
from shoal.protocol.atomic_file import AtomicFile
from shoal.protocol.wire import Payload

_MAGIC = b"SHOALBL1"
_SPEC_LENGTH = struct.Struct("<H")
_MARK = b"ENTR"
_KEY = struct.Struct("<BIQ")  # kind, number, payload bytes
_CHECKSUM_BYTES = 16
_ENTRY_BYTES = len(_MARK) + _KEY.size + _CHECKSUM_BYTES
Kind = Leg | Literal["share"]
"""A boundary tensor's leg, or this stage's share of what a boundary's two stages hold in common."""

_KINDS: tuple[Kind, ...] = ("forward", "backward", "share")


@dataclass(frozen=True, slots=True)
class Sent:
    """A boundary tensor as it was sent: a stage's output, or the gradient of its input; or a share
    (node/shares.py), which was there to be fetched."""

    kind: Kind
    number: int
    """Microbatch, or a share's boundary."""
    payload: Payload


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry lies in its file."""

    key: bytes
    checksum: bytes
    offset: int
    length: int


def step_bytes(entries: Iterable[Sent], boundary: str) -> int:
    """The length of the file that `write_step` writes."""
    head = len(_MAGIC) + _SPEC_LENGTH.size + len(boundary.encode())
    return head + sum(_ENTRY_BYTES + len(entry.payload) for entry in entries)


def write_step(path: Path, entries: Iterable[Sent], boundary: str) -> None:
    """Raises `StorageError`; then nothing has changed."""
    spec = boundary.encode()
    with AtomicFile(path, durable=False) as file:
        file.write(_MAGIC + _SPEC_LENGTH.pack(len(spec)) + spec)
        for entry in entries:
            payload = memoryview(entry.payload).cast("B")
            key = _KEY.pack(_KINDS.index(entry.kind), entry.number, len(payload))
            file.write(_MARK + key + _checksum(key, payload))
            file.write(payload)


def places(path: Path, boundary: str) -> Mapping[tuple[Kind, int], Place]:
    """The entries that the file names, up to where it is torn; none of one that was written with
    another boundary spec. Raises `OSError`."""
    found: dict[tuple[Kind, int], Place] = {}
    spec = boundary.encode()
    head = _MAGIC + _SPEC_LENGTH.pack(len(spec)) + spec
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(head)) != head:
            return {}
        offset = len(head)
        while len(entry := file.read(_ENTRY_BYTES)) == _ENTRY_BYTES and entry[:4] == _MARK:
            key = entry[4 : 4 + _KEY.size]
            kind, number, length = _KEY.unpack(key)
            offset += _ENTRY_BYTES
            if kind >= len(_KINDS) or offset + length > size:
                break
            found[_KINDS[kind], number] = Place(key, entry[-_CHECKSUM_BYTES:], offset, length)
            offset += length
            file.seek(offset)
    return found


def read_entry(path: Path, place: Place) -> bytes | None:
    """The payload, or None for a damaged one. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(place.offset)
        payload = file.read(place.length)
    if len(payload) != place.length or _checksum(place.key, payload) != place.checksum:
        return None
    return payload


def _checksum(key: bytes, payload: Payload) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(payload)
    return digest.digest()
