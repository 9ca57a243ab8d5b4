# SPDX-License-Identifier: Apache-2.0
"""How each parameter is updated, and so which state the optimizer keeps of it. Pure: a function of
the run spec, the tensor's name and its shape, alike on nodes and coordinator."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.protocol.learned import PROJECTION_LR_RATIO, MaplSpec, learned_codec
from shoal.protocol.learned_tensors import is_projection
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import TensorSpec

Method = Literal["adamw", "muon", "spel"]

KINDS = ("weights", "exp_avg", "exp_avg_sq")
"""All kinds of state that a parameter may have: itself and the optimizer's moments."""

_KINDS: Mapping[Method, tuple[str, ...]] = {
    "adamw": KINDS,
    "muon": KINDS[:2],
    "spel": KINDS[:2],
}


@dataclass(frozen=True, slots=True)
class UpdateRule:
    method: Method
    lr_ratio: float
    """The rate over the step's learning rate, which is AdamW's."""
    decays: bool
    """Whether weight decay acts on it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return _KINDS[self.method]


def update_rule(spec: RunSpec, tensor: TensorSpec) -> UpdateRule:
    """Matrices of layers and of a boundary's halves by the run's optimizer, a projection on the
    Stiefel manifold by SPEL, everything else by AdamW."""
    name, optimizer = tensor.name, spec.optimizer
    is_muon = (
        optimizer.name == "muon"
        and len(tensor.shape) == 2
        and name.startswith(("model.layers.", "boundary."))
    )
    method: Method = "muon" if is_muon else "adamw"
    lr_ratio = optimizer.muon_lr / optimizer.lr if is_muon else 1.0
    if not is_projection(name):
        return UpdateRule(method, lr_ratio, decays=_is_decayed(tensor))
    learned = learned_codec(spec.pipeline.boundary)
    if isinstance(learned, MaplSpec) and learned.projection == "spel":
        method = "spel"
    return UpdateRule(method, PROJECTION_LR_RATIO * lr_ratio, decays=False)


def state_kinds(spec: RunSpec, tensor: TensorSpec) -> tuple[str, ...]:
    """What a state holds of the parameter."""
    return update_rule(spec, tensor).kinds


def absent_state(spec: RunSpec, tensors: Iterable[TensorSpec]) -> frozenset[str]:
    """State that AdamW would keep and these tensors' rules don't: "exp_avg_sq/NAME"."""
    return frozenset(
        f"{kind}/{tensor.name}"
        for tensor in tensors
        for kind in KINDS
        if kind not in state_kinds(spec, tensor)
    )


def _is_decayed(tensor: TensorSpec) -> bool:
    """Matrices decay; norms don't, nor the embedding and anchors, most of whose rows have no
    gradient in most steps and would only shrink."""
    return len(tensor.shape) == 2 and not (
        "embed_tokens" in tensor.name or tensor.name.startswith("anchors.")
    )
