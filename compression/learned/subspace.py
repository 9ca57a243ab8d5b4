# SPDX-License-Identifier: Apache-2.0
"""Subspace networks (SSN; Protocol Models, arXiv 2506.01260).

What writes into the residual stream stays within the span of one U [D, R], the same for the whole
run, on top of a frozen table T of token vectors: z = (x - T[t]) U crosses, x = z Uᵀ + T[t] comes
out, exactly; and so does the gradient, since whatever is before the boundary sees it through UUᵀ
only. The last stage is free, as no boundary follows it.

Two ways to stay there: store W = UV and train V (`reparam`, any optimizer), or train W and project
it back after every step (`projected`, as node0 does). U is drawn from the seed and never updated,
as in public code; the paper's refresh on the Grassmannian is not built.

Shapes: B sequences, T positions, D width, R values per token on the wire.
"""

import torch
from torch import Tensor

from shoal.compression.learned.exact import within_span
from shoal.compression.learned.halves import ReceiverHalf, SenderHalf, plain_fp32


class SubspaceSender(SenderHalf):
    basis: Tensor

    def __init__(self, basis: Tensor) -> None:
        super().__init__()
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, stream_BTD: Tensor, branch_BTD: Tensor, side_BTD: Tensor | None) -> Tensor:
        assert side_BTD is not None, "a subspace network has its table"
        with plain_fp32(stream_BTD.device.type):
            return (stream_BTD.float() + branch_BTD.float() - side_BTD) @ self.basis


class SubspaceReceiver(ReceiverHalf):
    basis: Tensor

    def __init__(self, basis: Tensor) -> None:
        super().__init__()
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, narrow_BTR: Tensor, side_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        assert side_BTD is not None, "a subspace network has its table"
        with plain_fp32(narrow_BTR.device.type):
            hidden_BTD = narrow_BTR @ self.basis.T + side_BTD
        return hidden_BTD, hidden_BTD


@torch.no_grad()
def project_back(name: str, weights: Tensor, basis: Tensor) -> None:
    """Bring a matrix's outputs back into the span, in place: W ← U(UᵀW), and (EU)Uᵀ for an
    embedding, whose rows are outputs. The same bits everywhere."""
    columns = weights.T if name == "model.embed_tokens.weight" else weights
    device = torch.device("cpu") if weights.device.type == "mps" else weights.device  # has no fp64
    confined = within_span(columns.to(device), basis.to(device))
    columns.copy_(confined)


def writes_residual(name: str) -> bool:
    """Whether the parameter's outputs enter the residual stream."""
    return name == "model.embed_tokens.weight" or name.endswith(
        ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    )
