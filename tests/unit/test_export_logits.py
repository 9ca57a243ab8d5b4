# SPDX-License-Identifier: Apache-2.0
"""From trained stages through the snapshot store to transformers: the same logits."""

import hashlib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from shoal.coordinator.export import export_run
from shoal.coordinator.snapshots import SnapshotStore
from shoal.node.stage import StageRuntime
from shoal.protocol.ids import RunId, Stage, Step
from shoal.protocol.scale import scale_exponent
from shoal.protocol.spec import (
    BatchSpec,
    DataManifest,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
    ShardRef,
)
from shoal.protocol.state_file import StateHeader, write_state

VOCABULARY = 50


def resolved(folder: Path) -> ResolvedRun:
    tokenizer = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(VOCABULARY - 1)} | {"<|endoftext|>": 49}, "w0")
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    shard = ShardRef(sha256="0" * 64, num_tokens=1000)
    return ResolvedRun(
        run_id=RunId("run-00000000"),
        spec=RunSpec(
            model=ModelSpec(
                dim=32,
                num_layers=3,
                num_heads=4,
                num_kv_heads=2,
                ffn_dim=48,
                seq_len=16,
                vocab_size=VOCABULARY,
            ),
            batch=BatchSpec(microbatches=2, microbatch_size=2),
            pipeline=PipelineSpec(stages=2, cuts=(2,)),
        ),
        data=DataManifest(
            vocab_size=VOCABULARY,
            token_bytes=2,
            train=(shard,),
            validation=(),
            tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        ),
    )


def train_a_step(stages: list[StageRuntime], run: ResolvedRun, tokens: torch.Tensor) -> None:
    exponent = scale_exponent(run.spec.tokens_per_step)
    for stage in stages:
        stage.initialise()
        stage.begin_step(1, exponent, 1.0)
    for microbatch in range(2):
        hidden = stages[0].forward(microbatch, tokens)
        _, gradient = stages[1].forward_backward_loss(microbatch, hidden, tokens.roll(-1, 1))
        assert gradient is not None
        stages[0].backward(microbatch, gradient)
    for stage in stages:
        stage.apply(
            stage.sums,
            step=1,
            num_tokens=run.spec.tokens_per_step,
            learning_rate=1e-2,
            clip_scale=1.0,
            scale_exponent=exponent,
        )


def test_transformers_computes_the_logits_of_the_trained_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = tmp_path / "run"
    folder.mkdir()
    run = resolved(folder)
    (folder / "run.json").write_bytes(run.to_json())
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    stages = [
        StageRuntime(run, stage, device=torch.device("cpu"), compute_dtype="fp32")
        for stage in (0, 1)
    ]
    train_a_step(stages, run, tokens)
    store = SnapshotStore(folder, run)
    for stage in stages:
        received = tmp_path / "received"
        header = StateHeader(
            run.run_id,
            run.digest,
            Stage(stage.spec.stage),
            Step(1),
            stage.weights_digest(),
        )
        tensors = {name: tensor.numpy() for name, tensor in stage.state_tensors().items()}
        write_state(received, tensors, header)
        store.add(1, stage.spec.stage, received)

    export_run(folder, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        theirs = model(tokens).logits
        ours = stages[1]._model(stages[0].evaluate(tokens))
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
