# SPDX-License-Identifier: Apache-2.0
"""Snapshots: complete or not there, verified, pruned, one digest whatever the cuts."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from shoal.coordinator.snapshots import SnapshotStore
from shoal.protocol.errors import (
    ChecksumError,
    StorageError,
    VersionError,
    WrongLeaseError,
    WrongShapeError,
)
from shoal.protocol.ids import RunId, Stage, Step
from shoal.protocol.spec import (
    DataManifest,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
    ShardRef,
)
from shoal.protocol.state_file import StateExpectation, StateHeader, chunks, read_state, write_state
from shoal.protocol.tensors import model_tensors, stage_tensors, weights_sha256

MODEL = ModelSpec(
    dim=16, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=24, seq_len=8, vocab_size=40
)


def make_run(*cuts: int, name: str = "run") -> ResolvedRun:
    shard = ShardRef(sha256="0" * 64, num_tokens=100)
    return ResolvedRun(
        run_id=RunId(f"{name}-00000000"),
        spec=RunSpec(
            name=name, model=MODEL, pipeline=PipelineSpec(stages=len(cuts) + 1, cuts=cuts)
        ),
        data=DataManifest(
            vocab_size=MODEL.vocab_size,
            token_bytes=2,
            train=(shard,),
            validation=(shard,),
            tokenizer_sha256="0" * 64,
        ),
    )


RUN = make_run(1)


def weight(name: str, shape: tuple[int, ...], step: int) -> np.ndarray:
    seed = [step, *name.encode()]
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def write_stage(path: Path, run: ResolvedRun, step: int, stage: int, digest: int = 7) -> Path:
    tensors = {}
    for tensor in stage_tensors(run.spec.model, run.stage(stage)):
        values = weight(tensor.name, tensor.shape, step)
        tensors[f"weights/{tensor.name}"] = values
        tensors[f"exp_avg/{tensor.name}"] = values * 2
        tensors[f"exp_avg_sq/{tensor.name}"] = values**2
    header = StateHeader(run.run_id, run.digest, Stage(stage), Step(step), digest)
    write_state(path, tensors, header)
    return path


def add(
    store: SnapshotStore, tmp_path: Path, step: int, stage: int, run: ResolvedRun = RUN
) -> bool:
    return store.add(step, stage, write_stage(tmp_path / "received", run, step, stage))


def fill(store: SnapshotStore, tmp_path: Path, *steps: int) -> None:
    for step in steps:
        for stage in (0, 1):
            add(store, tmp_path, step, stage)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "run", RUN)


def test_a_snapshot_is_complete_with_its_last_stage_and_survives_a_restart(
    store: SnapshotStore, tmp_path: Path
) -> None:
    assert not add(store, tmp_path, 12, 1)
    assert store.newest() is None
    assert add(store, tmp_path, 12, 0)
    for reopened in (store, SnapshotStore(tmp_path / "run", RUN)):
        assert reopened.complete_steps() == [12]
        assert reopened.newest() == 12
        assert reopened.manifest(12).next_step == 13
        assert reopened.path(12, 1) == tmp_path / "run/snapshots/step-00000012/stage-1.safetensors"
        reopened.verify(12)


def test_a_streamed_stage_is_stored(store: SnapshotStore, tmp_path: Path) -> None:
    for stage in (0, 1):
        source = write_stage(tmp_path / "source", RUN, 4, stage)
        with store.receiver(4, stage) as receiver:
            for chunk in chunks(source):
                receiver.feed(chunk)
            store.add(4, stage, receiver.finish(), sha256=receiver.sha256, weights_digest=7)
    store.verify(4)
    _, tensors = read_state(store.path(4, 1), StateExpectation.of(RUN, 1, 4))
    np.testing.assert_array_equal(
        tensors["weights/lm_head.weight"], weight("lm_head.weight", (40, 16), 4)
    )
    assert sorted(path.name for path in store.path(4, 0).parent.iterdir()) == [
        "manifest.json",
        "stage-0.safetensors",
        "stage-1.safetensors",
    ]


def test_an_incomplete_snapshot_is_removed_at_start_but_not_by_a_reader(
    store: SnapshotStore, tmp_path: Path
) -> None:
    fill(store, tmp_path, 2)
    add(store, tmp_path, 3, 0)
    folder = tmp_path / "run/snapshots/step-00000003"
    assert SnapshotStore(tmp_path / "run", RUN, read_only=True).complete_steps() == [2]
    assert folder.exists()
    assert SnapshotStore(tmp_path / "run", RUN).complete_steps() == [2]
    assert not folder.exists()


def test_a_second_copy_of_a_stage_changes_nothing(store: SnapshotStore, tmp_path: Path) -> None:
    fill(store, tmp_path, 2)
    before = store.path(2, 0).read_bytes()
    received = write_stage(tmp_path / "received", RUN, 2, 0, digest=8)
    assert store.add(2, 0, received)
    assert store.path(2, 0).read_bytes() == before
    assert not received.exists()
    store.verify(2)


def test_a_stage_that_does_not_belong_is_refused_and_removed(
    store: SnapshotStore, tmp_path: Path
) -> None:
    received = write_stage(tmp_path / "received", RUN, 2, 1)
    with pytest.raises(WrongLeaseError):
        store.add(2, 0, received)
    assert not received.exists()
    write_state(received, {}, StateHeader(RUN.run_id, RUN.digest, Stage(0), Step(2), 7))
    with pytest.raises(WrongShapeError):
        store.add(2, 0, received)
    with pytest.raises(ChecksumError, match="step record"):
        store.add(2, 0, write_stage(received, RUN, 2, 0, digest=7), weights_digest=8)
    assert store.complete_steps() == []


def test_a_full_disk_at_the_manifest_can_be_tried_again(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, tmp_path, 5, 0)
    received = write_stage(tmp_path / "received", RUN, 5, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="free some space"):
            store.add(5, 1, received)
    assert store.complete_steps() == []
    assert add(store, tmp_path, 5, 1)


def test_pruning_keeps_the_newest_and_the_previous_complete_snapshot(
    store: SnapshotStore, tmp_path: Path
) -> None:
    add(store, tmp_path, 1, 0)
    fill(store, tmp_path, 2, 4, 6)
    add(store, tmp_path, 8, 1)
    assert store.prune() == [2]
    assert store.complete_steps() == [4, 6]
    folders = sorted(path.name for path in (tmp_path / "run/snapshots").iterdir())
    assert folders == ["step-00000004", "step-00000006", "step-00000008"]
    assert add(store, tmp_path, 8, 0)


def test_a_file_that_is_being_sent_survives_pruning(store: SnapshotStore, tmp_path: Path) -> None:
    fill(store, tmp_path, 2, 4)
    content = store.path(2, 0).read_bytes()
    stream = chunks(store.path(2, 0))
    data = next(stream).data
    store.prune(keep=1)
    assert data + b"".join(chunk.data for chunk in stream) == content


def test_another_version_is_refused_unharmed(store: SnapshotStore, tmp_path: Path) -> None:
    fill(store, tmp_path, 2)
    manifest = store.path(2, 0).with_name("manifest.json")
    manifest.write_text(json.dumps({"snapshot_version": 9, "something": "new"}))
    with pytest.raises(VersionError, match="version 9, this release reads 1"):
        SnapshotStore(tmp_path / "run", RUN)
    assert store.path(2, 0).exists()


def test_another_runs_snapshots_are_refused(store: SnapshotStore, tmp_path: Path) -> None:
    fill(store, tmp_path, 2)
    with pytest.raises(StorageError, match="snapshot of run"):
        SnapshotStore(tmp_path / "run", make_run(2))


def test_a_damaged_snapshot_is_left_out_and_the_previous_one_is_newest(
    store: SnapshotStore, tmp_path: Path
) -> None:
    fill(store, tmp_path, 2, 4, 6)
    with store.path(4, 1).open("r+b") as file:
        file.truncate(100)
    store.path(6, 0).with_name("manifest.json").write_text("{")
    assert SnapshotStore(tmp_path / "run", RUN).newest() == 2


def test_a_flipped_bit_is_found_by_verify(store: SnapshotStore, tmp_path: Path) -> None:
    fill(store, tmp_path, 2)
    path = store.path(2, 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"stage-1\.safetensors: damaged"):
        store.verify(2)


def test_the_models_digest_does_not_depend_on_the_cuts(tmp_path: Path) -> None:
    digests = set()
    for run in (make_run(), make_run(1), make_run(2), make_run(1, 2)):
        store = SnapshotStore(tmp_path / f"run-{run.spec.pipeline.cuts}", run)
        for stage in range(run.spec.pipeline.stages):
            add(store, tmp_path, 3, stage, run)
        digests.add(store.weights_sha256(3))
    expected = weights_sha256((t, weight(t.name, t.shape, 3)) for t in model_tensors(MODEL))
    assert digests == {expected}


def test_asking_for_an_absent_snapshot_names_those_there_are(
    store: SnapshotStore, tmp_path: Path
) -> None:
    fill(store, tmp_path, 2)
    with pytest.raises(StorageError, match=r"no complete snapshot of step 3; there are \[2\]"):
        store.path(3, 0)
