# SPDX-License-Identifier: Apache-2.0
"""MAPL (arXiv 2606.05484): a learned orthogonal projection per boundary, token anchors per stage.

    send     z = (x - e_s[t]) A        by the stage s before boundary p
    receive  x̂ = z Aᵀ + e_s'[t]        by the stage s' after it

A [D, R] has orthonormal columns and is held by both stages, mirrored: each adds its share of the
gradient (the sender's (x - e)ᵀ(GA), the receiver's Gᵀz), and both take the same SPEL step
(spel.py). Whether the paper's receiver returns its share is unknown: `grad=encoder_only` leaves
it out. e[t] is a token's anchor, the stage's own: E[t]P with E [V, r] trainable and P [r, D] random
with orthonormal rows (factorized), E[t] alone (full), or frozen and equal on all stages: the
embedding's first value (static, as a subspace network's table).

Shapes: B sequences, T positions, D width, R values per token on the wire, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.compression.learned.halves import ReceiverHalf, SenderHalf, plain_fp32


class MaplSender(SenderHalf):
    projection: Tensor

    def __init__(self, projection: Tensor, *, is_trainable: bool) -> None:
        super().__init__()
        _hold(self, projection, is_trainable=is_trainable)

    def forward(self, stream_BTD: Tensor, branch_BTD: Tensor, side_BTD: Tensor | None) -> Tensor:
        with plain_fp32(stream_BTD.device.type):
            x_BTD = stream_BTD.float() + branch_BTD.float()
            if side_BTD is not None:
                x_BTD = x_BTD - side_BTD
            return x_BTD @ self.projection


class MaplReceiver(ReceiverHalf):
    projection: Tensor

    def __init__(self, projection: Tensor, *, is_trainable: bool, has_share: bool) -> None:
        """`has_share`: whether the projection's gradient has a part from this side."""
        super().__init__()
        self._has_share = has_share
        _hold(self, projection, is_trainable=is_trainable)

    def forward(self, narrow_BTR: Tensor, side_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        projection = self.projection if self._has_share else self.projection.detach()
        with plain_fp32(narrow_BTR.device.type):
            hidden_BTD = narrow_BTR @ projection.T
            if side_BTD is not None:
                hidden_BTD = hidden_BTD + side_BTD
        return hidden_BTD, hidden_BTD


class FactorizedAnchors(nn.Module):
    basis: Tensor

    def __init__(self, vocab_size: int, basis: Tensor) -> None:
        """`basis` is P [r, D]."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab_size, basis.shape[0]))
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        with plain_fp32(tokens_BT.device.type):
            return F.embedding(tokens_BT, self.weight) @ self.basis


class FullAnchors(nn.Module):
    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab_size, dim))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class FrozenTable(nn.Module):
    """Rows that never learn: no parameter, drawn from the seed on every stage."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.table)


def _hold(module: nn.Module, projection: Tensor, *, is_trainable: bool) -> None:
    if is_trainable:
        module.projection = nn.Parameter(projection)
    else:
        module.register_buffer("projection", projection, persistent=False)
