# SPDX-License-Identifier: Apache-2.0
"""A stage's state: its weights and the optimizer's moments, and how a step changes them."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.compression.learned.subspace import project_back, writes_residual
from shoal.node.digest import digest_tensors
from shoal.node.fixed_point import to_gradient
from shoal.node.model.initialise import initial_tensor
from shoal.node.optimizer import advance, update
from shoal.protocol.errors import WrongShapeError
from shoal.protocol.learned import learned_codec
from shoal.protocol.spec import ResolvedRun, StageSpec
from shoal.protocol.tensors import stage_tensors
from shoal.protocol.update_rules import KINDS, update_rule


class StageState:
    """Live fp32 tensors by global name, in canonical order (`names`, `numels`). Not every update
    rule keeps both moments."""

    def __init__(
        self, run: ResolvedRun, stage: StageSpec, module: nn.Module, constraint: Tensor | None
    ) -> None:
        """The weights are the module's parameters. With `constraint`, a basis [D, R], what writes
        into the residual stream is brought back into its span whenever it changes."""
        self._run = run
        self._stage = stage
        self._constraint = constraint
        learned = learned_codec(run.spec.pipeline.boundary)
        self._learned = learned if stage.num_stages > 1 else None
        tensors = stage_tensors(run.spec.model, stage, learned)
        named = dict(module.named_parameters())
        assert {t.name: t.shape for t in tensors} == {n: tuple(p.shape) for n, p in named.items()}
        self.parameters = [named[tensor.name] for tensor in tensors]
        self._rules = {tensor.name: update_rule(run.spec, tensor) for tensor in tensors}
        self.weights = {t.name: named[t.name].detach() for t in tensors}
        self.exp_avg = self._zeros("exp_avg")
        self.exp_avg_sq = self._zeros("exp_avg_sq")
        self.names = tuple(self.weights)
        self.numels = tuple(w.numel() for w in self.weights.values())

    def initialise(self) -> None:
        """The state at step 0: a function of the run's seed and the tensors' names."""
        spec = self._run.spec
        for key, tensor in self.tensors().items():
            kind, _, name = key.partition("/")
            if kind != "weights":
                tensor.zero_()
                continue
            tensor.copy_(
                initial_tensor(
                    name, tensor.shape, seed=spec.seed, model=spec.model, learned=self._learned
                )
            )
            self._constrain(name)

    def load(self, tensors: Mapping[str, Tensor], kinds: Sequence[str]) -> None:
        """Copy these kinds in. Raises `WrongShapeError` for missing or unknown names and for other
        shapes or dtypes, and then changes nothing."""
        own = {k: t for k, t in self.tensors().items() if k.partition("/")[0] in kinds}
        if set(own) != set(tensors):
            odd = sorted(set(own) ^ set(tensors))
            raise WrongShapeError(
                f"state of stage {self._stage.stage}: {len(odd)} tensors missing or unknown, "
                f"such as {odd[0]!r}; it belongs to another stage or run"
            )
        for key, tensor in tensors.items():
            check_shape(f"state tensor {key!r}", tensor, own[key].shape, torch.float32)
        for key, tensor in tensors.items():
            own[key].copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """The live ones, keyed "weights/NAME", "exp_avg/NAME" and "exp_avg_sq/NAME"."""
        kinds = (self.weights, self.exp_avg, self.exp_avg_sq)
        return {
            f"{kind}/{name}": tensor
            for kind, tensors in zip(KINDS, kinds, strict=True)
            for name, tensor in tensors.items()
        }

    def digest(self) -> int:
        return digest_tensors(self.weights.items())

    @property
    def memory(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    # ---- a step's end --------------------------------------------------------------------

    def update(
        self,
        totals: Tensor,
        *,
        step: int,
        num_tokens: int,
        learning_rate: float,
        clip_scale: float,
        scale_exponent: int,
    ) -> None:
        """Commit a step in place, from flat int64 totals in tensor order."""
        for name, gradient in self._gradients(totals, num_tokens, clip_scale, scale_exponent):
            update(
                self._of(name),
                gradient,
                rule=self._rules[name],
                step=step,
                lr=learning_rate,
                spec=self._run.spec.optimizer,
            )
            self._constrain(name)

    def advance_moments(
        self,
        totals: Tensor,
        *,
        num_tokens: int,
        clip_scale: float,
        scale_exponent: int,
        projections: Mapping[str, Tensor],
    ) -> None:
        """What `update` does to the moments, to the same bits."""
        for name, gradient in self._gradients(totals, num_tokens, clip_scale, scale_exponent):
            advance(
                self._of(name),
                gradient,
                rule=self._rules[name],
                spec=self._run.spec.optimizer,
                weights=projections.get(name),
            )

    def projections(self) -> dict[str, Tensor]:
        """CPU copies of the weights on which moments depend."""
        return {
            name: self.weights[name].to("cpu", copy=True)
            for name, rule in self._rules.items()
            if rule.method == "spel"
        }

    # ---- inside --------------------------------------------------------------------------

    def _gradients(
        self, totals: Tensor, num_tokens: int, clip_scale: float, scale_exponent: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Of the mean loss, clipped, on the weights' device; one at a time."""
        for name, part in zip(self.names, torch.split(totals, list(self.numels)), strict=True):
            weights = self.weights[name]
            gradient = to_gradient(part, scale_exponent, num_tokens, weights.shape)
            yield name, gradient.mul_(clip_scale).to(weights.device)

    def _of(self, name: str) -> dict[str, Tensor]:
        state = {"weights": self.weights[name], "exp_avg": self.exp_avg[name]}
        if name in self.exp_avg_sq:
            state["exp_avg_sq"] = self.exp_avg_sq[name]
        return state

    def _zeros(self, kind: str) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(weights)
            for name, weights in self.weights.items()
            if kind in self._rules[name].kinds
        }

    def _constrain(self, name: str) -> None:
        if self._constraint is not None and writes_residual(name):
            project_back(name, self.weights[name], self._constraint)


def check_shape(
    what: str, tensor: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raises `WrongShapeError`."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise WrongShapeError(
            f"{what} is {tensor.dtype} {tuple(tensor.shape)}, the plan says {dtype} {tuple(shape)}"
        )
