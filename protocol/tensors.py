# SPDX-License-Identifier: Apache-2.0
"""The model's parameters in canonical order, and the digest of a whole model.

Names and shapes are those of Hugging Face's LLaMA. The order is what digests, squared norms and
reduce slices refer to; it depends on the model alone, and a stage's tensors are a contiguous part
of the model's, wherever the cuts are.

Shapes: V vocabulary, D dim, F ffn_dim, H heads, K key/value heads, E head_dim.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.ids import Stage
from shoal.protocol.spec import ModelSpec, StageSpec, canonical_json

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


def stage_tensors(model: ModelSpec, stage: StageSpec) -> list[TensorSpec]:
    """The parameters that `stage` holds, in canonical order."""
    vocab, dim = model.vocab_size, model.dim
    tensors = []
    if stage.is_first:
        tensors.append(TensorSpec("model.embed_tokens.weight", (vocab, dim)))
    for layer in range(stage.start, stage.end):
        tensors.extend(_layer_tensors(model, layer))
    if stage.is_last:
        tensors.append(TensorSpec("model.norm.weight", (dim,)))
        tensors.append(TensorSpec("lm_head.weight", (vocab, dim)))
    return tensors


def model_tensors(model: ModelSpec) -> list[TensorSpec]:
    """All parameters: embedding, layers ascending, final norm, output projection."""
    return stage_tensors(model, StageSpec(Stage(0), 1, 0, model.num_layers))


def _layer_tensors(model: ModelSpec, layer: int) -> list[TensorSpec]:
    dim, ffn = model.dim, model.ffn_dim
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("input_layernorm", (dim,)),
        ("self_attn.q_proj", (query, dim)),
        ("self_attn.k_proj", (key_value, dim)),
        ("self_attn.v_proj", (key_value, dim)),
        ("self_attn.o_proj", (dim, query)),
        ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (ffn, dim)),
        ("mlp.up_proj", (ffn, dim)),
        ("mlp.down_proj", (dim, ffn)),
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
