# SPDX-License-Identifier: Apache-2.0
"""The decoder against Hugging Face's, and its first weights."""

import pytest
import torch

from shoal.node.model.initialise import initial_tensor
from shoal.node.model.loss import summed_loss
from shoal.node.model.transformer import StageModel, build_stage_model
from shoal.protocol.ids import Stage
from shoal.protocol.spec import ModelSpec, StageSpec

MODEL = ModelSpec(
    dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=172, seq_len=32, vocab_size=257
)
WHOLE = StageSpec(stage=Stage(0), num_stages=1, start=0, end=3)


def initialised(stage: StageSpec, seed: int = 7) -> StageModel:
    module = build_stage_model(MODEL, stage)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial_tensor(name, parameter.shape, seed=seed, model=MODEL))
    return module


def sample_tokens(num: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, MODEL.vocab_size, (num, MODEL.seq_len), generator=generator)


def test_logits_equal_hugging_faces_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=MODEL.dim,
        intermediate_size=MODEL.ffn_dim,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_heads,
        num_key_value_heads=MODEL.num_kv_heads,
        max_position_embeddings=MODEL.seq_len,
        vocab_size=MODEL.vocab_size,
        rms_norm_eps=MODEL.norm_eps,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = initialised(WHOLE)
    with torch.no_grad():  # norms other than one, attention other than nearly uniform
        for name, parameter in ours.named_parameters():
            noise = torch.Generator().manual_seed(len(name))
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    tokens_BT = sample_tokens()
    with torch.no_grad():
        expected = theirs(tokens_BT).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(tokens_BT), expected, atol=1e-5, rtol=1e-5)


def test_names_are_global_and_in_canonical_order() -> None:
    parts = [
        StageSpec(stage=Stage(0), num_stages=2, start=0, end=1),
        StageSpec(stage=Stage(1), num_stages=2, start=1, end=3),
    ]
    names = [n for part in parts for n, _ in build_stage_model(MODEL, part).named_parameters()]
    assert names == [n for n, _ in build_stage_model(MODEL, WHOLE).named_parameters()]
    assert names[:3] == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ]
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_chained_stages_give_the_whole_models_bits() -> None:
    first = initialised(StageSpec(stage=Stage(0), num_stages=2, start=0, end=2))
    second = initialised(StageSpec(stage=Stage(1), num_stages=2, start=2, end=3))
    tokens_BT = sample_tokens()
    with torch.no_grad():
        assert torch.equal(second(first(tokens_BT)), initialised(WHOLE)(tokens_BT))


def test_first_weights_depend_on_seed_and_name_only() -> None:
    shape = torch.Size((64, 64))
    name = "model.layers.1.self_attn.q_proj.weight"
    drawn = initial_tensor(name, shape, seed=1, model=MODEL)
    torch.manual_seed(99)
    assert torch.equal(drawn, initial_tensor(name, shape, seed=1, model=MODEL))
    assert not torch.equal(drawn, initial_tensor(name, shape, seed=2, model=MODEL))
    assert not torch.equal(
        drawn, initial_tensor(name.replace("q_", "k_"), shape, seed=1, model=MODEL)
    )


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("model.embed_tokens.weight", 0.02),
        ("model.layers.0.mlp.up_proj.weight", 0.02),
        ("model.layers.0.mlp.down_proj.weight", 0.02 / 6**0.5),
        ("model.layers.0.self_attn.o_proj.weight", 0.02 / 6**0.5),
    ],
)
def test_first_weights_have_the_stated_deviation(name: str, std: float) -> None:
    drawn = initial_tensor(name, torch.Size((256, 256)), seed=1, model=MODEL)
    assert drawn.std().item() == pytest.approx(std, rel=0.02)
    assert abs(drawn.mean().item()) < 0.02 * std


def test_norms_start_at_one() -> None:
    assert torch.equal(
        initial_tensor("model.norm.weight", torch.Size((8,)), seed=1, model=MODEL), torch.ones(8)
    )


def test_loss_is_summed_over_tokens() -> None:
    logits_BTV = torch.zeros(2, 3, 257, dtype=torch.bfloat16)
    loss = summed_loss(logits_BTV, torch.zeros(2, 3, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(6 * torch.log(torch.tensor(257.0)).item())
