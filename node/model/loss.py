# SPDX-License-Identifier: Apache-2.0
"""The training loss. B sequences, T positions, V vocabulary."""

import torch.nn.functional as F
from torch import Tensor


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross entropy in nats, summed over all tokens, as an fp32 scalar.

    Summed and not averaged: the step divides once, by its fixed token count, and the larger
    gradients use the fixed-point range better.
    """
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="sum")
