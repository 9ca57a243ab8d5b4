# SPDX-License-Identifier: Apache-2.0
"""A state file in chunks that are verified one by one: had from several donors, resumed later.

The donor describes the file by the SHA-256 of each chunk; whoever fetches it fills a partial file,
in any order. What a partial file already holds is found out by hashing it, so it may stay on the
disk over a restart and needs no notes beside it. All functions block on the disk.
"""

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from shoal.protocol.atomic_file import storage_error
from shoal.protocol.disk import require_space
from shoal.protocol.errors import ChecksumError, MalformedFrameError, OversizedStreamError
from shoal.protocol.proto.peer_pb2 import StateChunk, StateDescription

MAX_CHUNKS_ASKED = 64
"""In one FetchState."""

_PIECE_BYTES = 1 << 20  # of a chunk, in one message
_SMALLEST, _LARGEST = 1 << 16, 1 << 22
_CHUNKS_WANTED = 64
_SHA256_BYTES = 32


def chunk_bytes_for(total_bytes: int) -> int:
    """A power of two between 64 KiB and 4 MiB: at least 64 chunks where that is possible."""
    size = _LARGEST
    while size > _SMALLEST and total_bytes // size < _CHUNKS_WANTED:
        size //= 2
    return size


def describe(path: Path, *, weights_digest: int = 0) -> StateDescription:
    """Reads the whole file. Raises `StorageError`."""
    hashes = []
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            size = chunk_bytes_for(total)
            while data := file.read(size):
                hashes.append(hashlib.sha256(data).digest())
    except OSError as error:
        raise storage_error(path, error) from error
    return StateDescription(
        total_bytes=total,
        chunk_bytes=size,
        chunk_sha256=b"".join(hashes),
        weights_digest=weights_digest,
    )


def num_chunks(description: StateDescription) -> int:
    return -(-description.total_bytes // description.chunk_bytes)


def check_description(description: StateDescription, *, max_bytes: int) -> None:
    """Before anything is allocated. Raises `OversizedStreamError` or `MalformedFrameError`."""
    if not 0 < description.total_bytes <= max_bytes:
        raise OversizedStreamError(
            f"a state of {description.total_bytes} bytes is offered, the plan allows 1 to "
            f"{max_bytes}"
        )
    if description.chunk_bytes != chunk_bytes_for(description.total_bytes):
        raise MalformedFrameError(
            f"chunks of {description.chunk_bytes} bytes are offered, the format has chunks of "
            f"{chunk_bytes_for(description.total_bytes)}"
        )
    if len(description.chunk_sha256) != _SHA256_BYTES * num_chunks(description):
        raise MalformedFrameError(
            f"{len(description.chunk_sha256)} bytes of hashes for {num_chunks(description)} chunks"
        )


def read_chunks(path: Path, wanted: Sequence[int], *, chunk_bytes: int) -> Iterator[StateChunk]:
    """The wanted chunks in pieces of at most 1 MiB, in the order asked for.

    Raises `MalformedFrameError` for too many or none, or one that the file hasn't;
    `StorageError`. Goes on to the end even when the file is removed meanwhile.
    """
    if not 0 < len(wanted) <= MAX_CHUNKS_ASKED:
        raise MalformedFrameError(
            f"{len(wanted)} chunks are asked for at once; ask for 1 to {MAX_CHUNKS_ASKED}"
        )
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            for index in wanted:
                offset = index * chunk_bytes
                end = min(offset + chunk_bytes, total)
                if offset >= total:
                    raise MalformedFrameError(f"chunk {index} of a state of {total} bytes")
                file.seek(offset)
                while offset < end:
                    data = file.read(min(_PIECE_BYTES, end - offset))
                    if not data:
                        raise OSError("it was cut short")
                    yield StateChunk(offset=offset, data=data)
                    offset += len(data)
    except OSError as error:
        raise storage_error(path, error) from error


class PartialState:
    """A state file on its way. `missing` counts down to nothing; then the file at `path` is whole
    and every chunk of it verified.

    Opening it keeps whatever the file already holds of this description. `close` leaves it as it
    is, to be resumed; it appears under no other name. It may be called while another thread is in
    `write`, which fails then.
    """

    def __init__(self, path: Path, description: StateDescription) -> None:
        """`description` has been checked. Raises `StorageError`."""
        self.path = path
        self._lock = threading.Lock()  # a descriptor that is closed may be another file's at once
        self._size = description.chunk_bytes
        self._total = description.total_bytes
        hashes = description.chunk_sha256
        self._hashes = [hashes[i : i + _SHA256_BYTES] for i in range(0, len(hashes), _SHA256_BYTES)]
        self._file = -1
        try:
            require_space(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            known = os.fstat(self._file).st_size
            os.ftruncate(self._file, self._total)
            self.have = {i for i in range(len(self._hashes)) if known and self._holds(i)}
        except OSError as error:
            self.close()
            raise storage_error(path, error, needed_bytes=self._total) from error
        self.resumed_bytes = sum(map(self.length, self.have))

    @property
    def num_chunks(self) -> int:
        return len(self._hashes)

    @property
    def missing(self) -> int:
        return len(self._hashes) - len(self.have)

    @property
    def missing_bytes(self) -> int:
        return self._total - sum(map(self.length, self.have))

    def offset(self, index: int) -> int:
        return index * self._size

    def length(self, index: int) -> int:
        return min(self._size, self._total - index * self._size)

    def write(self, index: int, data: bytes | bytearray) -> None:
        """Raises `ChecksumError` and writes nothing when it isn't the chunk; `StorageError`."""
        if hashlib.sha256(data).digest() != self._hashes[index]:
            raise ChecksumError(
                f"{self.path.name}: chunk {index} ({len(data)} bytes) has another SHA-256 than "
                "described"
            )
        try:
            require_space(self.path)
            view, offset = memoryview(data), index * self._size
            with self._lock:
                while view:
                    written = os.pwrite(self._file, view, offset)
                    view, offset = view[written:], offset + written
        except OSError as error:
            raise storage_error(self.path, error, needed_bytes=self.missing_bytes) from error
        self.have.add(index)

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _holds(self, index: int) -> bool:
        data = os.pread(self._file, self.length(index), index * self._size)
        return hashlib.sha256(data).digest() == self._hashes[index]
