# SPDX-License-Identifier: Apache-2.0
"""A LLaMA-style decoder, whole or cut into stages (Touvron et al., arXiv 2302.13971).

Parameter names are Hugging Face's names in the whole model, whichever stage holds them: a
checkpoint of all stages together is a `LlamaForCausalLM` with untied embeddings. The order of
`named_parameters` is canonical: embedding, layers ascending, norm, head. Halves of a learned codec
stand before and after the layers (compression/learned/halves.py).

Shapes: B sequences, T positions, D width, F feed-forward width, V vocabulary, H query heads,
K key-value heads, C channels of a head, R values per token on the wire.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.compression.learned.halves import StageHalves, plain_fp32
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


class _SubspaceLinear(_Linear):
    """Outputs within the span of a frozen basis U [D, R]: the weight, [R, inputs], gives
    coordinates. They leave the compute dtype first, whose rounding would leave the span."""

    basis: Tensor

    def __init__(self, in_features: int, basis: Tensor) -> None:
        super().__init__(in_features, basis.shape[1])
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        coordinates = super().forward(x)
        with plain_fp32(x.device.type):
            out: Tensor = coordinates.float() @ self.basis.T
        return out


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

    def __init__(self, model: ModelSpec, subspace: Tensor | None) -> None:
        super().__init__()
        self.num_groups = model.num_heads // model.num_kv_heads
        self.head_dim = model.head_dim
        kv_dim = model.num_kv_heads * model.head_dim
        self.q_proj = _Linear(model.dim, model.dim)
        self.k_proj = _Linear(model.dim, kv_dim)
        self.v_proj = _Linear(model.dim, kv_dim)
        self.o_proj = _into_residual(model.dim, model.dim, subspace)

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

    def __init__(self, model: ModelSpec, subspace: Tensor | None) -> None:
        super().__init__()
        self.gate_proj = _Linear(model.dim, model.ffn_dim)
        self.up_proj = _Linear(model.dim, model.ffn_dim)
        self.down_proj = _into_residual(model.ffn_dim, model.dim, subspace)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gated_BTF = F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        out_BTD: Tensor = self.down_proj(gated_BTF)
        return out_BTD


def _into_residual(in_features: int, dim: int, subspace: Tensor | None) -> _Linear:
    if subspace is None:
        return _Linear(in_features, dim)
    return _SubspaceLinear(in_features, subspace)


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: ModelSpec, subspace: Tensor | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.dim, model.norm_eps)
        self.self_attn = Attention(model, subspace)
        self.post_attention_layernorm = RMSNorm(model.dim, model.norm_eps)
        self.mlp = FeedForward(model, subspace)

    def forward(
        self, read_BTD: Tensor, skip_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The stream after attention, and what feed-forward adds to it. Attention reads `read_BTD`
        and is added to `skip_BTD`: twice the same, except after some boundaries."""
        stream_BTD = skip_BTD + self.self_attn(self.input_layernorm(read_BTD), cos_TC, sin_TC)
        return stream_BTD, self.mlp(self.post_attention_layernorm(stream_BTD))


class _Trunk(nn.Module):
    """Only a name space: what Hugging Face calls `model.`."""

    def __init__(self, model: ModelSpec, stage: StageSpec, subspace: Tensor | None) -> None:
        super().__init__()
        if stage.is_first:
            width = model.dim if subspace is None else subspace.shape[1]
            self.embed_tokens = _Embedding(model.vocab_size, width)
        self.layers = nn.ModuleDict(
            {str(i): Layer(model, subspace) for i in range(stage.start, stage.end)}
        )
        if stage.is_last:
            self.norm = RMSNorm(model.dim, model.norm_eps)


class StageModel(nn.Module):
    """The layers of one stage, with the embedding on the first and norm and head on the last."""

    def __init__(self, model: ModelSpec, stage: StageSpec, halves: StageHalves) -> None:
        super().__init__()
        self.spec = model
        self.stage = stage
        self._halves = halves
        self.model = _Trunk(model, stage, halves.subspace)
        if stage.is_last:
            self.lm_head = _Linear(model.dim, model.vocab_size)
        boundary: dict[str, nn.Module] = {}
        if halves.receiver is not None:
            boundary[str(stage.stage - 1)] = halves.receiver
        if halves.sender is not None:
            boundary[str(stage.stage)] = halves.sender
        if boundary:
            self.boundary = nn.ModuleDict(boundary)
        if halves.side is not None:
            self.anchors = nn.ModuleDict({str(stage.stage): halves.side})
        self._rotary: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, tokens_BT: Tensor | None = None) -> Tensor:
        """`tokens_BT` int64 on the first stage, else `hidden_BTD` fp32, or `narrow_BTR` where a
        half widens it. Returns the like, or `logits_BTV` in the compute dtype on the last stage.

        `tokens_BT` is for halves that need ids on a later stage.
        """
        side_BTD = self._side(x if self.stage.is_first else tokens_BT)
        read_BTD, stream_BTD = self._enter(x, side_BTD)
        cos_TC, sin_TC = self._positions(stream_BTD.shape[1], stream_BTD.device)
        layers = list(self.model.layers.values())
        for layer in layers[:-1]:
            stream_BTD, branch_BTD = layer(read_BTD, stream_BTD, cos_TC, sin_TC)
            read_BTD = stream_BTD = stream_BTD + branch_BTD
        stream_BTD, branch_BTD = layers[-1](read_BTD, stream_BTD, cos_TC, sin_TC)
        if self._halves.sender is not None:
            narrow_BTR: Tensor = self._halves.sender(stream_BTD, branch_BTD, side_BTD)
            return narrow_BTR
        hidden_BTD: Tensor = stream_BTD + branch_BTD
        if self.stage.is_last:
            logits_BTV: Tensor = self.lm_head(self.model.norm(hidden_BTD))
            return logits_BTV
        return hidden_BTD.float()

    def _side(self, tokens_BT: Tensor | None) -> Tensor | None:
        """What the stage's halves know of the tokens."""
        if self._halves.side is None:
            return None
        assert tokens_BT is not None, "this stage's halves read token ids"
        side_BTD: Tensor = self._halves.side(tokens_BT)
        return side_BTD

    def _enter(self, x: Tensor, side_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the first layer's attention reads, and what it is added to."""
        if self._halves.receiver is not None:
            read_BTD, skip_BTD = self._halves.receiver(x, side_BTD)
            return read_BTD, skip_BTD
        if not self.stage.is_first:
            return x, x
        hidden_BTD = self.model.embed_tokens(x)
        if self._halves.subspace is not None:
            with plain_fp32(x.device.type):
                hidden_BTD = hidden_BTD @ self._halves.subspace.T
        if self._halves.embeds_side and side_BTD is not None:
            hidden_BTD = side_BTD + hidden_BTD
        return hidden_BTD, hidden_BTD

    def _positions(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._rotary is None or self._rotary[0].shape[0] != length:
            cos_TC, sin_TC = rotary_positions(length, self.spec.head_dim, self.spec.rope_theta)
            self._rotary = cos_TC.to(device), sin_TC.to(device)
        return self._rotary


def build_stage_model(
    model: ModelSpec,
    stage: StageSpec,
    *,
    device: torch.device | None = None,
    halves: StageHalves | None = None,
) -> StageModel:
    """The stage's module with fp32 parameters, all zero until they are drawn or loaded. `halves`
    are on `device` already."""
    with device or torch.device("cpu"):
        module = StageModel(model, stage, halves or StageHalves())
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
