# SPDX-License-Identifier: Apache-2.0
"""What crossed which stage boundary in a step, by kind, as the nodes measured it. Pure.

Boundary b lies between the stages b and b + 1. Counted is what a step's receipts tell: every
training microbatch once, and the shares that replicas fetched of what a learned codec holds on both
sides ("synchronization"). What was sent again after a loss is not in it, nor the forward tensors of
validation, which have no receipts.
"""

from collections.abc import Iterable, Mapping

from shoal.coordinator.ledger_facts import PreparedFacts, ReceiptFacts
from shoal.protocol.spec import RunSpec

FORWARD, BACKWARD, SYNCHRONIZATION = KINDS = ("forward", "backward", "synchronization")
_BF16_BYTES = 2


def traffic(
    receipts: Iterable[ReceiptFacts], prepares: Iterable[PreparedFacts], num_stages: int
) -> dict[str, tuple[int, ...]]:
    """Encoded bytes by kind, for each boundary. A kind of which no receipt tells is left out."""
    num_boundaries = num_stages - 1
    found: dict[str, list[int]] = {}

    def add(kind: str, boundary: int, num_bytes: int | None) -> None:
        if num_bytes is not None and 0 <= boundary < num_boundaries:
            found.setdefault(kind, [0] * num_boundaries)[boundary] += num_bytes

    for receipt in receipts:
        add(FORWARD, receipt.stage, receipt.forward_bytes)
        add(BACKWARD, receipt.stage - 1, receipt.backward_bytes)
    for prepared in prepares:
        for boundary, num_bytes in prepared.share_bytes:
            add(SYNCHRONIZATION, boundary, num_bytes)
    return {kind: tuple(found[kind]) for kind in KINDS if kind in found}


def by_boundary(by_kind: Mapping[str, tuple[int, ...]], num_stages: int) -> list[dict[str, int]]:
    """The same by boundary, and for each by kind; a boundary that a kind doesn't name lacks it."""
    return [
        {kind: sizes[boundary] for kind, sizes in by_kind.items() if boundary < len(sizes)}
        for boundary in range(num_stages - 1)
    ]


def bf16_bytes(spec: RunSpec, kind: str) -> int | None:
    """What a step's tensors of this kind take over one boundary in plain bf16, the model's whole
    width; None for kinds that only a codec needs."""
    if kind not in (FORWARD, BACKWARD):
        return None
    return spec.tokens_per_step * spec.model.dim * _BF16_BYTES
