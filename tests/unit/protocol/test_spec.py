# SPDX-License-Identifier: Apache-2.0
"""RUN.toml: what is read, what is refused and how that is said, and what the digest covers."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.protocol.errors import ConfigError, VersionError
from shoal.protocol.ids import RunId
from shoal.protocol.spec import (
    DataManifest,
    ResolvedRun,
    RunSpec,
    ShardRef,
    load_run_spec,
    parse_spec,
)
from shoal.version import RUN_SPEC_VERSION

SHARD = ShardRef(sha256="0" * 64, num_tokens=1000)


def resolved(raw: dict[str, Any] | None = None, *, vocab_size: int = 512) -> ResolvedRun:
    spec = RunSpec.model_validate(
        raw or {"model": {"vocab_size": vocab_size}, "pipeline": {"cuts": [2]}}
    )
    data = DataManifest(
        vocab_size=vocab_size,
        token_bytes=2,
        train=(SHARD,),
        validation=(SHARD,),
        tokenizer_sha256="1" * 64,
    )
    return ResolvedRun(run_id=RunId("tiny-0a1b2c3d"), spec=spec, data=data)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---- RUN.toml ----------------------------------------------------------------------------


def test_empty_file_is_a_run_with_all_defaults(tmp_path: Path) -> None:
    assert load_run_spec(write(tmp_path, "")) == RunSpec()


def test_fields_are_read(tmp_path: Path) -> None:
    text = 'name = "tiny"\nsteps = 7\n[model]\ndim = 64\n[pipeline]\nstages = 3\ncuts = [1, 3]\n'
    spec = load_run_spec(write(tmp_path, text))
    assert (spec.name, spec.steps, spec.model.dim, spec.pipeline.cuts) == ("tiny", 7, 64, (1, 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 5", "stepz: unknown key; did you mean 'steps'"),
        ("[model]\nnum_layer = 2", "model.num_layer: unknown key; did you mean 'num_layers'"),
        ("[fault]\nxyzzy = 2", "xyzzy: unknown key; known keys: snapshot_every"),
        ("steps = 0", "steps = 0"),
        ("[optimizer]\nlr = inf", "optimizer.lr"),
        ("[optimizer]\nlr = nan", "optimizer.lr"),
        ("[optimizer]\nlr = -1", "optimizer.lr"),
        ('name = "Bad Name"', "name = 'Bad Name'"),
        ("model = 3", "model = 3"),
        ("[model]\ndim = 65", "must be a multiple of num_heads"),
        ("[model]\nnum_kv_heads = 3", "num_kv_heads = 3"),
        ("[model]\ndim = 12", "must be even for rotary"),
        ("[pipeline]\nstages = 9", "pipeline.stages = 9 exceeds model.num_layers = 4"),
        ("[pipeline]\ncuts = [4]", "must be 1 ascending layer numbers between 1 and 3"),
        ("[pipeline]\ncuts = [0]", "ascending"),
        ("[pipeline]\ncuts = [1, 2]", "must be 1"),
        ("[pipeline]\nstages = 3\ncuts = [2, 2]", "ascending"),
        ("steps = ", "run.toml"),
    ],
)
def test_wrong_file_is_refused_with_field_value_and_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_spec(write(tmp_path, text))
    assert message in str(caught.value)
    assert "run.toml" in str(caught.value)


def test_bytes_that_are_no_text_are_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.toml"):
        load_run_spec(path)


def test_missing_file_and_folder_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_run_spec(tmp_path / "absent.toml")
    with pytest.raises(ConfigError):
        load_run_spec(tmp_path)


@pytest.mark.parametrize("version", [RUN_SPEC_VERSION + 1, "'1'", 0])
def test_another_version_is_refused_before_its_fields_are_read(
    tmp_path: Path, version: object
) -> None:
    path = write(tmp_path, f"version = {version}\nfield_of_the_future = 1")
    with pytest.raises(VersionError, match=f"this release reads {RUN_SPEC_VERSION}"):
        load_run_spec(path)


def test_message_about_a_huge_value_stays_short() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(RunSpec, {"model": ["x" * 10_000]}, "here")
    assert len(str(caught.value)) < 300


def test_spec_does_not_change_once_made() -> None:
    with pytest.raises(ValidationError):
        RunSpec().steps = 3  # type: ignore[misc]  # the point


# ---- resolved ----------------------------------------------------------------------------


@given(num_layers=st.integers(1, 12), data=st.data())
def test_stages_cover_all_layers_once_and_in_order(num_layers: int, data: st.DataObject) -> None:
    inner = st.lists(st.integers(1, max(1, num_layers - 1)), unique=True, max_size=num_layers - 1)
    cuts = sorted(data.draw(inner)) if num_layers > 1 else []
    run = resolved(
        {
            "model": {"num_layers": num_layers, "vocab_size": 512},
            "pipeline": {"stages": len(cuts) + 1, "cuts": cuts},
        }
    )
    stages = [run.stage(s) for s in range(len(cuts) + 1)]
    assert [layer for s in stages for layer in range(s.start, s.end)] == list(range(num_layers))
    assert all(a.end == b.start for a, b in pairwise(stages))
    assert [s.is_first for s in stages] == [True] + [False] * len(cuts)
    assert [s.is_last for s in stages] == [False] * len(cuts) + [True]


def test_unresolved_run_is_refused() -> None:
    with pytest.raises(ValidationError, match="cuts must be resolved"):
        resolved({"model": {"vocab_size": 512}})
    with pytest.raises(ValidationError, match="vocab_size must be resolved"):
        resolved({"pipeline": {"cuts": [2]}})


def test_run_survives_the_wire_with_its_digest() -> None:
    run = resolved()
    again = parse_spec(ResolvedRun, json.loads(run.to_json()), "the coordinator")
    assert again == run
    assert again.digest == run.digest


def test_digest_is_of_canonical_json_and_covers_every_part() -> None:
    run = resolved()
    text = run.to_json().decode()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    changed = [
        run.model_copy(update={"spec": run.spec.model_copy(update={"seed": 1})}),
        run.model_copy(update={"data": run.data.model_copy(update={"train": (SHARD, SHARD)})}),
        run.model_copy(update={"run_id": RunId("tiny-99999999")}),
    ]
    assert len({run.digest, *(other.digest for other in changed)}) == 4


def test_warmup_defaults_to_a_tenth_of_the_steps() -> None:
    assert RunSpec(steps=100).warmup_steps == 10
    assert RunSpec(steps=5).warmup_steps == 1
    assert RunSpec.model_validate({"optimizer": {"warmup_steps": 3}}).warmup_steps == 3


def test_tokens_are_counted_per_microbatch_and_step() -> None:
    spec = RunSpec.model_validate(
        {"batch": {"microbatches": 3, "microbatch_size": 2}, "model": {"seq_len": 5}}
    )
    assert (spec.tokens_per_microbatch, spec.tokens_per_step) == (10, 30)
