# SPDX-License-Identifier: Apache-2.0
"""The exported folder, as transformers sees it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.coordinator.export import export_run
from shoal.coordinator.snapshots import SnapshotStore
from shoal.protocol.errors import ConfigError, StorageError
from shoal.protocol.ids import RunId, Stage, Step
from shoal.protocol.spec import (
    DataManifest,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
    ShardRef,
)
from shoal.protocol.state_file import StateHeader, write_state
from shoal.protocol.tensors import model_tensors, stage_tensors

MODEL = ModelSpec(
    dim=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=24,
    seq_len=8,
    vocab_size=4,
    rope_theta=500.0,
    norm_eps=1e-4,
)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([*name.encode()]).standard_normal(shape).astype(np.float32)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    tokenizer = Tokenizer(
        models.WordLevel({"<unk>": 0, "fish": 1, "swim": 2, "<|endoftext|>": 3}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    shard = ShardRef(sha256="0" * 64, num_tokens=100)
    run = ResolvedRun(
        run_id=RunId("run-00000000"),
        spec=RunSpec(model=MODEL, pipeline=PipelineSpec(stages=2, cuts=(1,))),
        data=DataManifest(
            vocab_size=MODEL.vocab_size,
            token_bytes=2,
            train=(shard,),
            validation=(shard,),
            tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        ),
    )
    (folder / "run.json").write_bytes(run.to_json())
    store = SnapshotStore(folder, run)
    for stage in (0, 1):
        tensors = {}
        for tensor in stage_tensors(MODEL, run.stage(stage)):
            values = weight(tensor.name, tensor.shape)
            tensors[f"weights/{tensor.name}"] = values
            tensors[f"exp_avg/{tensor.name}"] = values * 2
            tensors[f"exp_avg_sq/{tensor.name}"] = values**2
        path = tmp_path / "received"
        write_state(path, tensors, StateHeader(run.run_id, run.digest, Stage(stage), Step(20), 0))
        store.add(20, stage, path)
    return folder


@pytest.mark.parametrize("max_shard_bytes", [4_000_000_000, 3000])
def test_transformers_loads_every_weight_equal(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_shard_bytes: int
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    out = tmp_path / "out"
    report = export_run(run_folder, out, max_shard_bytes=max_shard_bytes)
    assert (report.num_shards > 1) == (max_shard_bytes == 3000)

    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(info.values())
    state = model.state_dict()
    assert state.keys() == {tensor.name for tensor in model_tensors(MODEL)}
    for name, values in state.items():
        assert values.dtype == torch.float32
        np.testing.assert_array_equal(values.numpy(), weight(name, tuple(values.shape)))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 500.0
    assert model.config.rms_norm_eps == 1e-4
    assert model.config.max_position_embeddings == 8
    assert model.generation_config.eos_token_id == 3

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("fish swim<|endoftext|>")["input_ids"] == [1, 2, 3]
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 3


def test_the_report_and_the_progress_add_up(run_folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = export_run(
        run_folder,
        tmp_path / "out",
        lambda written, total: seen.append((written, total)),
        max_shard_bytes=3000,
    )
    num_parameters = sum(tensor.num_elements for tensor in model_tensors(MODEL))
    assert report.step == 20
    assert report.num_parameters == num_parameters
    assert report.num_bytes == sum(path.stat().st_size for path in report.folder.iterdir())
    assert len(seen) == report.num_shards
    assert seen == sorted(seen)
    assert seen[-1] == (4 * num_parameters, 4 * num_parameters)
    assert report.weights_sha256 in (report.folder / "README.md").read_text()


def test_a_folder_that_holds_something_is_refused(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_run(run_folder, out)
    assert [path.name for path in out.iterdir()] == ["precious"]
    (out / "precious").unlink()
    assert export_run(run_folder, out).step == 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("snapshots/step-00000020/stage-1.safetensors", "damaged"),
        ("tokenizer.json", "not the tokenizer"),
        ("run.json", "damaged"),
    ],
)
def test_a_damaged_run_folder_is_named_and_nothing_is_written(
    run_folder: Path, tmp_path: Path, name: str, message: str
) -> None:
    content = bytearray((run_folder / name).read_bytes())
    content[-1] ^= 1
    (run_folder / name).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StorageError, match=message):
        export_run(run_folder, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_without_a_snapshot_says_when_there_will_be_one(
    run_folder: Path, tmp_path: Path
) -> None:
    (run_folder / "snapshots/step-00000020/manifest.json").unlink()
    with pytest.raises(StorageError, match="after step 50"):
        export_run(run_folder, tmp_path / "out")


def test_an_interrupted_export_leaves_nothing(run_folder: Path, tmp_path: Path) -> None:
    def interrupt(written: int, total: int) -> None:
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        export_run(run_folder, tmp_path / "out", interrupt)
    assert sorted(tmp_path.iterdir()) == before
