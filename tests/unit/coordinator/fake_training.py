# SPDX-License-Identifier: Apache-2.0
"""What a fake swarm trains: integers for tensors, and what an undisturbed run makes of them.

A gradient is an integer made from (step, microbatch, stage, weights, what the neighbours sent), a
stage's sum is their sum, moments follow from sums, and weights from moments: whatever is counted
twice or not at all, or applied without the right moments, changes every later digest.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.protocol.spec import ResolvedRun

MASK = (1 << 62) - 1

State = tuple[int, int]
"""(weights, moments)"""


def mix(*parts: int) -> int:
    """A 62-bit number that depends on every part."""
    return hash(parts) & MASK


def initial_weights(stage: int) -> int:
    return mix(stage, 17)


def advanced(moments: int, total: int) -> int:
    return mix(moments, total, 5)


def applied(weights: int, moments: int, step: int) -> int:
    """`moments` are those after the step."""
    return mix(weights, moments, step)


def scaled(total: int, coarsen: int) -> int:
    """Sums at a coarser scale have other bits."""
    return mix(total, coarsen) if coarsen else total


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run computes: sums and weights by step (from 1, and from 0) and stage."""

    sums: dict[int, tuple[int, ...]]
    weights: dict[int, tuple[int, ...]]


def reference(run: ResolvedRun, coarsen: Mapping[int, int] | None = None) -> Reference:
    """`coarsen`: of the steps that were not made at the usual scale."""
    stages, weights = run.spec.pipeline.stages, {}
    weights[0] = tuple(initial_weights(s) for s in range(stages))
    sums = {}
    moments = [0] * stages
    for step in range(1, run.spec.steps + 1):
        before, totals = weights[step - 1], [0] * stages
        for m in range(run.spec.batch.microbatches):
            values, gradient = [0], 0
            for s in range(stages):
                values.append(mix(step, m, s, before[s], values[s]))
            for s in reversed(range(stages)):
                gradient = mix(step, m, s, before[s], values[s], gradient, 1)
                totals[s] = (totals[s] + gradient) & MASK
        totals = [scaled(total, (coarsen or {}).get(step, 0)) for total in totals]
        sums[step] = tuple(totals)
        moments = [advanced(moments[s], totals[s]) for s in range(stages)]
        weights[step] = tuple(applied(before[s], moments[s], step) for s in range(stages))
    return Reference(sums, weights)
