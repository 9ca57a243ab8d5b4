# SPDX-License-Identifier: Apache-2.0
"""The state file: format, refusals, interrupted writes, and its way over a stream."""

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from shoal.protocol import state_file
from shoal.protocol.errors import (
    ChecksumError,
    MalformedFrameError,
    OversizedStreamError,
    StorageError,
    TruncatedStreamError,
    VersionError,
    WrongLeaseError,
    WrongRunError,
    WrongShapeError,
    WrongStepError,
)
from shoal.protocol.ids import RunId, Stage, Step
from shoal.protocol.proto.peer_pb2 import StateChunk
from shoal.protocol.proto.types_pb2 import (
    STATE_PART_MOMENTS,
    STATE_PART_WEIGHTS,
    StatePart,
)
from shoal.protocol.state_file import (
    PARTS,
    StateExpectation,
    StateHeader,
    StateReceiver,
    check_state,
    chunks,
    read_header,
    read_state,
    write_state,
)
from shoal.protocol.tensors import TensorSpec

HEADER = StateHeader(
    run_id=RunId("run-0badcafe"),
    run_digest="d" * 64,
    stage=Stage(1),
    step=Step(12),
    weights_digest=2**64 - 2,
)
TENSORS = (TensorSpec("a.weight", (3, 4)), TensorSpec("b.weight", (5,)))
EXPECT = StateExpectation(HEADER.run_id, HEADER.run_digest, HEADER.stage, HEADER.step, TENSORS)


def state(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        f"{kind}/{tensor.name}": random.standard_normal(tensor.shape).astype(np.float32)
        for kind in ("weights", "exp_avg", "exp_avg_sq")
        for tensor in TENSORS
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "stage-1.safetensors"
    write_state(path, state(), HEADER)
    return path


def test_state_comes_back_as_it_was_written(path: Path) -> None:
    header, tensors = read_state(path, EXPECT)
    assert header == read_header(path) == HEADER
    assert tensors.keys() == state().keys()
    for name, values in state().items():
        assert tensors[name].dtype == np.float32
        np.testing.assert_array_equal(tensors[name], values)


def test_the_library_reads_what_we_write(path: Path) -> None:
    for name, values in safetensors.numpy.load_file(path).items():
        np.testing.assert_array_equal(values, state()[name])


def test_the_same_state_gives_the_same_bytes_in_whatever_order_it_is_given(path: Path) -> None:
    other = path.with_name("other")
    write_state(other, dict(reversed(state().items())), HEADER)
    assert other.read_bytes() == path.read_bytes()


def test_a_strided_tensor_is_written_in_row_major_order(path: Path) -> None:
    tensors = state()
    tensors["weights/a.weight"] = np.asfortranarray(tensors["weights/a.weight"])
    write_state(path, tensors, HEADER)
    _, read = read_state(path, EXPECT)
    np.testing.assert_array_equal(read["weights/a.weight"], state()["weights/a.weight"])


@pytest.mark.parametrize(
    ("expect", "error"),
    [
        (replace(EXPECT, run_id=RunId("run-other")), WrongRunError),
        (replace(EXPECT, run_digest="e" * 64), WrongRunError),
        (replace(EXPECT, stage=Stage(0)), WrongLeaseError),
        (replace(EXPECT, step=Step(13)), WrongStepError),
        (replace(EXPECT, tensors=TENSORS[:1]), WrongShapeError),
        (replace(EXPECT, tensors=(*TENSORS, TensorSpec("c", (1,)))), WrongShapeError),
        (replace(EXPECT, tensors=(TensorSpec("a.weight", (4, 3)), TENSORS[1])), WrongShapeError),
    ],
)
def test_a_state_other_than_expected_is_refused(
    path: Path, expect: StateExpectation, error: type[Exception]
) -> None:
    for read in (read_state, check_state):
        with pytest.raises(error):
            read(path, expect)


@pytest.mark.parametrize("part", [STATE_PART_WEIGHTS, STATE_PART_MOMENTS])
def test_a_part_of_the_state_is_read_as_that_part_only(
    path: Path, part: StatePart.ValueType
) -> None:
    kinds = PARTS[part]
    tensors = {name: t for name, t in state().items() if name.partition("/")[0] in kinds}
    write_state(path, tensors, HEADER, durable=False)
    assert read_state(path, replace(EXPECT, kinds=kinds))[1].keys() == tensors.keys()
    with pytest.raises(WrongShapeError):
        read_state(path, EXPECT)


def test_any_step_is_taken_when_none_is_expected(path: Path) -> None:
    assert read_state(path, replace(EXPECT, step=None))[0].step == 12


def test_another_dtype_is_refused(path: Path) -> None:
    tensors = {name: values.astype(np.float16) for name, values in state().items()}
    safetensors.numpy.save_file(tensors, path, metadata=HEADER.to_metadata())
    with pytest.raises(WrongShapeError, match="F16"):
        read_state(path, EXPECT)


def test_another_version_is_named_and_the_file_is_left_alone(path: Path) -> None:
    write_state(path, state(), replace(HEADER, snapshot_version=7))
    before = path.read_bytes()
    for read in (lambda: read_header(path), lambda: read_state(path, EXPECT)):
        with pytest.raises(VersionError, match=r"version 7, this release reads 1\b"):
            read()
    assert path.read_bytes() == before


def _truncate(content: bytes) -> bytes:
    return content[:-1]


def _flip_a_data_bit(content: bytes) -> bytes:
    return content[:-10] + bytes([content[-10] ^ 1]) + content[-9:]


def _claim_a_huge_header(content: bytes) -> bytes:
    return (1 << 40).to_bytes(8, "little") + content[8:]


def _lose_the_metadata(content: bytes) -> bytes:
    return safetensors.numpy.save(safetensors.numpy.load(content))


def _empty(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip_a_data_bit,
        _claim_a_huge_header,
        _lose_the_metadata,
        _empty,
    ],
)
def test_a_damaged_file_is_a_storage_error(path: Path, damage: Callable[[bytes], bytes]) -> None:
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StorageError, match="damaged"):
        read_state(path, EXPECT)


