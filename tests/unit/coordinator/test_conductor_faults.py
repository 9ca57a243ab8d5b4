# SPDX-License-Identifier: Apache-2.0
"""Nodes that lie, fail or fall out of reach."""

import pytest

from shoal.coordinator.transfers import Transfer, Version
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.proto import types_pb2

from .fake_node import FakeNode
from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, lines

# ---- nodes that misbehave ----------------------------------------------------------------


def stale_events(node: FakeNode, swarm: FakeSwarm) -> list[pb.NodeEvent]:
    state, incarnation = swarm.conductor.state, node.incarnation
    step, attempt = state.step + 1, state.attempt
    return [
        pb.NodeEvent(receipt=pb.Receipt(incarnation=incarnation, step=step, attempt=attempt)),
        pb.NodeEvent(
            prepared=pb.Prepared(incarnation=incarnation, step=step, attempt=attempt, round=1)
        ),
        pb.NodeEvent(applied=pb.Applied(incarnation=incarnation, step=state.step)),
        pb.NodeEvent(ready=pb.Ready(incarnation=incarnation, step=state.step)),
        pb.NodeEvent(trouble=pb.Trouble(kind=pb.TROUBLE_KIND_OWN_FAILURE, incarnation=incarnation)),
    ]


def test_what_a_fenced_incarnation_still_says_changes_nothing() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    zombie = swarm.at(0)[0]
    late = stale_events(zombie, swarm)
    zombie.detach()
    zombie.attach()  # it is another incarnation now
    ledger = swarm.conductor.ledger
    assert ledger is not None
    assert zombie.session is not None
    before = dict(ledger.receipts), swarm.conductor.state
    for event in late:
        swarm.conductor.receive(zombie.session, event)
    assert (dict(ledger.receipts), swarm.conductor.state) == before
    assert swarm.conductor.marks[zombie.peer_id] == 0
    assert swarm.conductor.sessions[zombie.peer_id].failures == 0
    swarm.finish()
    assert_undisturbed(swarm)


def test_answers_to_another_attempt_do_not_count() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    ledger = swarm.conductor.ledger
    assert ledger is not None
    node = swarm.at(0)[0]
    assert node.session is not None
    before = dict(ledger.receipts)
    for m in range(4):
        receipt = pb.Receipt(incarnation=node.incarnation, step=2, attempt=9, microbatch=m)
        swarm.conductor.receive(node.session, pb.NodeEvent(receipt=receipt))
    assert ledger.receipts == before


@pytest.mark.parametrize(
    "receipt",
    [
        pb.Receipt(microbatch=4_000_000, stage=0),
        pb.Receipt(microbatch=0, stage=7),
        pb.Receipt(microbatch=0, stage=1),
        pb.Receipt(microbatch=0, stage=0, boundary_bytes=2**63),
    ],
)
def test_impossible_receipts_are_refused_and_marked(receipt: pb.Receipt) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    assert node.session is not None
    receipt.incarnation, receipt.step, receipt.attempt = node.incarnation, 2, 1
    swarm.conductor.receive(node.session, pb.NodeEvent(receipt=receipt))
    assert swarm.conductor.marks[node.peer_id] == 1
    assert kinds(swarm)[-1] == "refused"
    swarm.finish()
    assert_undisturbed(swarm)


def test_who_computes_a_microbatch_again_with_other_bits_is_named() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    honest, other = swarm.at(1)
    other.corrupt_bits = 1
    ledger = swarm.conductor.ledger
    assert ledger is not None
    swarm.run_until(
        lambda: any(r.incarnation == honest.incarnation for r in ledger.receipts.values())
    )
    honest.kill()
    swarm.finish()
    assert "with other bits than" in lines(swarm)


