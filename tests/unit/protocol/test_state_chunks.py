# SPDX-License-Identifier: Apache-2.0
"""Chunks of a state file: described, fetched in any order, verified one by one, resumed."""

import errno
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.protocol import disk
from shoal.protocol.errors import (
    ChecksumError,
    MalformedFrameError,
    OversizedStreamError,
    StorageError,
)
from shoal.protocol.proto.peer_pb2 import StateDescription
from shoal.protocol.state_chunks import (
    PartialState,
    check_description,
    chunk_bytes_for,
    describe,
    num_chunks,
    read_chunks,
)

MIB = 1 << 20
DATA = bytes(i * 7 % 251 for i in range(200_000))  # three whole chunks of 64 KiB and a rest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "donor" / "state"
    path.parent.mkdir()
    path.write_bytes(DATA)
    return path


def piece(description: StateDescription, index: int) -> bytes:
    size = description.chunk_bytes
    return DATA[index * size : (index + 1) * size]


@pytest.mark.parametrize(
    ("total", "expected"),
    [(1, 64 << 10), (4 * MIB, 64 << 10), (64 * MIB, MIB), (1 << 40, 4 * MIB), (255 * MIB, 2 * MIB)],
)
def test_chunks_are_small_for_small_states_and_bounded(total: int, expected: int) -> None:
    assert chunk_bytes_for(total) == expected


def test_a_description_names_every_chunk(source: Path) -> None:
    found = describe(source, weights_digest=5)
    assert (found.total_bytes, found.weights_digest, num_chunks(found)) == (len(DATA), 5, 4)
    assert found.chunk_sha256[96:] == hashlib.sha256(piece(found, 3)).digest()
    check_description(found, max_bytes=len(DATA))


def test_a_description_outside_the_plan_is_refused(source: Path) -> None:
    found = describe(source)
    with pytest.raises(OversizedStreamError):
        check_description(found, max_bytes=len(DATA) - 1)
    with pytest.raises(OversizedStreamError):
        check_description(StateDescription(), max_bytes=len(DATA))
    with pytest.raises(MalformedFrameError, match="hashes"):
        check_description(
            StateDescription(
                total_bytes=len(DATA), chunk_bytes=found.chunk_bytes, chunk_sha256=b"x" * 96
            ),
            max_bytes=len(DATA),
        )
    with pytest.raises(MalformedFrameError, match="chunks of 1 bytes"):
        check_description(
            StateDescription(total_bytes=len(DATA), chunk_bytes=1), max_bytes=len(DATA)
        )


def test_a_partial_file_fills_in_any_order(source: Path, tmp_path: Path) -> None:
    found = describe(source)
    with PartialState(tmp_path / "partial" / "file", found) as partial:
        assert (partial.missing, partial.resumed_bytes) == (4, 0)
        for index in (3, 0, 2, 1):
            chunks = read_chunks(source, [index], chunk_bytes=found.chunk_bytes)
            partial.write(index, b"".join(c.data for c in chunks))
        assert partial.missing == 0
    assert partial.path.read_bytes() == DATA


def test_a_wrong_chunk_is_refused_and_not_kept(source: Path, tmp_path: Path) -> None:
    found = describe(source)
    with PartialState(tmp_path / "file", found) as partial:
        for wrong in (piece(found, 0)[:-1], piece(found, 1), piece(found, 0) + b"!"):
            with pytest.raises(ChecksumError, match="chunk 0"):
                partial.write(0, wrong)
        assert partial.missing == 4


def test_a_full_disk_keeps_what_has_come(source: Path, tmp_path: Path) -> None:
    description = describe(source)
    with PartialState(tmp_path / "partial", description) as partial:
        partial.write(0, piece(description, 0))
        disk.fill(3600)
        try:
            with pytest.raises(StorageError, match="No space left"):
                partial.write(1, piece(description, 1))
        finally:
            disk.fill(0)
        assert partial.have == {0}
        partial.write(1, piece(description, 1))
        assert partial.have == {0, 1}


def test_what_a_partial_file_holds_is_kept_over_a_restart(source: Path, tmp_path: Path) -> None:
    found, path = describe(source), tmp_path / "file"
    with PartialState(path, found) as partial:
        partial.write(1, piece(found, 1))
        partial.write(3, piece(found, 3))
    with path.open("r+b") as file:  # a write that was torn
        file.seek(found.chunk_bytes + 5)
        file.write(b"torn")
    with PartialState(path, found) as again:
        assert again.have == {3}
        assert again.resumed_bytes == len(piece(found, 3))


def test_a_partial_file_of_another_version_starts_anew(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"another" * 100_000)
    with PartialState(path, describe(source)) as partial:
        assert partial.missing == 4
    assert path.stat().st_size == len(DATA)


def test_a_file_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        describe(tmp_path / "nothing")
    with pytest.raises(StorageError):
        list(read_chunks(tmp_path / "nothing", [0], chunk_bytes=1))


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(bytes(3 * MIB))
    reading = read_chunks(path, [0], chunk_bytes=4 * MIB)
    next(reading)
    os.truncate(path, MIB)
    with pytest.raises(StorageError, match="cut short"):
        next(reading)


def test_closing_waits_for_a_write_under_way_and_ends_those_that_follow(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a descriptor that was given to another file meanwhile would be written to."""
    description = describe(source)
    partial = PartialState(tmp_path / "partial", description)
    writing, go_on = threading.Event(), threading.Event()
    pwrite = os.pwrite

    def slow(file: int, data: bytes, offset: int) -> int:
        writing.set()
        assert go_on.wait(10)
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    with ThreadPoolExecutor(2) as pool:
        write = pool.submit(partial.write, 0, piece(description, 0))
        assert writing.wait(10)
        close = pool.submit(partial.close)
        assert not close.done()
        go_on.set()
        write.result(10)
        close.result(10)
    with pytest.raises(StorageError):
        partial.write(1, piece(description, 1))
    assert partial.have == {0}


def test_a_partial_file_that_can_not_be_read_leaves_no_descriptor_open(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "partial"
    path.write_bytes(DATA)
    closed: list[int] = []
    close = os.close
    monkeypatch.setattr(os, "close", lambda file: (closed.append(file), close(file)))

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(StorageError, match="input/output"):
        PartialState(path, describe(source))
    assert closed
