# SPDX-License-Identifier: Apache-2.0
"""A run's newest snapshot as a Hugging Face LLaMA folder, which transformers loads as it is. Where
a learned codec is part of the model, it refuses the folder (export_learned.py).

The run folder: run.json (canonical JSON of the resolved run), tokenizer.json, snapshots/.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from shoal.coordinator.export_learned import exported, learned_of
from shoal.coordinator.snapshots import SnapshotStore
from shoal.protocol.atomic_file import fsync_folder, storage_error
from shoal.protocol.errors import ConfigError, StorageError, VersionError
from shoal.protocol.spec import ResolvedRun, parse_spec
from shoal.protocol.tensors import Fp32, TensorSpec
from shoal.version import RUN_SPEC_VERSION

END_OF_TEXT = "<|endoftext|>"
MAX_SHARD_BYTES = 4_000_000_000

Progress = Callable[[int, int], None]
"""Bytes of weights written so far, and in all."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    folder: Path
    step: int
    num_parameters: int
    num_bytes: int
    """Of all files."""
    num_shards: int
    weights_sha256: str
    """Of the snapshot's weights, which the export may have folded."""
    is_llama: bool
    """Whether transformers alone can load it."""


def export_run(
    run_folder: Path,
    out: Path,
    progress: Progress | None = None,
    *,
    step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Write `out` from the complete snapshot of `step`, or the newest; whole or not at all.

    Works beside a running coordinator. Raises `ConfigError` when `out` holds something,
    `StorageError` for a missing or damaged snapshot or tokenizer, or a full disk.
    """
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out}: not an empty folder. Choose another one, or empty it.")
        run = read_run(run_folder)
        contents = exported(run)
        tokenizer = _read_tokenizer(run_folder / "tokenizer.json", run)
        store = SnapshotStore(run_folder, run, read_only=True)
        step = store.newest() if step is None else step
        if step is None:
            raise StorageError(
                f"{run_folder}: no complete snapshot yet. Try again after step "
                f"{min(run.spec.fault.snapshot_every, run.spec.steps)}."
            )
        store.verify(step)
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
        temporary.mkdir()
        try:
            weights = contents.weights(store.weights(step))
            num_shards = _write_weights(
                temporary, contents.tensors, weights, progress or _silent, max_shard_bytes
            )
            digest = store.weights_sha256(step)
            (temporary / "tokenizer.json").write_bytes(tokenizer)
            end_of_text = Tokenizer.from_buffer(tokenizer).token_to_id(END_OF_TEXT)
            _write_json(temporary / "config.json", llama_config(run, end_of_text))
            _write_json(temporary / "tokenizer_config.json", _tokenizer_config(run, end_of_text))
            _write_json(temporary / "generation_config.json", _ends(end_of_text))
            (temporary / "README.md").write_text(_model_card(run, step, digest), encoding="utf-8")
            num_bytes = sum(path.stat().st_size for path in temporary.iterdir())
            _sync(temporary)
            temporary.rename(out)
            fsync_folder(out.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except SafetensorError as error:
        raise StorageError(f"{out}: {error}; free some space there and export again.") from error
    except OSError as error:
        raise storage_error(out, error) from error
    num_parameters = sum(tensor.num_elements for tensor in contents.tensors)
    return ExportReport(out, step, num_parameters, num_bytes, num_shards, digest, contents.is_llama)


def read_run(run_folder: Path) -> ResolvedRun:
    """The run folder's run.json. Raises `StorageError`, `ConfigError` or `VersionError`."""
    path = run_folder / "run.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StorageError(f"{run_folder}: no run.json; not a run folder.") from None
    except OSError as error:
        raise storage_error(path, error) from error
    except ValueError as error:
        raise StorageError(f"{path}: damaged ({error}).") from None
    spec = raw.get("spec") if isinstance(raw, dict) else None
    version = spec.get("version") if isinstance(spec, dict) else None
    if isinstance(version, int) and version != RUN_SPEC_VERSION:
        raise VersionError(
            f"{path}: run spec version {version}, this release reads {RUN_SPEC_VERSION}. "
            "Use the release that wrote it; the folder is unchanged."
        )
    return parse_spec(ResolvedRun, raw, str(path))


def llama_config(run: ResolvedRun, end_of_text: int | None) -> dict[str, Any]:
    """config.json. `rope_theta` is for transformers 4, `rope_parameters` for 5. A model with
    boundaries in it has a type that transformers doesn't know."""
    model, pipeline = run.spec.model, run.spec.pipeline
    kind: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if not exported(run).is_llama:
        kind = {
            "architectures": ["ShoalForCausalLM"],
            "model_type": "shoal",
            "boundary": pipeline.boundary,
            "cuts": list(pipeline.cuts or ()),
        }
    return {
        **kind,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "initializer_range": model.init_std,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **_ends(end_of_text),
    }


def _ends(end_of_text: int | None) -> dict[str, Any]:
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}


