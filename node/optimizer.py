# SPDX-License-Identifier: Apache-2.0
"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) whose bits depend on one element alone, and
the choice between it, Muon (muon.py) and SPEL (compression/learned/spel.py).

AdamW: only elementwise multiplications, additions, divisions and roots, each rounded once: no
`addcmul`, `lerp` or `add(alpha=)`, whose vectorised bodies fuse what their scalar tails do not.
So an element's update is the same in any slice, on any device that follows IEEE 754.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.compression.learned.spel import advance_spel_momentum, apply_spel
from shoal.node.muon import advance_momentum, apply_muon
from shoal.protocol.spec import OptimizerSpec
from shoal.protocol.update_rules import UpdateRule

_CHUNK = 1 << 18  # elements; bounds the scratch


@torch.no_grad()
def update(
    state: Mapping[str, Tensor],
    gradient: Tensor,
    *,
    rule: UpdateRule,
    step: int,
    lr: float,
    spec: OptimizerSpec,
) -> None:
    """Update a parameter's `state` (its kinds by name: "weights", "exp_avg", …) in place, for step
    `step` at learning rate `lr`. `gradient` is averaged and clipped."""
    weights, lr = state["weights"], lr * rule.lr_ratio
    match rule.method:
        case "adamw":
            apply_update(
                weights,
                state["exp_avg"],
                state["exp_avg_sq"],
                gradient,
                step=step,
                lr=lr,
                spec=spec,
                decay=rule.decays,
            )
        case "muon":
            momentum = state["exp_avg"]
            apply_muon(weights, momentum, gradient, lr=lr, spec=spec, decay=rule.decays)
        case "spel":
            apply_spel(weights, state["exp_avg"], gradient, lr=lr)


@torch.no_grad()
def advance(
    state: Mapping[str, Tensor],
    gradient: Tensor,
    *,
    rule: UpdateRule,
    spec: OptimizerSpec,
    weights: Tensor | None = None,
) -> None:
    """What `update` does to the moments, to the same bits. SPEL's depend on the weights before the
    step too: give them as `weights`."""
    match rule.method:
        case "adamw":
            advance_moments(state["exp_avg"], state["exp_avg_sq"], gradient, spec=spec)
        case "muon":
            advance_momentum(state["exp_avg"], gradient, spec=spec)
        case "spel":
            assert weights is not None, "a projection's momentum depends on the projection"
            advance_spel_momentum(weights, state["exp_avg"], gradient)


@torch.no_grad()
def apply_update(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    *,
    step: int,
    lr: float,
    spec: OptimizerSpec,
    decay: bool,
) -> None:
    """Update `weights` and both moments in place for optimizer step `step` (from 1).

    All four are contiguous fp32 tensors of one shape; `gradient` is averaged and clipped.
    `decay` says whether `spec.weight_decay` applies.
    """
    step_size = lr / (1.0 - _power(spec.beta1, step))
    root_correction = 1.0 / math.sqrt(1.0 - _power(spec.beta2, step))
    shrink = 1.0 - lr * spec.weight_decay
    chunks = (torch.split(t.view(-1), _CHUNK) for t in (weights, exp_avg, exp_avg_sq, gradient))
    for w, m, v, g in zip(*chunks, strict=True):
        if decay:
            w.mul_(shrink)
        _advance(m, v, g, spec)
        scale = _square_root(v).mul_(root_correction).add_(spec.eps)
        w.sub_((m / scale).mul_(step_size))


@torch.no_grad()
def advance_moments(
    exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, *, spec: OptimizerSpec
) -> None:
    """What `apply_update` does to the moments, to the same bits: they don't depend on weights."""
    chunks = (torch.split(t.view(-1), _CHUNK) for t in (exp_avg, exp_avg_sq, gradient))
    for m, v, g in zip(*chunks, strict=True):
        _advance(m, v, g, spec)


def _advance(m: Tensor, v: Tensor, g: Tensor, spec: OptimizerSpec) -> None:
    m.mul_(spec.beta1).add_(g * (1.0 - spec.beta1))
    v.mul_(spec.beta2).add_((g * g).mul_(1.0 - spec.beta2))


def _square_root(v: Tensor) -> Tensor:
    """Rounded once. PyTorch's own fp32 root isn't on every CPU (it may come from MKL); taken in
    fp64 and rounded, an error there of up to an ulp can't show."""
    if v.device.type == "mps":  # has no float64
        return v.sqrt()
    return v.to(torch.float64).sqrt_().to(torch.float32)


def _power(base: float, exponent: int) -> float:
    """`base ** exponent` by squaring: the C library's `pow` differs between platforms."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
