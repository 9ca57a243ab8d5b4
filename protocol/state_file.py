# SPDX-License-Identifier: Apache-2.0
"""The format of a stage's state, on disk and between nodes: weights and moments at one step.

One safetensors file. For each parameter NAME of `stage_tensors`, three fp32 tensors "weights/NAME",
"exp_avg/NAME", "exp_avg_sq/NAME" (the last one only where its update rule keeps it: see
protocol/update_rules.py); the metadata holds `StateHeader` and a checksum of the data. The same
state always gives the same bytes, so files are compared by their SHA-256.

`chunks` and `StateReceiver` carry a file over gRPC. All functions block on the disk.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash
from safetensors import SafetensorError, safe_open

from shoal.protocol.atomic_file import AtomicFile, storage_error
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
from shoal.protocol.learned import learned_codec
from shoal.protocol.proto.peer_pb2 import StateChunk
from shoal.protocol.proto.types_pb2 import (
    STATE_PART_ALL,
    STATE_PART_MOMENTS,
    STATE_PART_UNSPECIFIED,
    STATE_PART_WEIGHTS,
    StatePart,
)
from shoal.protocol.spec import ResolvedRun
from shoal.protocol.tensors import Fp32, TensorSpec, little_endian_bytes, stage_tensors
from shoal.protocol.update_rules import KINDS, absent_state
from shoal.version import SNAPSHOT_VERSION

PARTS = {
    STATE_PART_UNSPECIFIED: KINDS,
    STATE_PART_ALL: KINDS,
    STATE_PART_WEIGHTS: KINDS[:1],
    STATE_PART_MOMENTS: KINDS[1:],
}
"""What a file of a part of the state holds."""
MAX_HEADER_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
_CHECKSUM = "data_xxh3_128"


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Whose state a file holds. Stored as strings in the file's metadata."""

    run_id: RunId
    run_digest: str
    stage: Stage
    step: Step
    """Committed steps contained in the state."""
    weights_digest: int
    """Tree hash of the weights (uint64), as in the step record."""
    snapshot_version: int = SNAPSHOT_VERSION

    def to_metadata(self) -> dict[str, str]:
        return {
            "snapshot_version": str(self.snapshot_version),
            "run_id": self.run_id,
            "run_digest": self.run_digest,
            "stage": str(self.stage),
            "step": str(self.step),
            "weights_digest": f"{self.weights_digest:016x}",
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """Raises `KeyError` or `ValueError` for what isn't one."""
        return cls(
            run_id=RunId(metadata["run_id"]),
            run_digest=metadata["run_digest"],
            stage=Stage(int(metadata["stage"])),
            step=Step(int(metadata["step"])),
            weights_digest=int(metadata["weights_digest"], 16),
            snapshot_version=int(metadata["snapshot_version"]),
        )


@dataclass(frozen=True, slots=True)
class StateExpectation:
    """What a file must hold to be taken. `step` None takes any step."""

    run_id: RunId
    run_digest: str
    stage: Stage
    step: Step | None
    tensors: tuple[TensorSpec, ...]
    """The stage's parameters, without the "weights/" and other prefixes."""
    kinds: tuple[str, ...] = KINDS
    """What of each parameter the file holds."""
    absent: frozenset[str] = frozenset()
    """Full names that it doesn't hold, since their update rule keeps no such moment."""

    @classmethod
    def of(
        cls,
        run: ResolvedRun,
        stage: int,
        step: int | None = None,
        *,
        part: StatePart.ValueType = STATE_PART_ALL,
    ) -> Self:
        stage_spec = run.stage(stage)
        learned = learned_codec(run.spec.pipeline.boundary)
        tensors = tuple(stage_tensors(run.spec.model, stage_spec, learned))
        return cls(
            run_id=run.run_id,
            run_digest=run.digest,
            stage=stage_spec.stage,
            step=None if step is None else Step(step),
            tensors=tensors,
            kinds=PARTS[part],
            absent=absent_state(run.spec, tensors),
        )

    @property
    def max_bytes(self) -> int:
        """No file that meets the expectation is larger."""
        data = sum(len(self.kinds) * tensor.num_bytes for tensor in self.tensors)
        return data + MAX_HEADER_BYTES + 8

    def check(self, header: StateHeader, path: Path) -> None:
        """Raises `WrongRunError`, `WrongLeaseError` (stage) or `WrongStepError`."""
        if (header.run_id, header.run_digest) != (self.run_id, self.run_digest):
            raise WrongRunError(
                f"{path}: state of run {header.run_id} ({header.run_digest[:12]}), "
                f"expected {self.run_id} ({self.run_digest[:12]})."
            )
        if header.stage != self.stage:
            raise WrongLeaseError(f"{path}: stage {header.stage}, expected stage {self.stage}.")
        if self.step is not None and header.step != self.step:
            raise WrongStepError(f"{path}: state at step {header.step}, expected {self.step}.")

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
        """Raises `WrongShapeError` unless names and shapes are exactly the expected ones."""
        expected = {f"{kind}/{t.name}": t.shape for kind in self.kinds for t in self.tensors}
        expected = {name: shape for name, shape in expected.items() if name not in self.absent}
        for name in sorted(expected.keys() | shapes.keys()):
            if expected.get(name) != shapes.get(name):
                raise WrongShapeError(
                    f"{path}: tensor {name!r} is {_shape(shapes.get(name))}, "
                    f"expected {_shape(expected.get(name))}."
                )


def write_state(
    path: Path, tensors: Mapping[str, Fp32], header: StateHeader, *, durable: bool = True
) -> None:
    """Write atomically and durably; `tensors` have their full names ("weights/…"). Not `durable`:
    for scratch files, which nobody looks for after a crash.

    Not through safetensors' own writer: that one orders the metadata at random, and copies each
    tensor. Raises `StorageError` (disk full, not writable), leaving no temporary file.
    """
    names = sorted(tensors)
    checksum = xxhash.xxh3_128()
    entries: dict[str, object] = {}
    offset = 0
    for name in names:
        values = tensors[name]
        assert values.dtype == "float32", f"{name} is {values.dtype}"
        checksum.update(little_endian_bytes(values))
        entries[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    metadata = header.to_metadata() | {_CHECKSUM: checksum.hexdigest()}
    encoded = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format wants the data aligned
    assert len(encoded) <= MAX_HEADER_BYTES
    with AtomicFile(path, durable=durable) as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in names:
            file.write(little_endian_bytes(tensors[name]))


def read_header(path: Path) -> StateHeader:
    """Raises `StorageError` (absent, damaged) or `VersionError`; never changes the file."""
    with _opened(path) as file:
        return _header(file, path)


def check_state(path: Path, expect: StateExpectation) -> StateHeader:
    """Check header, names and shapes without reading the data. Errors as `read_state`."""
    with _opened(path) as file:
        return _checked_header(file, path, expect)


def read_state(path: Path, expect: StateExpectation) -> tuple[StateHeader, dict[str, Fp32]]:
    """Header and tensors by full name, after checking everything against `expect`.

    Raises `StorageError` (absent, damaged), `VersionError`, `WrongRunError`, `WrongLeaseError`,
    `WrongStepError`, `WrongShapeError`; shapes are checked before data is read.
    """
    with _opened(path) as file:
        header = _checked_header(file, path, expect)
        checksum = xxhash.xxh3_128()
        tensors: dict[str, Fp32] = {}
        for name in file.offset_keys():  # the order in which the data lies
            tensors[name] = file.get_tensor(name)
            checksum.update(little_endian_bytes(tensors[name]))
        if checksum.hexdigest() != file.metadata().get(_CHECKSUM):
            raise _damaged(path, "data and checksum differ")
        return header, tensors


def read_weights(path: Path, tensors: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, Fp32]]:
    """Only the weights, one at a time, in the order of `tensors`. Raises `StorageError`."""
    with _opened(path) as file:
        for tensor in tensors:
            yield tensor, file.get_tensor(f"weights/{tensor.name}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open with a bounded header; the library then checks offsets against the file's length."""
    try:
        with path.open("rb") as raw:
            header_bytes = int.from_bytes(raw.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise _damaged(path, f"header of {header_bytes} bytes")
        with safe_open(path, framework="np") as file:
            yield file
    except SafetensorError as error:
        raise _damaged(path, str(error)) from None
    except OSError as error:
        raise storage_error(path, error) from error


def _header(file: Any, path: Path) -> StateHeader:
    metadata = file.metadata() or {}
    version = metadata.get("snapshot_version")
    if version is not None and version != str(SNAPSHOT_VERSION):
        raise VersionError(
            f"{path}: snapshot version {version[:20]}, this release reads {SNAPSHOT_VERSION}. "
            "Use the release that wrote it; the file is unchanged."
        )
    try:
        return StateHeader.from_metadata(metadata)
    except (KeyError, ValueError) as error:
        raise _damaged(path, f"no valid state header: {error!r:.80}") from None


def _checked_header(file: Any, path: Path, expect: StateExpectation) -> StateHeader:
    header = _header(file, path)
    expect.check(header, path)
    shapes = {}
    for name in file.offset_keys():
        part = file.get_slice(name)
        if part.get_dtype() != "F32":
            raise WrongShapeError(f"{path}: tensor {name!r} is {part.get_dtype()}, expected F32.")
        shapes[name] = tuple(part.get_shape())
    expect.check_shapes(shapes, path)
    return header


def _damaged(path: Path, cause: str) -> StorageError:
    return StorageError(
        f"{path}: damaged ({cause}). Remove the file; the state comes back from a replica or "
        "another snapshot."
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


# ---- over gRPC ---------------------------------------------------------------------------


def chunks(path: Path, *, sha256: bytes | None = None, offset: int = 0) -> Iterator[StateChunk]:
    """A file in messages of 1 MiB, from `offset` on; total and SHA-256 go with the first one.

    Reads the file twice unless `sha256` is known. Goes on to the end even when the file is
    removed meanwhile. Raises `StorageError`.
    """
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            if sha256 is None:
                sha256 = hashlib.file_digest(file, "sha256").digest()
            file.seek(offset)
            first = True
            while data := file.read(CHUNK_BYTES):
                if first:
                    yield StateChunk(total_bytes=total, sha256=sha256, offset=offset, data=data)
                else:
                    yield StateChunk(offset=offset, data=data)
                first = False
                offset += len(data)
    except OSError as error:
        raise storage_error(path, error) from error


class StateReceiver:
    """Puts a stream of chunks together; `path` appears only when everything checked out.

    Any error ends it and removes the temporary file. As a context manager it discards whatever
    is not finished.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._file: AtomicFile | None = None
        self._digest = hashlib.sha256()
        self._total = 0
        self._sha256 = b""
        self._offset = 0

    @property
    def offset(self) -> int:
        """Bytes received so far: where the next chunk must begin."""
        return self._offset

    @property
    def total_bytes(self) -> int:
        """As announced by the first chunk; 0 before."""
        return self._total

    @property
    def sha256(self) -> str:
        """In hex, as announced by the first chunk and verified by `finish`."""
        return self._sha256.hex()

    def feed(self, chunk: StateChunk) -> None:
        """Raises `MalformedFrameError` (order), `OversizedStreamError` or `StorageError`."""
        try:
            self._check(chunk)
            if self._file is None:
                self._file = AtomicFile(self.path)
            self._file.write(chunk.data)
        except BaseException:
            self.discard()
            raise
        self._digest.update(chunk.data)
        self._offset += len(chunk.data)

    def finish(self) -> Path:
        """Make the file durable. Raises `TruncatedStreamError`, `ChecksumError`, `StorageError`."""
        try:
            if self._file is None or self._offset < self._total:
                raise TruncatedStreamError(
                    f"{self.path.name}: the stream ended after {self._offset} of "
                    f"{self._total} bytes."
                )
            if self._digest.digest() != self._sha256:
                raise ChecksumError(
                    f"{self.path.name}: SHA-256 is {self._digest.hexdigest()}, "
                    f"announced was {self.sha256}."
                )
            self._file.commit()
        except BaseException:
            self.discard()
            raise
        return self.path

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()

    def _check(self, chunk: StateChunk) -> None:
        name = self.path.name
        if self._file is None:
            if not 0 < chunk.total_bytes <= self._max_bytes:
                raise OversizedStreamError(
                    f"{name}: {chunk.total_bytes} bytes announced, "
                    f"the plan allows 1 to {self._max_bytes}."
                )
            if len(chunk.sha256) != 32:
                raise MalformedFrameError(f"{name}: the first chunk carries no SHA-256.")
            self._total, self._sha256 = chunk.total_bytes, chunk.sha256
        elif chunk.total_bytes or chunk.sha256:
            raise MalformedFrameError(f"{name}: a second header at byte {self._offset}.")
        if not chunk.data:
            raise MalformedFrameError(f"{name}: an empty chunk at byte {self._offset}.")
        if chunk.offset != self._offset:
            raise MalformedFrameError(
                f"{name}: a chunk for byte {chunk.offset}, expected byte {self._offset}."
            )
        if len(chunk.data) > CHUNK_BYTES or self._offset + len(chunk.data) > self._total:
            raise OversizedStreamError(
                f"{name}: {len(chunk.data)} bytes at {self._offset} of {self._total}."
            )
