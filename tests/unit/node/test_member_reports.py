# SPDX-License-Identifier: Apache-2.0
"""What a receipt tells of the bytes that came of a microbatch."""

from collections.abc import Sequence

from shoal.node.member_reports import MemberReports
from shoal.node.stage_worker import Computed
from shoal.protocol.ids import Incarnation, MicrobatchId
from shoal.protocol.proto import coordinator_pb2


def made(num_bytes: int | None, loss_sum: float | None = None) -> Computed:
    payload = None if num_bytes is None else memoryview(bytes(num_bytes))
    return Computed(payload, loss_sum, busy_s=0.5)


def receipt(parts: Sequence[Computed]) -> coordinator_pb2.Receipt:
    sent: list[coordinator_pb2.NodeEvent] = []
    MemberReports(sent.append, Incarnation(3), stage=1).receipt(MicrobatchId(0), parts)
    return sent[0].receipt


def legs(of: coordinator_pb2.Receipt) -> tuple[int | None, int | None]:
    forward = of.forward_bytes if of.HasField("forward_bytes") else None
    return forward, of.backward_bytes if of.HasField("backward_bytes") else None


def test_a_stage_between_two_others_tells_of_both_legs() -> None:
    told = receipt([made(100), made(7)])
    assert (told.boundary_bytes, *legs(told)) == (107, 100, 7)


def test_the_first_stage_sends_no_gradient_and_the_last_no_activation() -> None:
    first, last = receipt([made(100), made(None)]), receipt([made(7, loss_sum=2.0)])
    assert (first.boundary_bytes, *legs(first)) == (100, 100, None)
    assert (last.boundary_bytes, *legs(last)) == (7, None, 7)


def test_a_stage_alone_and_validation_send_nothing() -> None:
    told = receipt([made(None, loss_sum=2.0)])
    assert (told.boundary_bytes, *legs(told)) == (0, None, None)
