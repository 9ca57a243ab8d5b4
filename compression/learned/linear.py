# SPDX-License-Identifier: Apache-2.0
"""An encoder and a decoder matrix, nothing else: what learned codecs must beat.

Shapes: B sequences, T positions, D width, R values per token on the wire.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.compression.learned.halves import ReceiverHalf, SenderHalf, plain_fp32


class Matrix(nn.Module):
    """A linear map without bias, in fp32; zero until it is drawn or loaded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


class LinearSender(SenderHalf):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Matrix(dim, width)])

    def forward(self, stream_BTD: Tensor, branch_BTD: Tensor, side_BTD: Tensor | None) -> Tensor:
        with plain_fp32(stream_BTD.device.type):
            narrow_BTR: Tensor = self.encoder[0](stream_BTD.float() + branch_BTD.float())
        return narrow_BTR


class LinearReceiver(ReceiverHalf):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.decoder = nn.ModuleList([Matrix(width, dim)])

    def forward(self, narrow_BTR: Tensor, side_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        with plain_fp32(narrow_BTR.device.type):
            hidden_BTD = self.decoder[0](narrow_BTR)
        return hidden_BTD, hidden_BTD