def test_a_header_over_the_bound_is_not_parsed(path: Path) -> None:
    metadata = HEADER.to_metadata() | {"padding": "x" * state_file.MAX_HEADER_BYTES}
    safetensors.numpy.save_file(state(), path, metadata)
    with pytest.raises(StorageError, match=r"damaged \(header of \d+ bytes\)"):
        read_header(path)


def test_an_absent_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        read_header(tmp_path / "absent")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_previous_state_and_no_temporary_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = path.read_bytes()
    monkeypatch.setattr(os, call, full)
    with pytest.raises(StorageError, match=r"No space left on device; free some space"):
        write_state(path, state(seed=1), HEADER)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


# ---- streams -----------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(np.random.default_rng(0).bytes(2 * state_file.CHUNK_BYTES + 77))
    return path


def receive(stream: list[StateChunk], path: Path, max_bytes: int = 1 << 30) -> Path:
    receiver = StateReceiver(path, max_bytes)
    for chunk in stream:
        receiver.feed(chunk)
    return receiver.finish()


def test_a_streamed_file_arrives_whole(large: Path, tmp_path: Path) -> None:
    stream = list(chunks(large))
    assert [len(chunk.data) for chunk in stream] == [1 << 20, 1 << 20, 77]
    assert [chunk.total_bytes for chunk in stream] == [large.stat().st_size, 0, 0]
    out = receive(stream, tmp_path / "out" / "copy")
    assert out.read_bytes() == large.read_bytes()
    assert list(out.parent.iterdir()) == [out]


def test_chunks_can_begin_in_the_middle(large: Path) -> None:
    first, *_ = chunks(large, offset=1000)
    assert first.offset == 1000
    assert first.data == large.read_bytes()[1000 : 1000 + (1 << 20)]
    assert first.sha256 == hashlib.sha256(large.read_bytes()).digest()


def _edit(index: int, **fields: object) -> Callable[[list[StateChunk]], list[StateChunk]]:
    def edit(stream: list[StateChunk]) -> list[StateChunk]:
        for name, value in fields.items():
            setattr(stream[index], name, value)
        return stream

    return edit


@pytest.mark.parametrize(
    ("tamper", "error"),
    [
        (lambda s: s[:2], TruncatedStreamError),
        (lambda s: [], TruncatedStreamError),
        (lambda s: [s[0], s[2], s[1]], MalformedFrameError),
        (lambda s: [s[0], s[0]], MalformedFrameError),
        (lambda s: [s[0], s[1], s[1]], MalformedFrameError),
        (lambda s: s[1:], OversizedStreamError),
        (lambda s: [*s, StateChunk(offset=(2 << 20) + 77, data=b"x")], OversizedStreamError),
        (_edit(0, total_bytes=1 << 40), OversizedStreamError),
        (_edit(0, sha256=b""), MalformedFrameError),
        (_edit(0, sha256=bytes(32)), ChecksumError),
        (_edit(1, data=bytes(1 << 20)), ChecksumError),
        (_edit(1, data=b""), MalformedFrameError),
        (_edit(1, data=bytes((1 << 20) + 1)), OversizedStreamError),
        (_edit(1, total_bytes=5), MalformedFrameError),
    ],
)
def test_a_bad_stream_is_refused_and_leaves_nothing(
    large: Path,
    tmp_path: Path,
    tamper: Callable[[list[StateChunk]], list[StateChunk]],
    error: type[Exception],
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(error):
        receive(tamper(list(chunks(large))), out / "copy")
    assert list(out.iterdir()) == []


def test_a_stream_larger_than_the_plan_allows_is_refused_at_its_first_chunk(
    large: Path, tmp_path: Path
) -> None:
    receiver = StateReceiver(tmp_path / "copy", max_bytes=large.stat().st_size - 1)
    with pytest.raises(OversizedStreamError, match="the plan allows"):
        receiver.feed(next(chunks(large)))


def test_an_abandoned_stream_leaves_nothing(large: Path, tmp_path: Path) -> None:
    with StateReceiver(tmp_path / "out" / "copy", 1 << 30) as receiver:
        receiver.feed(next(chunks(large)))
        assert receiver.offset == 1 << 20
    assert list((tmp_path / "out").iterdir()) == []
