# SPDX-License-Identifier: Apache-2.0
"""What remains for ever of a committed step whose full record has left the event log."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.coordinator.state import StepCommitted
from shoal.protocol.ids import PeerId


@dataclass(frozen=True, slots=True)
class StepRow:
    """Fields are called as in `StepCommitted`."""

    step: int
    time_s: float
    loss: float
    validation_loss: float | None
    grad_norm: float
    learning_rate: float
    loss_scale: float
    scale_exponent: int
    num_tokens: int
    seconds: float
    boundary_bytes: int
    reduce_bytes: int
    counted: int
    """(microbatch, stage) slots in the record."""
    missing: int
    """Slots that the record lacked, when it was audited at compaction."""
    double: int
    """Slots that it had twice."""
    sums_digests: tuple[int, ...]
    """By stage."""
    weights_digests: tuple[int, ...]
    """By stage; empty where they were never logged."""


def audit(records: Sequence[StepCommitted], num_microbatches: int) -> tuple[int, int]:
    """(missing, double): microbatches that a stage's committed gradient lacks or has twice."""
    missing = double = 0
    for record in records:
        for stage in record.contributions:
            counted = Counter(m for ids in stage.values() for m in ids)
            missing += sum(m not in counted for m in range(num_microbatches))
            double += sum(count - 1 for count in counted.values())
    return missing, double


def row_of(
    record: StepCommitted, weights_digests: Sequence[int] | None, num_microbatches: int
) -> StepRow:
    missing, double = audit([record], num_microbatches)
    return StepRow(
        step=record.step,
        time_s=record.time_s,
        loss=record.loss,
        validation_loss=record.validation_loss,
        grad_norm=record.grad_norm,
        learning_rate=record.learning_rate,
        loss_scale=record.loss_scale,
        scale_exponent=record.scale_exponent,
        num_tokens=record.num_tokens,
        seconds=record.seconds,
        boundary_bytes=record.boundary_bytes,
        reduce_bytes=record.reduce_bytes,
        sums_digests=record.sums_digests,
        weights_digests=tuple(weights_digests or ()),
        counted=sum(len(ids) for stage in record.contributions for ids in stage.values()),
        missing=missing,
        double=double,
    )


def shares(record: StepCommitted, peers: Mapping[int, PeerId]) -> Counter[PeerId]:
    """How many of a step's counted slots each peer computed."""
    counted: Counter[PeerId] = Counter()
    for stage in record.contributions:
        for incarnation, ids in stage.items():
            if incarnation in peers:
                counted[peers[incarnation]] += len(ids)
    return counted