def _tokenizer_config(run: ResolvedRun, end_of_text: int | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.spec.model.seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if end_of_text is not None:
        config |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return config


def _read_tokenizer(path: Path, run: ResolvedRun) -> bytes:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != run.data.tokenizer_sha256:
        raise StorageError(f"{path}: not the tokenizer that the run was launched with. Restore it.")
    return content


def _write_weights(
    folder: Path,
    tensors: Sequence[TensorSpec],
    weights: Iterable[tuple[TensorSpec, Fp32]],
    progress: Progress,
    max_shard_bytes: int,
) -> int:
    """model.safetensors, or numbered shards and their index. Holds one shard in memory."""
    shards = list(_shards(tensors, max_shard_bytes))
    total = sum(tensor.num_bytes for tensor in tensors)
    weight_map: dict[str, str] = {}
    written = 0
    source = iter(weights)
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {}
        for expected in shard:
            tensor, content[expected.name] = next(source)
            assert tensor == expected
            weight_map[expected.name] = name
        path = folder / (name if len(shards) > 1 else "model.safetensors")
        save_file(content, path, metadata={"format": "pt"})
        written += sum(tensor.num_bytes for tensor in shard)
        progress(written, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    return len(shards)


def _shards(tensors: Iterable[TensorSpec], max_bytes: int) -> Iterator[list[TensorSpec]]:
    """Contiguous groups of at most `max_bytes`; a larger tensor has a group of its own."""
    shard: list[TensorSpec] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    yield shard


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)


def _silent(written: int, total: int) -> None:
    pass


def _model_card(run: ResolvedRun, step: int, digest: str) -> str:
    spec, contents = run.spec, exported(run)
    num_parameters = sum(tensor.num_elements for tensor in contents.tensors)
    library = "library_name: transformers\n" if contents.is_llama else ""
    return f"""---
{library}pipeline_tag: text-generation
tags: [shoal, llama]
---

# {spec.name}

A LLaMA-style language model with {num_parameters:,} parameters, trained with Shoal.

| | |
|---|---|
| run | `{run.run_id}` |
| steps | {step:,} of {spec.steps:,} |
| tokens seen | {step * spec.tokens_per_step:,} |
| layers, width, context | {spec.model.num_layers}, {spec.model.dim}, {spec.model.seq_len} |
| data | `{spec.data.source}` |
| boundary | `{spec.pipeline.boundary}` |
| run digest | `{run.digest}` |
| SHA-256 of the weights | `{digest}` |

{_how_to_load(run, is_llama=contents.is_llama)}"""


def _how_to_load(run: ResolvedRun, *, is_llama: bool) -> str:
    if not is_llama:
        cuts = ", ".join(f"`model.layers.{cut}`" for cut in run.spec.pipeline.cuts or ())
        return f"""**transformers alone cannot load this model.** It was trained with the learned
codec `{run.spec.pipeline.boundary}` at its stage boundaries, before {cuts}, and needs it there:
the tensors `boundary.*` and `anchors.*` are its halves, to be applied as
`shoal.compression.learned` does.
"""
    note = ""
    if learned_of(run) is not None:
        note = """
The run was trained with its residual stream within a subspace. That is folded into these weights,
to the rounding of fp32; the digest above is of the weights before folding.
"""
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".")
```
{note}"""
