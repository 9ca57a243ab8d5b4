# SPDX-License-Identifier: Apache-2.0
"""The run's snapshots: for some steps, the state of every stage.

    RUN/snapshots/step-00000012/stage-0.safetensors, stage-1.safetensors, …, manifest.json

The manifest is written last. A folder without one is incomplete: never offered, removed at start.
"""

import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.protocol.atomic_file import AtomicFile, fsync_folder, storage_error
from shoal.protocol.errors import ChecksumError, StorageError, VersionError
from shoal.protocol.ids import RunId, Step
from shoal.protocol.learned import learned_codec
from shoal.protocol.spec import ResolvedRun, canonical_json
from shoal.protocol.state_file import StateExpectation, StateReceiver, check_state, read_weights
from shoal.protocol.tensors import Fp32, TensorSpec, owned_tensors, weights_sha256
from shoal.version import SNAPSHOT_VERSION

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 20
_MAX_INCOMING = 2
"""Incomplete snapshots beside the one that comes in."""
_STEP_FOLDER = re.compile(r"step-(\d{8,})")

Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StageEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: int
    sha256: Hex64
    num_bytes: int
    weights_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """Tree hash of the weights, in hex."""


class _Versioned(BaseModel):
    snapshot_version: int


class Manifest(BaseModel):
    """What makes a snapshot complete."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    snapshot_version: int
    run_id: RunId
    run_digest: str
    step: int
    next_step: int
    """The data position: a run that starts here reads the samples of this step next."""
    stages: tuple[StageEntry, ...]


class SnapshotStore:
    """Snapshots of one run under its run folder. Safe to call from several threads.

    With `read_only` nothing is removed: for use beside a coordinator that runs.
    """

    def __init__(self, folder: Path, run: ResolvedRun, *, read_only: bool = False) -> None:
        """Raises `VersionError` when another release wrote a snapshot, `StorageError` when it is
        another run's; both leave everything as it is."""
        self._folder = folder / "snapshots"
        self._run = run
        self._num_stages = run.spec.pipeline.stages
        self._lock = threading.Lock()
        self._complete: dict[Step, Manifest] = {}
        self._incoming: dict[Step, dict[int, StageEntry]] = {}
        incomplete: list[Path] = []
        for step, path in self._step_folders():
            if not (path / _MANIFEST).exists():
                incomplete.append(path)
            elif (manifest := self._read_manifest(step, path)) is not None:
                self._complete[step] = manifest
        if not read_only:
            for path in incomplete:
                logger.info("removing the incomplete snapshot %s", path)
                shutil.rmtree(path, ignore_errors=True)
            for step in self._complete:
                for leftover in self._step_folder(step).glob(".*"):
                    leftover.unlink(missing_ok=True)

    # ---- in ------------------------------------------------------------------------------

    def receiver(self, step: int, stage: int) -> StateReceiver:
        """For a peer's stream; bounded by the stage's size. Give its file to `add`."""
        folder = self._step_folder(Step(step))
        path = folder / f".stage-{stage}.{secrets.token_hex(4)}.incoming"
        return StateReceiver(path, StateExpectation.of(self._run, stage, step).max_bytes)

    def partial_path(self, step: int, stage: int) -> Path:
        """For a state that comes in chunks and may be resumed. Give the whole one to `add`."""
        return self._step_folder(Step(step)) / f".stage-{stage}.partial"

    def add(
        self,
        step: int,
        stage: int,
        received: Path,
        *,
        sha256: str | None = None,
        weights_digest: int | None = None,
    ) -> bool:
        """Take a finished file as the stage's state at `step`; it is moved (so it must lie on the
        same file system), or removed when refused or not needed any more. Give `sha256` where a
        receiver has verified it, and the `weights_digest` of the step record.

        Returns whether the snapshot of `step` is complete now. Raises the errors of
        `read_state`, and `ChecksumError` for other weights than the record's.
        """
        step_ = Step(step)
        try:
            header = check_state(received, StateExpectation.of(self._run, stage, step))
            if weights_digest is not None and header.weights_digest != weights_digest:
                raise ChecksumError(
                    f"stage {stage} at step {step}: weights {header.weights_digest:016x}, "
                    f"the step record says {weights_digest:016x}."
                )
            entry = StageEntry(
                stage=stage,
                sha256=sha256 or _file_sha256(received),
                num_bytes=received.stat().st_size,
                weights_digest=f"{header.weights_digest:016x}",
            )
            with self._lock:
                stages = self._incoming.get(step_, {})
                if step_ not in self._complete and stage not in stages:
                    self._step_folder(step_).mkdir(parents=True, exist_ok=True)
                    os.replace(received, self._stage_path(step_, stage))
                    stages = stages | {stage: entry}
                    if len(stages) == self._num_stages:
                        self._complete[step_] = self._write_manifest(step_, stages)
                        self._incoming.pop(step_, None)
                    else:
                        self._incoming[step_] = stages
                        self._drop_stale(step_)
                return step_ in self._complete
        except OSError as error:
            raise storage_error(received, error) from error
        finally:
            received.unlink(missing_ok=True)

    # ---- out -----------------------------------------------------------------------------

    def complete_steps(self) -> list[int]:
        """Ascending."""
        with self._lock:
            return sorted(self._complete)

    def missing(self, step: int) -> list[int]:
        """Stages whose state at `step` hasn't come yet."""
        with self._lock:
            if step in self._complete:
                return []
            come = self._incoming.get(Step(step), {})
            return [stage for stage in range(self._num_stages) if stage not in come]

    def newest(self) -> int | None:
        return max(self.complete_steps(), default=None)

    def manifest(self, step: int) -> Manifest:
        """Raises `StorageError` when there is no complete snapshot of `step`."""
        with self._lock:
            manifest = self._complete.get(Step(step))
        if manifest is None:
            raise StorageError(
                f"{self._folder}: no complete snapshot of step {step}; "
                f"there are {self.complete_steps() or 'none'}."
            )
        return manifest

    def path(self, step: int, stage: int) -> Path:
        """The file of a complete snapshot. Raises `StorageError` as `manifest` does."""
        self.manifest(step)
        return self._stage_path(Step(step), stage)

    def verify(self, step: int) -> None:
        """Compare every file with the manifest's SHA-256. Raises `StorageError` naming the file."""
        for entry in self.manifest(step).stages:
            path = self.path(step, entry.stage)
            if _file_sha256(path) != entry.sha256:
                raise StorageError(
                    f"{path}: damaged (SHA-256 differs from the manifest's). "
                    f"Use another step; complete are {self.complete_steps()}."
                )

    def weights(self, step: int) -> Iterator[tuple[TensorSpec, Fp32]]:
        """All parameters of the run, stage after stage, each once, one at a time."""
        learned = learned_codec(self._run.spec.pipeline.boundary)
        for stage in range(self._num_stages):
            tensors = owned_tensors(self._run.spec.model, self._run.stage(stage), learned)
            yield from read_weights(self.path(step, stage), tensors)

    def weights_sha256(self, step: int) -> str:
        """The whole model's digest, whatever the cuts (`protocol.tensors.weights_sha256`)."""
        return weights_sha256(self.weights(step))

    def prune(self, keep: int = 2) -> list[int]:
        """Remove all but the newest `keep` complete snapshots, and incomplete ones older than
        those. Returns the complete steps removed. A file that is being sent stays readable."""
        assert keep >= 1
        with self._lock:
            kept = sorted(self._complete)[-keep:]
            removed = [step for step in sorted(self._complete) if step not in kept]
            stale = [step for step in self._incoming if kept and step < kept[0]]
            for step in removed:
                del self._complete[step]
            for step in stale:
                del self._incoming[step]
            try:
                for step in [*removed, *stale]:
                    folder = self._step_folder(step)
                    # First, so that an interrupted removal leaves an incomplete snapshot.
                    (folder / _MANIFEST).unlink(missing_ok=True)
                    shutil.rmtree(folder, ignore_errors=True)
            except OSError as error:
                raise storage_error(self._folder, error) from error
        return [int(step) for step in removed]

    # ---- files ---------------------------------------------------------------------------

    def _drop_stale(self, newest: Step) -> None:
        """Snapshots that never become complete don't pile up."""
        for step in [s for s in self._incoming if s != newest][:-_MAX_INCOMING]:
            del self._incoming[step]
            shutil.rmtree(self._step_folder(step), ignore_errors=True)

    def _step_folder(self, step: Step) -> Path:
        return self._folder / f"step-{step:08d}"

    def _stage_path(self, step: Step, stage: int) -> Path:
        return self._step_folder(step) / f"stage-{stage}.safetensors"

    def _step_folders(self) -> Iterator[tuple[Step, Path]]:
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.iterdir()):
            if (match := _STEP_FOLDER.fullmatch(path.name)) and path.is_dir():
                yield Step(int(match[1])), path

    def _write_manifest(self, step: Step, stages: dict[int, StageEntry]) -> Manifest:
        manifest = Manifest(
            snapshot_version=SNAPSHOT_VERSION,
            run_id=self._run.run_id,
            run_digest=self._run.digest,
            step=step,
            next_step=step + 1,
            stages=tuple(stages[stage] for stage in sorted(stages)),
        )
        folder = self._step_folder(step)
        fsync_folder(folder)  # the stage files' names, before the manifest vouches for them
        with AtomicFile(folder / _MANIFEST) as file:
            file.write(canonical_json(manifest.model_dump(mode="json")))
        fsync_folder(self._folder)
        return manifest

    def _read_manifest(self, step: Step, folder: Path) -> Manifest | None:
        """None for a damaged snapshot, which is left for a human to look at."""
        path = folder / _MANIFEST
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_MANIFEST_BYTES)
            version = _Versioned.model_validate_json(content).snapshot_version
            if version != SNAPSHOT_VERSION:
                raise VersionError(
                    f"{path}: snapshot version {version}, this release reads "
                    f"{SNAPSHOT_VERSION}. Use the release that wrote it; nothing was changed."
                )
            manifest = Manifest.model_validate_json(content)
        except OSError as error:
            raise storage_error(path, error) from error
        except ValidationError as error:
            logger.warning("ignoring %s: %s", path, error.errors()[0]["msg"])
            return None
        if (manifest.run_id, manifest.run_digest) != (self._run.run_id, self._run.digest):
            raise StorageError(
                f"{path}: a snapshot of run {manifest.run_id} ({manifest.run_digest[:12]}), "
                f"this is {self._run.run_id} ({self._run.digest[:12]}). Move it elsewhere."
            )
        problem = self._problem(step, manifest)
        if problem is not None:
            logger.warning("ignoring the snapshot %s: %s", folder, problem)
            return None
        return manifest

    def _problem(self, step: Step, manifest: Manifest) -> str | None:
        if manifest.step != step:
            return f"the manifest is for step {manifest.step}"
        if [entry.stage for entry in manifest.stages] != list(range(self._num_stages)):
            return "the manifest does not list every stage"
        for entry in manifest.stages:
            path = self._stage_path(step, entry.stage)
            size = path.stat().st_size if path.is_file() else 0
            if size != entry.num_bytes:
                return f"{path.name} has {size} bytes, expected {entry.num_bytes}"
        return None


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise storage_error(path, error) from error
