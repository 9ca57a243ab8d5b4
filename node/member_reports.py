# SPDX-License-Identifier: Apache-2.0
"""What a member of a stage tells the coordinator, as events."""

import struct
from collections.abc import Callable, Mapping, Sequence

import xxhash

from shoal.node.stage_worker import Computed, PreparedSums
from shoal.protocol.errors import ProtocolError, ShoalError, UnreachableError
from shoal.protocol.ids import Incarnation, MicrobatchId
from shoal.protocol.proto import coordinator_pb2, types_pb2

_MAX_DETAIL_CHARS = 500

Send = Callable[[coordinator_pb2.NodeEvent], None]


def trouble_event(
    kind: coordinator_pb2.TroubleKind.ValueType,
    error: Exception,
    *,
    incarnation: int,
    step: int = 0,
    peer_id: str = "",
) -> coordinator_pb2.NodeEvent:
    """Trouble with a step, or a peer, where one is named."""
    trouble = coordinator_pb2.Trouble(
        kind=kind,
        incarnation=incarnation,
        error=type(error).__name__,
        detail=str(error)[:_MAX_DETAIL_CHARS],
        step=step,
        peer_id=peer_id,
    )
    return coordinator_pb2.NodeEvent(trouble=trouble)


class MemberReports:
    """One incarnation's. `step` and `attempt` are those under way; the member sets them."""

    def __init__(self, send: Send, incarnation: Incarnation, stage: int) -> None:
        self._send = send
        self._incarnation = incarnation
        self._stage = stage
        self.step = 0
        self.attempt = 0

    # ---- work ----------------------------------------------------------------------------

    def release(self, microbatches: Sequence[MicrobatchId]) -> None:
        """Sent also without any, so that the coordinator gives this node no more work."""
        release = coordinator_pb2.Release(
            incarnation=self._incarnation,
            step=self.step,
            attempt=self.attempt,
            microbatches=microbatches,
        )
        self._send(coordinator_pb2.NodeEvent(release=release))

    def receipt(self, microbatch: MicrobatchId, parts: Sequence[Computed]) -> None:
        """`parts` are what came of the microbatch; the last one holds the loss, if any does."""
        *forwards, last = parts
        loss_sum = last.loss_sum
        receipt = coordinator_pb2.Receipt(
            incarnation=self._incarnation,
            step=self.step,
            attempt=self.attempt,
            microbatch=microbatch,
            stage=self._stage,
            loss_sum=loss_sum or 0.0,
            has_loss=loss_sum is not None,
            busy_s=sum(part.busy_s for part in parts),
            boundary_bytes=_num_bytes(parts) or 0,
            forward_bytes=_num_bytes(forwards),
            backward_bytes=_num_bytes([last]),
            digest=_receipt_digest(parts),
        )
        self._send(coordinator_pb2.NodeEvent(receipt=receipt))

    def prepared(
        self,
        round_number: int,
        sums: PreparedSums,
        *,
        reduce_bytes: int,
        share_bytes: Mapping[int, int],
    ) -> None:
        """`share_bytes`: what was fetched of the other sides' shares, by boundary."""
        prepared = coordinator_pb2.Prepared(
            incarnation=self._incarnation,
            step=self.step,
            attempt=self.attempt,
            round=round_number,
            sums_digest=sums.digest,
            squared_norms=sums.squared_norms,
            reduce_bytes=reduce_bytes,
            share_bytes=share_bytes,
        )
        self._send(coordinator_pb2.NodeEvent(prepared=prepared))

    def applied(self, step: int, weights_digest: int) -> None:
        applied = coordinator_pb2.Applied(
            incarnation=self._incarnation, step=step, weights_digest=weights_digest
        )
        self._send(coordinator_pb2.NodeEvent(applied=applied))

    # ---- trouble -------------------------------------------------------------------------

    def failure(self, error: Exception) -> None:
        """The node can't do what it was told."""
        self._send(self._trouble(coordinator_pb2.TROUBLE_KIND_OWN_FAILURE, error))

    def numbers(
        self,
        error: ProtocolError,
        microbatch: MicrobatchId,
        leg: coordinator_pb2.TaskLeg.ValueType,
    ) -> None:
        event = self._trouble(coordinator_pb2.TROUBLE_KIND_NUMBERS, error)
        event.trouble.attempt = self.attempt
        event.trouble.microbatch = microbatch
        event.trouble.leg = leg
        self._send(event)

    def unreachable(
        self,
        member: types_pb2.Member,
        reason: str,
        *,
        error: type[ShoalError] = UnreachableError,
    ) -> None:
        event = self._trouble(
            coordinator_pb2.TROUBLE_KIND_PEER_UNREACHABLE, error(reason), peer_id=member.peer_id
        )
        event.trouble.peer_incarnation = member.incarnation
        self._send(event)

    def _trouble(
        self,
        kind: coordinator_pb2.TroubleKind.ValueType,
        error: Exception,
        *,
        peer_id: str = "",
    ) -> coordinator_pb2.NodeEvent:
        return trouble_event(
            kind, error, incarnation=self._incarnation, step=self.step, peer_id=peer_id
        )


def _num_bytes(parts: Sequence[Computed]) -> int | None:
    """Of encoded boundary tensors; None where there is none."""
    sizes = [len(part.payload) for part in parts if part.payload is not None]
    return sum(sizes) if sizes else None


def _receipt_digest(parts: Sequence[Computed]) -> int:
    """Over what came of a microbatch, the same for whoever computes it."""
    digest = xxhash.xxh3_64()
    for part in parts:
        if part.payload is not None:
            digest.update(part.payload)
        if part.loss_sum is not None:
            digest.update(struct.pack("<d", part.loss_sum))
    return digest.intdigest()
