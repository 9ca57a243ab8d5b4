# SPDX-License-Identifier: Apache-2.0
"""First weights: a function of (seed, tensor name, shape), whatever the placement.

Linear and embedding weights are N(0, init_std); what writes into the residual stream is divided
by sqrt(2 num_layers) (GPT-2's rule), so that its variance does not grow with depth. Norms are 1.
What a learned codec adds has first values of its own (compression/learned/first_values.py).
"""

import math

import torch
from torch import Tensor

from shoal.compression.learned.first_values import first_value
from shoal.compression.learned.frozen import gaussian
from shoal.protocol.learned import LearnedSpec
from shoal.protocol.spec import ModelSpec


def initial_std(name: str, model: ModelSpec) -> float:
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return model.init_std / math.sqrt(2 * model.num_layers)
    return model.init_std


def initial_tensor(
    name: str,
    shape: torch.Size,
    *,
    seed: int,
    model: ModelSpec,
    learned: LearnedSpec | None = None,
) -> Tensor:
    """The tensor's first value: fp32, on the CPU. `learned` is the codec of the boundaries beside
    the tensor's stage; None where there is no boundary."""
    value = first_value(name, tuple(shape), seed=seed, dim=model.dim, learned=learned)
    if value is not None:
        return value
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    return gaussian(seed, name, tuple(shape), std=initial_std(name, model))