def test_a_node_that_was_slow_for_a_while_gets_work_again() -> None:
    swarm = FakeSwarm(make_run(steps=30), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    node.busy_s = 10.0
    swarm.run_to_step(8)
    who, records = Incarnation(node.incarnation), swarm.conductor.state.records
    assert records[8].contributions[0][who] == ()
    node.busy_s = 0.1
    swarm.finish()
    done = [len(r.contributions[0][who]) for r in swarm.conductor.state.records.values()]
    assert all(done[-5:])


def test_a_negative_norm_is_refused() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    assert node.session is not None
    prepared = pb.Prepared(
        incarnation=node.incarnation, step=2, attempt=1, round=1, squared_norms=[-1.0]
    )
    swarm.conductor.receive(node.session, pb.NodeEvent(prepared=prepared))
    assert "negative" in lines(swarm)
    swarm.finish()
    assert_undisturbed(swarm)


@pytest.mark.parametrize(
    "claim",
    [
        pb.Prepared(reduce_bytes=2**63),
        pb.Prepared(share_bytes={0: 2**63}),
        pb.Prepared(share_bytes={1: 5}),
        pb.Prepared(share_bytes={4_000_000: 5}),
    ],
)
def test_a_sum_that_claims_bytes_that_cannot_be_is_refused(claim: pb.Prepared) -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    assert node.session is not None
    claim.incarnation, claim.step, claim.attempt, claim.round = node.incarnation, 2, 1, 1
    swarm.conductor.receive(node.session, pb.NodeEvent(prepared=claim))
    assert swarm.conductor.marks[node.peer_id] == 1
    swarm.finish()
    assert_undisturbed(swarm)


def test_an_event_without_content_is_refused() -> None:
    swarm = FakeSwarm(make_run(), 4)
    node = swarm.at(0)[0]
    assert node.session is not None
    swarm.conductor.receive(node.session, pb.NodeEvent())
    assert swarm.conductor.marks[node.peer_id] == 1


def test_complaints_about_strangers_are_not_kept() -> None:
    swarm = FakeSwarm(make_run(), 4)
    node = swarm.at(0)[0]
    assert node.session is not None
    node.session.transfers = [Transfer(Version(0, types_pb2.STATE_PART_ALL), ())]
    for number in range(10):
        trouble = pb.Trouble(kind=pb.TROUBLE_KIND_BAD_PEER, peer_id=f"made-up-{number}")
        node.say(trouble=trouble)
    swarm.run_until(lambda: not node.events)
    assert not swarm.conductor.marks
    assert not node.session.bad_donors


def test_a_replica_with_other_sums_is_outvoted_by_two() -> None:
    swarm = FakeSwarm(make_run(replicas=3), 6)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.corrupt_sums = 3
    swarm.finish()
    assert swarm.conductor.marks[liar.peer_id] > 0
    assert_undisturbed(swarm)


def test_one_disagreement_of_two_replicas_redoes_the_step() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.corrupt_sums = 3
    swarm.run_until(lambda: "redone" in kinds(swarm))
    liar.corrupt_sums = 0
    swarm.finish()
    assert_undisturbed(swarm)


def test_two_replicas_that_keep_disagreeing_pause_the_run() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.corrupt_sums = 3
    swarm.run_until(lambda: swarm.conductor.state.paused is not None)
    assert "replicas of stage 1 hold different sums of step 2" in swarm.conductor.waiting_for
    swarm.conductor.dismiss(liar.peer_id)
    swarm.conductor.resume()
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_replica_with_other_weights_is_taken_out_and_copies_them() -> None:
    swarm = FakeSwarm(make_run(replicas=3), 6)
    swarm.run_until(in_step(swarm))
    liar = swarm.at(1)[0]
    liar.corrupt_weights = 3
    swarm.run_until(lambda: "fenced" in kinds(swarm))
    liar.corrupt_weights = 0
    swarm.finish()
    assert swarm.conductor.marks[liar.peer_id] == 1
    assert_undisturbed(swarm)


# ---- links -------------------------------------------------------------------------------


def complain(swarm: FakeSwarm, reporter: FakeNode, peer: FakeNode, seconds: float) -> None:
    for _ in range(round(seconds)):
        if not reporter.incarnation or not peer.incarnation:
            return
        reporter.trouble(
            pb.TROUBLE_KIND_PEER_UNREACHABLE, "timeout", peer_incarnation=peer.incarnation
        )
        while reporter.events:
            reporter.report()
        swarm.pass_time(1)


def hold(swarm: FakeSwarm) -> None:
    """A step that is open and doesn't move, of nodes that are known to take a minute."""
    swarm.run_until(in_step(swarm))
    for node in swarm.nodes.values():
        node.mute = True
        assert node.session is not None
        node.session.pace.extend([60.0] * 8)


def test_a_peer_that_stays_unreachable_is_taken_out_and_may_come_back() -> None:
    swarm = FakeSwarm(make_run(), 4)
    hold(swarm)
    reporter, peer = swarm.at(0)[0], swarm.at(1)[0]
    before = peer.incarnation
    complain(swarm, reporter, peer, 4)
    assert swarm.conductor.sessions[peer.peer_id].incarnation == before
    complain(swarm, reporter, peer, 3)
    assert swarm.conductor.sessions[peer.peer_id].incarnation != before
    assert "unreachable" in kinds(swarm)
    for node in swarm.nodes.values():
        node.mute = False
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_node_that_reaches_nobody_is_the_one_that_is_taken_out() -> None:
    swarm = FakeSwarm(make_run(replicas=3), 6)
    hold(swarm)
    reporter = swarm.at(0)[0]
    peers = [n.incarnation for n in swarm.at(1)]
    for peer in swarm.at(1)[:2] * 7:
        complain(swarm, reporter, peer, 1)
    assert [n.incarnation for n in swarm.at(1)] == peers
    assert swarm.conductor.sessions[reporter.peer_id].incarnation == 0


def test_the_only_holder_of_a_stage_is_not_taken_out_for_a_broken_link() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
    hold(swarm)
    complain(swarm, swarm.at(0)[0], swarm.at(1)[0], 14)
    assert "unreachable" not in kinds(swarm)
    assert "step 2 waits for" in swarm.conductor.waiting_for


# ---- failures ----------------------------------------------------------------------------


def test_a_node_that_fails_three_times_is_let_go() -> None:
    swarm = FakeSwarm(make_run(steps=20), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    for _ in range(3):
        swarm.run_until(
            lambda: (
                node.current is not None
                and node.incarnation == swarm.conductor.sessions[node.peer_id].incarnation
            )
        )
        node.trouble(pb.TROUBLE_KIND_OWN_FAILURE, "out of memory")
        while node.events:
            node.report()
    swarm.run_until(lambda: node.done is not None)
    assert node.done is not None
    assert "failed 3 times: FakeError: out of memory" in node.done
    swarm.finish()
    assert_undisturbed(swarm)


def test_a_node_whose_disk_is_full_is_never_sent_away() -> None:
    """It waits for room by itself; and nobody waits for it, where others hold its stage."""
    swarm = FakeSwarm(make_run(steps=20), 4)
    swarm.run_until(in_step(swarm))
    node = swarm.at(0)[0]
    for _ in range(5):
        swarm.run_until(
            lambda: (
                node.current is not None
                and node.incarnation == swarm.conductor.sessions[node.peer_id].incarnation
            )
        )
        node.trouble(pb.TROUBLE_KIND_OWN_FAILURE, "no space left", error="DiskFullError")
        while node.events:
            node.report()
        assert swarm.conductor.sessions[node.peer_id].held() is None
    assert swarm.conductor.sessions[node.peer_id].failures == 0
    swarm.finish()
    assert_undisturbed(swarm)


def test_the_only_holder_of_a_stage_keeps_its_state_though_its_disk_is_full() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
    swarm.run_until(in_step(swarm))
    swarm.at(1)[0].trouble(pb.TROUBLE_KIND_OWN_FAILURE, "no space left", error="DiskFullError")
    swarm.finish()
    assert not {"rolled_back", "replay", "replayed"} & set(kinds(swarm))
    assert_undisturbed(swarm)


def test_the_only_holder_of_a_stage_that_fails_in_a_step_keeps_its_state() -> None:
    swarm = FakeSwarm(make_run(replicas=1, snapshot_every=50), 2)
    swarm.run_until(in_step(swarm))
    swarm.at(1)[0].trouble(pb.TROUBLE_KIND_OWN_FAILURE, "a failed kernel")
    swarm.finish()
    assert not {"rolled_back", "replay", "replayed"} & set(kinds(swarm))
    assert_undisturbed(swarm)
