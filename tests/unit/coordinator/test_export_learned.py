# SPDX-License-Identifier: Apache-2.0
"""Exports of runs with a learned codec: folded where that is exact, refused by transformers where
it isn't."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from shoal.coordinator.export import export_run
from shoal.coordinator.snapshots import SnapshotStore
from shoal.node.stage import StageRuntime
from shoal.protocol.costs import run_parameters
from shoal.protocol.ids import RunId, Step
from shoal.protocol.spec import (
    DataManifest,
    ModelSpec,
    OptimizerSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
    ShardRef,
)
from shoal.protocol.state_file import StateHeader, write_state

MODEL = ModelSpec(
    dim=16, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=24, seq_len=8, vocab_size=4
)


class Trained:
    """A run folder with one snapshot, whose weights are far from their first values."""

    def __init__(self, folder: Path, boundary: str) -> None:
        torch.set_num_threads(1)
        folder.mkdir()
        tokenizer = Tokenizer(
            models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "<|endoftext|>": 3}, unk_token="<unk>")
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        shard = ShardRef(sha256="0" * 64, num_tokens=100)
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        self.run = ResolvedRun(
            run_id=RunId("run-00000000"),
            spec=RunSpec(
                model=MODEL,
                optimizer=OptimizerSpec(name="muon"),
                pipeline=PipelineSpec(stages=2, cuts=(1,), boundary=boundary),
            ),
            data=DataManifest(
                vocab_size=4, token_bytes=2, train=(shard,), validation=(shard,),
                tokenizer_sha256=digest,
            ),
        )  # fmt: skip
        (folder / "run.json").write_bytes(self.run.to_json())
        self.folder = folder
        self.stages = [
            StageRuntime(self.run, s, device=torch.device("cpu"), compute_dtype="fp32")
            for s in (0, 1)
        ]
        store = SnapshotStore(folder, self.run)
        for stage in self.stages:
            stage.initialise()
            for name, weights in stage.weights.items():
                if not name.startswith("boundary."):
                    noise = torch.Generator().manual_seed(len(name))
                    weights.add_(torch.randn(weights.shape, generator=noise) * 0.2)
                stage._state._constrain(name)
            path = folder / "received"
            tensors = {key: t.numpy() for key, t in stage.state_tensors().items()}
            number, digest = stage.spec.stage, stage.weights_digest()
            header = StateHeader(self.run.run_id, self.run.digest, number, Step(7), digest)
            write_state(path, tensors, header)
            store.add(7, number, path)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = tokens
            for stage in self.stages:
                x = stage._model(x, tokens)
        return x


@pytest.mark.parametrize("variant", ["", ":variant=projected"])
def test_transformers_computes_what_a_subspace_network_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    trained, out = Trained(tmp_path / "run", f"ssn:k=4{variant}"), tmp_path / "out"
    report = export_run(trained.folder, out)
    assert report.is_llama
    model = AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.tensor([[1, 2, 2, 1, 0, 3, 1, 2]])
    with torch.no_grad():
        theirs = model(tokens).logits
    ours = trained.logits(tokens)
    assert ours.std() > 0.01
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    card = (out / "README.md").read_text()
    assert "from_pretrained" in card
    assert "folded into these weights" in card


@pytest.mark.parametrize(
    ("boundary", "extra"),
    [
        ("resbm:b=4", {"boundary.0.encoder.0.weight", "boundary.0.decoder.1.weight"}),
        ("linear:b=4", {"boundary.0.encoder.0.weight"}),
        ("mapl:r=4", {"boundary.0.projection", "anchors.0.basis", "anchors.1.weight"}),
        ("mapl:r=4:proj=fixed:anchors=static", {"boundary.0.projection", "anchors.table"}),
    ],
)
def test_other_codecs_are_exported_with_their_halves_and_transformers_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boundary: str, extra: set[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    trained, out = Trained(tmp_path / "run", boundary), tmp_path / "out"
    report = export_run(trained.folder, out)
    assert not report.is_llama
    tensors = load_file(out / "model.safetensors")
    assert extra <= tensors.keys()
    for stage in trained.stages:
        for name, weights in stage.weights.items():
            np.testing.assert_array_equal(tensors[name], weights.numpy())
        for name, frozen in stage._model.named_buffers():
            exported = "anchors.table" if name.endswith(".table") else name
            np.testing.assert_array_equal(tensors[exported], frozen.numpy())
    config = json.loads((out / "config.json").read_text())
    assert (config["boundary"], config["cuts"]) == (boundary, [1])
    with pytest.raises((ValueError, KeyError)):
        AutoModelForCausalLM.from_pretrained(out)
    card = (out / "README.md").read_text()
    assert "transformers alone cannot load this model" in card
    assert "from_pretrained" not in card


def test_a_mirrored_projection_is_exported_once_and_counted_once(tmp_path: Path) -> None:
    trained = Trained(tmp_path / "run", "mapl:r=4:anchors=none")
    report = export_run(trained.folder, tmp_path / "out")
    stages = [trained.run.stage(s) for s in (0, 1)]
    assert report.num_parameters == run_parameters(trained.run.spec, stages)


def test_a_run_without_a_learned_codec_is_a_llama_as_it_is(tmp_path: Path) -> None:
    trained = Trained(tmp_path / "run", "bf16")
    assert export_run(trained.folder, tmp_path / "out").is_llama
    assert "folded" not in (tmp_path / "out" / "README.md").read_text()
