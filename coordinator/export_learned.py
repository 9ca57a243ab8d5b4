# SPDX-License-Identifier: Apache-2.0
"""What an export of a run with a learned codec holds.

A subspace network *is* a LLaMA: within the span its boundaries change nothing, so U goes into the
matrices and the frozen table into the embedding, to the rounding of fp32. Every other learned codec
loses something at its boundaries, which the weights have learnt to live with: they are exported
beside the halves of the boundaries, with a config that makes transformers refuse them rather than
run them without.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shoal.compression.learned.first_values import (
    anchor_basis,
    fixed_projection,
    static_anchors,
    subspace_basis,
    subspace_table,
)
from shoal.compression.learned.subspace import writes_residual
from shoal.protocol.learned import LearnedSpec, MaplSpec, SubspaceSpec, learned_codec
from shoal.protocol.learned_tensors import projection_name
from shoal.protocol.spec import ResolvedRun
from shoal.protocol.tensors import Fp32, TensorSpec, model_tensors, run_tensors

Weights = Iterable[tuple[TensorSpec, Fp32]]


@dataclass(frozen=True, slots=True)
class Exported:
    tensors: tuple[TensorSpec, ...]
    """In the order in which `weights` gives them."""
    weights: Callable[[Weights], Iterator[tuple[TensorSpec, Fp32]]]
    """From the run's tensors to the exported ones, one at a time."""
    is_llama: bool
    """Whether transformers alone computes what the run trained."""


def exported(run: ResolvedRun) -> Exported:
    learned = learned_of(run)
    if isinstance(learned, SubspaceSpec):
        tensors = tuple(model_tensors(run.spec.model))
        return Exported(tensors, lambda weights: _folded(run, learned, weights), is_llama=True)
    frozen = _frozen(run, learned)
    return Exported(
        (*run_tensors(run), *(tensor for tensor, _ in frozen)),
        lambda weights: _with_frozen(weights, frozen),
        is_llama=learned is None,
    )


def learned_of(run: ResolvedRun) -> LearnedSpec | None:
    """The run's learned codec, None also where there is no boundary for it."""
    if run.spec.pipeline.stages == 1:
        return None
    return learned_codec(run.spec.pipeline.boundary)


Frozen = tuple[tuple[TensorSpec, Callable[[], Fp32]], ...]


def _with_frozen(weights: Weights, frozen: Frozen) -> Iterator[tuple[TensorSpec, Fp32]]:
    yield from weights
    for tensor, draw in frozen:
        yield tensor, draw()


def _frozen(run: ResolvedRun, learned: LearnedSpec | None) -> Frozen:
    """What a MAPL run drew from its seed and never trained; drawn again when it is written."""
    if not isinstance(learned, MaplSpec):
        return ()
    model, seed, stages = run.spec.model, run.spec.seed, run.spec.pipeline.stages
    dim, found = model.dim, []
    if learned.projection == "fixed":
        for boundary in range(stages - 1):
            name = TensorSpec(projection_name(boundary), (dim, learned.width))
            found.append((name, _drawn_projection(learned, boundary, seed, dim)))
    if learned.anchors == "factorized":
        for stage in range(stages):
            name = TensorSpec(f"anchors.{stage}.basis", (learned.anchor_rank(dim), dim))
            found.append((name, _drawn_basis(learned, stage, seed, dim)))
    if learned.anchors == "static":
        name = TensorSpec("anchors.table", (model.vocab_size, dim))
        found.append((name, lambda: static_anchors(model, seed=seed).numpy()))
    return tuple(found)


def _drawn_projection(learned: MaplSpec, boundary: int, seed: int, dim: int) -> Callable[[], Fp32]:
    return lambda: fixed_projection(learned, boundary, seed=seed, dim=dim).numpy()


def _drawn_basis(learned: MaplSpec, stage: int, seed: int, dim: int) -> Callable[[], Fp32]:
    return lambda: anchor_basis(learned, stage, seed=seed, dim=dim).numpy()


def _folded(
    run: ResolvedRun, learned: SubspaceSpec, weights: Weights
) -> Iterator[tuple[TensorSpec, Fp32]]:
    model, seed = run.spec.model, run.spec.seed
    basis = subspace_basis(learned, seed=seed, dim=model.dim).double().numpy()
    expected = {tensor.name: tensor for tensor in model_tensors(model)}
    for tensor, values in weights:
        whole = expected[tensor.name]
        if tensor.name == "model.embed_tokens.weight":
            table = subspace_table(seed=seed, vocab_size=model.vocab_size, dim=model.dim)
            inside = values @ basis.T if learned.variant == "reparam" else values
            values = (table.double().numpy() + inside).astype(np.float32)
        elif writes_residual(tensor.name) and tensor.shape != whole.shape:
            values = (basis @ values.astype(np.float64)).astype(np.float32)
        yield whole, values
