# SPDX-License-Identifier: Apache-2.0
"""From a learned codec's spec to the modules of one stage."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.compression.learned.first_values import (
    anchor_basis,
    fixed_projection,
    static_anchors,
    subspace_basis,
    subspace_table,
)
from shoal.compression.learned.halves import ReceiverHalf, SenderHalf, StageHalves
from shoal.compression.learned.linear import LinearReceiver, LinearSender
from shoal.compression.learned.mapl import (
    FactorizedAnchors,
    FrozenTable,
    FullAnchors,
    MaplReceiver,
    MaplSender,
)
from shoal.compression.learned.resbm import (
    BoundaryFormReceiver,
    BoundaryFormSender,
    IotaReceiver,
    IotaSender,
    SkipFreeReceiver,
    SkipFreeSender,
)
from shoal.compression.learned.subspace import SubspaceReceiver, SubspaceSender
from shoal.protocol.learned import LearnedSpec, LinearSpec, MaplSpec, ResbmSpec, SubspaceSpec
from shoal.protocol.learned_tensors import has_projection
from shoal.protocol.spec import ModelSpec, StageSpec


def build_halves(
    learned: LearnedSpec | None,
    model: ModelSpec,
    stage: StageSpec,
    *,
    seed: int,
    device: torch.device,
) -> StageHalves:
    """The stage's halves. Frozen tensors have their values; parameters have theirs to come."""
    if learned is None or stage.num_stages == 1:
        return StageHalves()
    dim, width = model.dim, learned.width
    with device:
        match learned:
            case LinearSpec():
                return _with(stage, LinearReceiver(dim, width), LinearSender(dim, width))
            case ResbmSpec():
                return _with(stage, *_bottleneck(learned, dim))
            case SubspaceSpec():
                return _subspace(learned, model, stage, seed=seed, device=device)
            case MaplSpec():
                return _mapl(learned, model, stage, seed=seed, device=device)
    raise AssertionError(f"no modules for {type(learned).__name__}")


def _with(stage: StageSpec, receiver: ReceiverHalf, sender: SenderHalf) -> StageHalves:
    return StageHalves(
        receiver=None if stage.is_first else receiver,
        sender=None if stage.is_last else sender,
    )


def _bottleneck(learned: ResbmSpec, dim: int) -> tuple[ReceiverHalf, SenderHalf]:
    width, identity = learned.width, learned.identity
    if learned.form == "boundary":
        return (
            BoundaryFormReceiver(dim, width, identity=identity),
            BoundaryFormSender(dim, width, identity=identity),
        )
    if identity:
        return IotaReceiver(dim, width), IotaSender(dim, width)
    return SkipFreeReceiver(dim, width), SkipFreeSender(dim, width)


def _subspace(
    learned: SubspaceSpec, model: ModelSpec, stage: StageSpec, *, seed: int, device: torch.device
) -> StageHalves:
    with torch.device("cpu"):
        basis = subspace_basis(learned, seed=seed, dim=model.dim).to(device)
        table = subspace_table(seed=seed, vocab_size=model.vocab_size, dim=model.dim).to(device)
    is_reparametrized = learned.variant == "reparam"
    confined = None if stage.is_last else basis
    return replace(
        _with(stage, SubspaceReceiver(basis), SubspaceSender(basis)),
        side=FrozenTable(table),
        embeds_side=True,
        subspace=confined if is_reparametrized else None,
        constraint=None if is_reparametrized else confined,
    )


def _mapl(
    learned: MaplSpec, model: ModelSpec, stage: StageSpec, *, seed: int, device: torch.device
) -> StageHalves:
    dim, number = model.dim, int(stage.stage)
    is_trainable = has_projection(learned)

    def projection(boundary: int) -> Tensor:
        if is_trainable:
            return torch.zeros(dim, learned.width, device=device)
        with torch.device("cpu"):
            frozen = fixed_projection(learned, boundary, seed=seed, dim=dim)
        return frozen.to(device)

    receiver = sender = None
    if not stage.is_first:
        receiver = MaplReceiver(
            projection(number - 1),
            is_trainable=is_trainable,
            has_share=learned.gradient == "full",
        )
    if not stage.is_last:
        sender = MaplSender(projection(number), is_trainable=is_trainable)
    side = _anchors(learned, model, number, seed=seed, device=device)
    return StageHalves(receiver=receiver, sender=sender, side=side)


def _anchors(
    learned: MaplSpec, model: ModelSpec, stage: int, *, seed: int, device: torch.device
) -> nn.Module | None:
    vocab, dim = model.vocab_size, model.dim
    with torch.device("cpu"):
        match learned.anchors:
            case "factorized":
                basis = anchor_basis(learned, stage, seed=seed, dim=dim)
                return FactorizedAnchors(vocab, basis).to(device)
            case "full":
                return FullAnchors(vocab, dim).to(device)
            case "static":
                return FrozenTable(static_anchors(model, seed=seed)).to(device)
    return None
