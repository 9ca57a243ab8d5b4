# SPDX-License-Identifier: Apache-2.0
"""Commands to nodes, made from the books."""

from collections.abc import Sequence

from shoal.coordinator.ledger_facts import Lease, ReduceRound
from shoal.coordinator.state import StepCommitted
from shoal.protocol.ids import Stage
from shoal.protocol.proto import coordinator_pb2


def lease_update(step: int, attempt: int, leases: Sequence[Lease]) -> coordinator_pb2.LeaseUpdate:
    return coordinator_pb2.LeaseUpdate(step=step, attempt=attempt, leases=to_protos(leases))


def reduce(step: int, attempt: int, manifest: ReduceRound) -> coordinator_pb2.Reduce:
    return coordinator_pb2.Reduce(
        step=step,
        attempt=attempt,
        round=manifest.round,
        parts=[
            coordinator_pb2.ReducePart(incarnation=who, microbatches=ids)
            for who, ids in manifest.parts
        ],
    )


def commit(
    record: StepCommitted,
    stage: Stage,
    sealed: coordinator_pb2.SignedRecord | None = None,
    *,
    term: int = 0,
) -> coordinator_pb2.Commit:
    """`term` is the leader's; the record may be of an earlier one. A replay needs neither term nor
    signed record."""
    return coordinator_pb2.Commit(
        step=record.step,
        attempt=record.attempt,
        learning_rate=record.learning_rate,
        grad_norm=record.grad_norm,
        clip_scale=record.clip_scale,
        scale_exponent=record.scale_exponent,
        loss_scale=record.loss_scale,
        num_tokens=record.num_tokens,
        sums_digest=record.sums_digests[stage],
        record=sealed.record if sealed else b"",
        signature=sealed.signature if sealed else b"",
        term=term,
    )


def to_protos(leases: Sequence[Lease]) -> list[coordinator_pb2.Lease]:
    return [
        coordinator_pb2.Lease(
            microbatch=lease.microbatch,
            upstream=lease.upstream,
            downstream=lease.downstream,
            downstream_done=lease.downstream_done,
            upstream_done=lease.upstream_done,
        )
        for lease in leases
    ]
