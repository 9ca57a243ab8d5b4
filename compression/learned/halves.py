# SPDX-License-Identifier: Apache-2.0
"""What a learned codec puts into a stage: a half before its layers, a half after them.

The halves run under autograd, in fp32 also where the layers don't, and their parameters are the
stage's: its optimizer, sums, digests and snapshots contain them. Only what the sender's half emits
crosses the boundary, through a quantizer; the gradient with respect to it comes back.

Shapes: B sequences, T positions, D width of the residual stream, R values per token on the wire.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class SenderHalf(nn.Module, ABC):
    """Before a boundary."""

    @abstractmethod
    def forward(self, stream_BTD: Tensor, branch_BTD: Tensor, side_BTD: Tensor | None) -> Tensor:
        """`narrow_BTR` fp32. `stream_BTD` enters the last layer's feed-forward branch and
        `branch_BTD` is what that adds to it; most halves take the sum."""


class ReceiverHalf(nn.Module, ABC):
    """After a boundary."""

    @abstractmethod
    def forward(self, narrow_BTR: Tensor, side_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(what the first layer's attention branch reads, what that branch is added to), fp32;
        with most halves the same tensor."""


@dataclass(frozen=True, slots=True)
class StageHalves:
    """Of one stage. Empty without a learned codec."""

    receiver: ReceiverHalf | None = None
    sender: SenderHalf | None = None
    side: nn.Module | None = None
    """`tokens_BT` to `side_BTD`, what both halves of the stage know of a token: computed once."""
    embeds_side: bool = False
    """Whether the embedding is added to `side_BTD`."""
    subspace: Tensor | None = None
    """U [D, R] where matrices that write into the residual stream give coordinates in its span."""
    constraint: Tensor | None = None
    """U [D, R] where such matrices are full, and brought back into its span after every update."""


def plain_fp32(device_type: str) -> torch.autocast:
    """No autocast: halves keep the precision that the wire codec then spends."""
    return torch.autocast(device_type, enabled=False)
