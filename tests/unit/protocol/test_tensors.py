# SPDX-License-Identifier: Apache-2.0
"""Canonical order of parameters."""

import numpy as np

from shoal.protocol.ids import Stage
from shoal.protocol.spec import ModelSpec, StageSpec
from shoal.protocol.tensors import TensorSpec, model_tensors, stage_tensors, weights_sha256

MODEL = ModelSpec(dim=8, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=12, vocab_size=20)


def test_a_layer_has_the_names_and_shapes_of_hugging_face_llama() -> None:
    layer = stage_tensors(MODEL, StageSpec(Stage(1), 3, 1, 2))
    assert [(t.name.removeprefix("model.layers.1."), t.shape) for t in layer] == [
        ("input_layernorm.weight", (8,)),
        ("self_attn.q_proj.weight", (8, 8)),
        ("self_attn.k_proj.weight", (4, 8)),
        ("self_attn.v_proj.weight", (4, 8)),
        ("self_attn.o_proj.weight", (8, 8)),
        ("post_attention_layernorm.weight", (8,)),
        ("mlp.gate_proj.weight", (12, 8)),
        ("mlp.up_proj.weight", (12, 8)),
        ("mlp.down_proj.weight", (8, 12)),
    ]


def test_the_stages_tensors_one_after_the_other_are_the_models_whatever_the_cuts() -> None:
    for cuts in ((1, 2), (1,), (2,), ()):
        bounds = (0, *cuts, 3)
        stages = [
            StageSpec(Stage(i), len(cuts) + 1, bounds[i], bounds[i + 1])
            for i in range(len(cuts) + 1)
        ]
        joined = [tensor for stage in stages for tensor in stage_tensors(MODEL, stage)]
        assert joined == model_tensors(MODEL)
    assert joined[0].name == "model.embed_tokens.weight"
    assert [t.name for t in joined[-2:]] == ["model.norm.weight", "lm_head.weight"]


def test_the_digest_sees_names_shapes_order_and_the_sign_of_zero() -> None:
    a, b = TensorSpec("a", (2, 2)), TensorSpec("b", (4,))
    zeros = np.zeros(4, np.float32)
    digests = {
        weights_sha256(weights)
        for weights in (
            [(a, zeros.reshape(2, 2)), (b, zeros)],
            [(b, zeros), (a, zeros.reshape(2, 2))],
            [(a, zeros.reshape(2, 2)), (TensorSpec("c", (4,)), zeros)],
            [(a, zeros.reshape(2, 2)), (TensorSpec("b", (2, 2)), zeros)],
            [(a, zeros.reshape(2, 2)), (b, -zeros)],
        )
    }
    assert len(digests) == 5
