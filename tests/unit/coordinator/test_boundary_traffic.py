# SPDX-License-Identifier: Apache-2.0
"""What crossed which boundary, by kind: measured, and nothing that nobody reported."""

from shoal.coordinator.boundary_traffic import bf16_bytes, by_boundary, traffic
from shoal.coordinator.ledger_facts import PreparedFacts, ReceiptFacts
from shoal.protocol.ids import Incarnation, MicrobatchId, Stage

from .fake_run import make_run


def receipt(
    stage: int, microbatch: int, *, forward: int | None, backward: int | None
) -> ReceiptFacts:
    return ReceiptFacts(
        incarnation=Incarnation(stage + 1),
        microbatch=MicrobatchId(microbatch),
        stage=Stage(stage),
        forward_bytes=forward,
        backward_bytes=backward,
    )


def test_each_leg_belongs_to_the_boundary_that_it_crossed() -> None:
    receipts = [
        receipt(stage, microbatch, forward=forward, backward=backward)
        for microbatch in range(2)
        for stage, (forward, backward) in enumerate([(100, None), (10, 7), (None, 3)])
    ]
    assert traffic(receipts, [], 3) == {"forward": (200, 20), "backward": (14, 6)}


def test_shares_that_replicas_fetch_are_synchronization() -> None:
    prepares = [
        PreparedFacts(Incarnation(who), 1, 7, (1.0,), share_bytes=shares)
        for who, shares in enumerate([((0, 5),), ((0, 6), (1, 8)), ((1, 9),)], start=1)
    ]
    assert traffic([], prepares, 3) == {"synchronization": (11, 17)}
    assert traffic([], prepares[:1], 2) == {"synchronization": (5,)}


def test_a_kind_that_nobody_reports_is_absent_not_zero() -> None:
    silent = [receipt(s, 0, forward=None, backward=None) for s in range(2)]
    assert traffic(silent, [], 2) == {}
    assert traffic([*silent, receipt(0, 1, forward=0, backward=None)], [], 2) == {"forward": (0,)}


def test_a_claim_beyond_the_pipelines_ends_is_nobodys() -> None:
    claims = [receipt(0, 0, forward=1, backward=5), receipt(1, 0, forward=5, backward=2)]
    assert traffic(claims, [], 2) == {"forward": (1,), "backward": (2,)}
    assert traffic(claims[:1], [], 1) == {}


def test_by_boundary_lists_every_boundary_with_its_kinds() -> None:
    assert by_boundary({"forward": (1, 2), "backward": (3, 4)}, 3) == [
        {"forward": 1, "backward": 3},
        {"forward": 2, "backward": 4},
    ]
    assert by_boundary({}, 3) == [{}, {}]


def test_bf16_takes_two_bytes_for_each_value_of_the_models_width() -> None:
    spec = make_run().spec
    assert bf16_bytes(spec, "forward") == 2 * spec.tokens_per_step * spec.model.dim
    assert bf16_bytes(spec, "backward") == bf16_bytes(spec, "forward")
    assert bf16_bytes(spec, "synchronization") is None
