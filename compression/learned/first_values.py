# SPDX-License-Identifier: Apache-2.0
"""First values of what learned codecs add to a stage, where a plain Gaussian won't do."""

import re

import torch
from torch import Tensor

from shoal.compression.learned.frozen import gaussian, orthonormal
from shoal.protocol.learned import LearnedSpec, LinearSpec, MaplSpec, SubspaceSpec
from shoal.protocol.learned_tensors import is_projection, projection_name
from shoal.protocol.spec import ModelSpec

_HALF = re.compile(r"boundary\.(\d+)\.(encoder|decoder)\.0\.weight")


def first_value(
    name: str, shape: tuple[int, ...], *, seed: int, dim: int, learned: LearnedSpec | None
) -> Tensor | None:
    """fp32 on the CPU, or None for a Gaussian of the model's standard deviation, as IOTA draws a
    bottleneck. Projections are random orthonormal columns, anchors begin at zero; a linear
    encoder and decoder begin as one such projection and its transpose, the best start for them."""
    if learned is None:
        return None
    if is_projection(name):
        return orthonormal(seed, name, *shape)
    if name.startswith("anchors."):
        return torch.zeros(shape)
    if isinstance(learned, SubspaceSpec) and name == "model.embed_tokens.weight":
        return _subspace_embedding(learned, seed=seed, vocab_size=shape[0], dim=dim)
    half = _HALF.fullmatch(name)
    if isinstance(learned, LinearSpec) and half:
        columns = orthonormal(seed, projection_name(int(half[1])), dim, learned.width)
        return columns.T.contiguous() if half[2] == "encoder" else columns
    return None


def subspace_basis(learned: SubspaceSpec, *, seed: int, dim: int) -> Tensor:
    """U [D, R], of the whole run."""
    return orthonormal(seed, "subspace.basis", dim, learned.width)


def subspace_table(*, seed: int, vocab_size: int, dim: int) -> Tensor:
    """T_fix [V, D], N(0, 1): the frozen part of a subspace network's embedding."""
    return gaussian(seed, "subspace.table", (vocab_size, dim))


def fixed_projection(learned: MaplSpec, boundary: int, *, seed: int, dim: int) -> Tensor:
    """A [D, R] of a boundary whose projection never learns."""
    return orthonormal(seed, projection_name(boundary), dim, learned.width)


def anchor_basis(learned: MaplSpec, stage: int, *, seed: int, dim: int) -> Tensor:
    """P [r, D] of a stage's factorized anchors."""
    columns = orthonormal(seed, f"anchors.{stage}.basis", dim, learned.anchor_rank(dim))
    return columns.T.contiguous()


def static_anchors(model: ModelSpec, *, seed: int) -> Tensor:
    """[V, D], of the whole run: the embedding's first value, so that the stream begins with it."""
    name = "model.embed_tokens.weight"
    return gaussian(seed, name, (model.vocab_size, model.dim), std=model.init_std)


def _subspace_embedding(learned: SubspaceSpec, *, seed: int, vocab_size: int, dim: int) -> Tensor:
    """The trainable part begins as the frozen one within the subspace: T_fix U, or T_fix U Uᵀ."""
    basis = subspace_basis(learned, seed=seed, dim=dim).double()
    table = subspace_table(seed=seed, vocab_size=vocab_size, dim=dim).double()
    coordinates = table @ basis
    if learned.variant == "reparam":
        return coordinates.float()
    return (coordinates @ basis.T).float()
