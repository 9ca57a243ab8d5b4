# SPDX-License-Identifier: Apache-2.0
"""A LLaMA-style decoder, whole or cut into stages (Touvron et al., arXiv 2302.13971).

Parameter names are Hugging Face's names in the whole model, whichever stage holds them: a
checkpoint of all stages together is a `LlamaForCausalLM` with untied embeddings. The order of
`named_parameters` is canonical: embedding, layers ascending, norm, head.

Shapes: B sequences, T positions, D width, F feed-forward width, V vocabulary, H query heads,
K key-value heads, C channels of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.protocol.spec import ModelSpec, StageSpec


class _Linear(nn.Linear):
    """Without bias, and without first values: nobody uses them, drawing them takes time, and on
    the meta device PyTorch imports a symbolic algebra system for it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """Without first values, as `_Linear`."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467); the statistics are fp32 also under autocast."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        x_BTD = hidden_BTD.float()
        x_BTD = x_BTD * torch.rsqrt(x_BTD.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x_BTD


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245) with rotary positions."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.num_groups = model.num_heads // model.num_kv_heads
        self.head_dim = model.head_dim
        kv_dim = model.num_kv_heads * model.head_dim
        self.q_proj = _Linear(model.dim, model.dim)
        self.k_proj = _Linear(model.dim, kv_dim)
        self.v_proj = _Linear(model.dim, kv_dim)
        self.o_proj = _Linear(model.dim, model.dim)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        v_BKTC = self._heads(self.v_proj(x_BTD))
        q_BHTC = rotate(self._heads(self.q_proj(x_BTD)), cos_TC, sin_TC).to(v_BKTC.dtype)
        k_BKTC = rotate(self._heads(self.k_proj(x_BTD)), cos_TC, sin_TC).to(v_BKTC.dtype)
        # Repeated by hand: not every backend's kernel knows grouped queries.
        mixed_BHTC = F.scaled_dot_product_attention(
            q_BHTC,
            k_BKTC.repeat_interleave(self.num_groups, dim=1),
            v_BKTC.repeat_interleave(self.num_groups, dim=1),
            is_causal=True,
        )
        out_BTD: Tensor = self.o_proj(mixed_BHTC.transpose(1, 2).flatten(2))
        return out_BTD

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = _Linear(model.dim, model.ffn_dim)
        self.up_proj = _Linear(model.dim, model.ffn_dim)
        self.down_proj = _Linear(model.ffn_dim, model.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gated_BTF = F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        out_BTD: Tensor = self.down_proj(gated_BTF)
        return out_BTD


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.dim, model.norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(model.dim, model.norm_eps)
        self.mlp = FeedForward(model)

    def forward(self, hidden_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), cos_TC, sin_TC)
        out_BTD: Tensor = hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))
        return out_BTD


class _Trunk(nn.Module):
    """Only a name space: what Hugging Face calls `model.`."""

    def __init__(self, model: ModelSpec, stage: StageSpec) -> None:
        super().__init__()
        if stage.is_first:
            self.embed_tokens = _Embedding(model.vocab_size, model.dim)
        self.layers = nn.ModuleDict({str(i): Layer(model) for i in range(stage.start, stage.end)})
        if stage.is_last:
            self.norm = RMSNorm(model.dim, model.norm_eps)


class StageModel(nn.Module):
    """The layers of one stage, with the embedding on the first and norm and head on the last."""

    def __init__(self, model: ModelSpec, stage: StageSpec) -> None:
        super().__init__()
        self.spec = model
        self.stage = stage
        self.model = _Trunk(model, stage)
        if stage.is_last:
            self.lm_head = _Linear(model.dim, model.vocab_size)
        self._rotary: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`tokens_BT` int64 on the first stage, else `hidden_BTD` fp32. Returns `hidden_BTD`
        fp32, or `logits_BTV` in the compute dtype on the last stage."""
        hidden_BTD = self.model.embed_tokens(x) if self.stage.is_first else x
        cos_TC, sin_TC = self._positions(hidden_BTD.shape[1], hidden_BTD.device)
        for layer in self.model.layers.values():
            hidden_BTD = layer(hidden_BTD, cos_TC, sin_TC)
        if self.stage.is_last:
            logits_BTV: Tensor = self.lm_head(self.model.norm(hidden_BTD))
            return logits_BTV
        return hidden_BTD.float()

    def _positions(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._rotary is None or self._rotary[0].shape[0] != length:
            cos_TC, sin_TC = rotary_positions(length, self.spec.head_dim, self.spec.rope_theta)
            self._rotary = cos_TC.to(device), sin_TC.to(device)
        return self._rotary


def build_stage_model(
    model: ModelSpec, stage: StageSpec, *, device: torch.device | None = None
) -> StageModel:
    """The stage's module with fp32 parameters, all zero until they are drawn or loaded."""
    with device or torch.device("cpu"):
        module = StageModel(model, stage)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def rotary_positions(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, `TC` fp32, of the rotary angles (RoFormer, arXiv 2104.09864).

    On the CPU, and with the functions taken in fp64: fp32 ones differ between vector libraries."""
    channels = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = (1.0 / theta**channels).float()
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    angles_TC = torch.cat((angles, angles), dim=-1).double()
    return angles_TC.cos().float(), angles_TC.sin().float()


def rotate(x_BHTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Rotate channel pairs (c, c + C/2): Hugging Face's layout, not the paper's interleaved one."""
    first, second = x_BHTC.chunk(2, dim=-1)
    return x_BHTC * cos_TC + torch.cat((-second, first), dim=-1) * sin_TC
