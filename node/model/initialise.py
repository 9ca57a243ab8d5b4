# SPDX-License-Identifier: Apache-2.0
"""First weights: a function of (seed, tensor name, shape), whatever the placement.

Linear and embedding weights are N(0, init_std); what writes into the residual stream is divided
by sqrt(2 num_layers) (GPT-2's rule), so that its variance does not grow with depth. Norms are 1.
"""

import hashlib
import math

import torch
from torch import Tensor

from shoal.protocol.spec import ModelSpec

_CHUNK = 1 << 20  # part of the definition: another chunk length draws other weights


def initial_std(name: str, model: ModelSpec) -> float:
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return model.init_std / math.sqrt(2 * model.num_layers)
    return model.init_std


def initial_tensor(name: str, shape: torch.Size, *, seed: int, model: ModelSpec) -> Tensor:
    """The tensor's first value: fp32, on the CPU.

    Drawn in fp64 and rounded once: PyTorch's fp32 normals depend on the CPU's vector width.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    key = hashlib.sha256(f"shoal/initialise/{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    std = initial_std(name, model)
    flat = torch.empty(shape.numel(), dtype=torch.float32)
    for part in torch.split(flat, _CHUNK):
        part.copy_(torch.randn(len(part), generator=generator, dtype=torch.float64).mul_(std))
    return flat.view(shape)
