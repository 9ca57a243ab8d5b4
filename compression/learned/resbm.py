# SPDX-License-Identifier: Apache-2.0
"""Residual bottlenecks (ResBM, arXiv 2604.11947): y = F(x) + Ix, I a rectangular identity.

The first R coordinates of the residual stream cross every boundary untouched, so an identity path
of that width runs through the whole network; a learned F carries the rest. The paper's F is not
known to us, so there are two, both without biases like the rest of the model:

- boundary form (Hone's): z = Enc(x) + x[:R], x' = Dec(z) + pad(z), each a linear map, SiLU and a
  linear map with max(4R, 64) values between;
- IOTA form (macrocosm-os/iota, older than the paper): inside the layers beside the boundary. The
  sender's last feed-forward branch ends in W SiLU(·) and keeps the skip's first R coordinates; the
  receiver's first attention branch reads ReLU(Dz), and its skip is pad(z).

Controls without the identity: the boundary form without its skips, and IOTA's skip-free form,
ReLU(E₁ ReLU(E₀ x)) and ReLU(Dz).

Shapes: B sequences, T positions, D width, R values per token on the wire.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.compression.learned.halves import ReceiverHalf, SenderHalf, plain_fp32
from shoal.compression.learned.linear import Matrix
from shoal.protocol.learned_tensors import bottleneck_width


class BoundaryFormSender(SenderHalf):
    def __init__(self, dim: int, width: int, *, identity: bool) -> None:
        super().__init__()
        inner = bottleneck_width(width)
        self.encoder = nn.ModuleList([Matrix(dim, inner), Matrix(inner, width)])
        self._width, self._identity = width, identity

    def forward(self, stream_BTD: Tensor, branch_BTD: Tensor, side_BTD: Tensor | None) -> Tensor:
        with plain_fp32(stream_BTD.device.type):
            x_BTD = stream_BTD.float() + branch_BTD.float()
            narrow_BTR: Tensor = self.encoder[1](F.silu(self.encoder[0](x_BTD)))
            return narrow_BTR + x_BTD[..., : self._width] if self._identity else narrow_BTR


class BoundaryFormReceiver(ReceiverHalf):
    def __init__(self, dim: int, width: int, *, identity: bool) -> None:
        super().__init__()
        inner = bottleneck_width(width)
        self.decoder = nn.ModuleList([Matrix(width, inner), Matrix(inner, dim)])
        self._dim, self._identity = dim, identity

    def forward(self, narrow_BTR: Tensor, side_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        with plain_fp32(narrow_BTR.device.type):
            hidden_BTD = self.decoder[1](F.silu(self.decoder[0](narrow_BTR)))
            if self._identity:
                hidden_BTD = hidden_BTD + padded(narrow_BTR, self._dim)
        return hidden_BTD, hidden_BTD


class IotaSender(SenderHalf):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Matrix(dim, width)])
        self._width = width

    def forward(self, stream_BTD: Tensor, branch_BTD: Tensor, side_BTD: Tensor | None) -> Tensor:
        with plain_fp32(stream_BTD.device.type):
            narrow_BTR: Tensor = self.encoder[0](F.silu(branch_BTD.float()))
            return narrow_BTR + stream_BTD[..., : self._width].float()


class IotaReceiver(ReceiverHalf):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.decoder = nn.ModuleList([Matrix(width, dim)])
        self._dim = dim

    def forward(self, narrow_BTR: Tensor, side_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        with plain_fp32(narrow_BTR.device.type):
            return F.relu(self.decoder[0](narrow_BTR)), padded(narrow_BTR, self._dim)


class SkipFreeSender(SenderHalf):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Matrix(dim, width), Matrix(width, width)])

    def forward(self, stream_BTD: Tensor, branch_BTD: Tensor, side_BTD: Tensor | None) -> Tensor:
        with plain_fp32(stream_BTD.device.type):
            x_BTD = stream_BTD.float() + branch_BTD.float()
            return F.relu(self.encoder[1](F.relu(self.encoder[0](x_BTD))))


class SkipFreeReceiver(ReceiverHalf):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.decoder = nn.ModuleList([Matrix(width, dim)])

    def forward(self, narrow_BTR: Tensor, side_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        with plain_fp32(narrow_BTR.device.type):
            hidden_BTD = F.relu(self.decoder[0](narrow_BTR))
        return hidden_BTD, hidden_BTD


def padded(narrow_BTR: Tensor, dim: int) -> Tensor:
    """The first coordinates of a stream whose others are zero."""
    return F.pad(narrow_BTR, (0, dim - narrow_BTR.shape[-1]))
