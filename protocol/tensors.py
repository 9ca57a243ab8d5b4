# SPDX-License-Identifier: Apache-2.0
"""The model's parameters in canonical order, and the digest of a whole model.

Names and shapes are those of Hugging Face's LLaMA. The order is what digests, squared norms and
reduce slices refer to; it depends on the model alone, and a stage's tensors are a contiguous part
of the model's, wherever the cuts are. With a learned codec, a stage also holds the halves of the
boundaries beside it: the one after its incoming boundary first, the one before its outgoing
boundary and its anchors last.

Shapes: V vocabulary, D dim, F ffn_dim, H heads, K key/value heads, E head_dim.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.ids import Stage
from shoal.protocol.learned import LearnedSpec, learned_codec
from shoal.protocol.learned_tensors import (
    anchor_tensors,
    has_projection,
    projection_name,
    receiver_tensors,
    residual_width,
    sender_tensors,
)
from shoal.protocol.spec import ModelSpec, ResolvedRun, StageSpec, canonical_json

Fp32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One fp32 parameter."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_elements


def stage_tensors(
    model: ModelSpec, stage: StageSpec, learned: LearnedSpec | None = None
) -> list[TensorSpec]:
    """The parameters that `stage` holds, in canonical order."""
    vocab, dim = model.vocab_size, model.dim
    residual = residual_width(learned, dim, is_last_stage=stage.is_last)
    tensors = []
    if learned and not stage.is_first:
        tensors += _specs(receiver_tensors(learned, stage.stage - 1, dim))
    if stage.is_first:
        tensors.append(TensorSpec("model.embed_tokens.weight", (vocab, residual)))
    for layer in range(stage.start, stage.end):
        tensors.extend(_layer_tensors(model, layer, residual))
    if stage.is_last:
        tensors.append(TensorSpec("model.norm.weight", (dim,)))
        tensors.append(TensorSpec("lm_head.weight", (vocab, dim)))
    if learned and not stage.is_last:
        tensors += _specs(sender_tensors(learned, stage.stage, dim))
    if learned and stage.num_stages > 1:
        tensors += _specs(anchor_tensors(learned, stage.stage, dim=dim, vocab_size=vocab))
    return tensors


def model_tensors(model: ModelSpec) -> list[TensorSpec]:
    """All parameters: embedding, layers ascending, final norm, output projection."""
    return stage_tensors(model, StageSpec(Stage(0), 1, 0, model.num_layers))


def mirrored_tensors(stage: StageSpec, learned: LearnedSpec | None) -> dict[int, str]:
    """By boundary, the parameter that the stages on both of its sides hold with equal bits."""
    if not has_projection(learned):
        return {}
    incoming = [] if stage.is_first else [stage.stage - 1]
    outgoing = [] if stage.is_last else [int(stage.stage)]
    return {boundary: projection_name(boundary) for boundary in incoming + outgoing}


def owned_tensors(
    model: ModelSpec, stage: StageSpec, learned: LearnedSpec | None
) -> list[TensorSpec]:
    """What counts as the stage's where a whole run is meant: a mirrored parameter belongs to the
    stage before its boundary."""
    foreign = mirrored_tensors(stage, learned).get(stage.stage - 1)
    return [t for t in stage_tensors(model, stage, learned) if t.name != foreign]


def run_tensors(run: ResolvedRun) -> list[TensorSpec]:
    """All parameters of a run, each once, stage after stage."""
    learned = learned_codec(run.spec.pipeline.boundary)
    stages = [run.stage(stage) for stage in range(run.spec.pipeline.stages)]
    return [t for stage in stages for t in owned_tensors(run.spec.model, stage, learned)]


def _specs(named: Iterable[tuple[str, tuple[int, ...]]]) -> list[TensorSpec]:
    return [TensorSpec(name, shape) for name, shape in named]


def _layer_tensors(model: ModelSpec, layer: int, residual: int) -> list[TensorSpec]:
    dim, ffn = model.dim, model.ffn_dim
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("input_layernorm", (dim,)),
        ("self_attn.q_proj", (query, dim)),
        ("self_attn.k_proj", (key_value, dim)),
        ("self_attn.v_proj", (key_value, dim)),
        ("self_attn.o_proj", (residual, query)),
        ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (ffn, dim)),
        ("mlp.up_proj", (ffn, dim)),
        ("mlp.down_proj", (residual, ffn)),
    ]
    return [TensorSpec(f"model.layers.{layer}.{name}.weight", shape) for name, shape in shapes]


def weights_sha256(weights: Iterable[tuple[TensorSpec, Fp32]]) -> str:
    """SHA-256, in hex, over name, dtype, shape and little-endian bytes of each tensor in turn.

    Given the whole model in canonical order it says which model this is, whatever the cuts.
    """
    digest = hashlib.sha256()
    for tensor, values in weights:
        digest.update(canonical_json([tensor.name, "float32", list(tensor.shape)]) + b"\n")
        digest.update(little_endian_bytes(values))
    return digest.hexdigest()


def little_endian_bytes(values: Fp32) -> memoryview:
    """The elements in row-major order; a view, not a copy, where they already lie so."""
    return np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8).data
