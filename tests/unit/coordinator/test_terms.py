# SPDX-License-Identifier: Apache-2.0
"""Who leads: takeovers, returns, lost announcements, and what a run without a quorum waits for."""

import pytest

from shoal.coordinator.state import TermOpened
from shoal.node import promises
from shoal.protocol.errors import RecordError, TermError
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.version import PROTOCOL_VERSION

from .fake_node import FakeNode
from .fake_run import make_run
from .rival_swarm import RivalSwarm, Side


def four_replicas(*, registered: bool = True) -> RivalSwarm:
    """One stage on four nodes, in step 2, with "b" up to date."""
    run = make_run(steps=4, stages=1, replicas=4, min_nodes=4, microbatches=4, validation_every=0)
    swarm = RivalSwarm(run, 4)
    if registered:
        swarm.register_standby()
    swarm.run_to_step(1)
    swarm.settle(lambda: swarm.conductor.ledger is not None and swarm.conductor.state.attempt == 1)
    swarm.follow()
    return swarm


def side(swarm: RivalSwarm, name: str) -> Side:
    found = swarm.sides[name]
    if found.conductor is not None:
        swarm.conductor = found.conductor
    return found


def nodes_of(swarm: RivalSwarm) -> list[FakeNode]:
    return [swarm.nodes[name] for name in sorted(swarm.nodes)]


def test_the_only_log_leads_at_once() -> None:
    swarm = four_replicas(registered=False)
    assert swarm.sides["a"].leads
    swarm.start("a")
    assert swarm.sides["a"].leads
    assert swarm.conductor.terms.term == 2


def test_a_copy_of_the_only_log_never_leads_by_itself() -> None:
    swarm = four_replicas(registered=False)
    swarm.sides["b"].disk[:] = swarm.sides["a"].disk
    swarm.kill_coordinator("a")
    swarm.start("b")
    swarm.pass_time(5)
    swarm.settle()
    assert not swarm.sides["b"].leads
    swarm.start("b", forced=True)
    assert swarm.sides["b"].leads
    swarm.finish()
    assert swarm.conductor.state.step == 4


def test_a_standby_takes_over_without_a_rollback() -> None:
    swarm = four_replicas()
    swarm.kill_coordinator("a")
    swarm.start("b")
    assert not swarm.sides["b"].leads
    swarm.finish()
    assert swarm.conductor.state.step == 4
    assert "rolled_back" not in [kind for _, kind, _ in swarm.conductor.events]


def test_an_announced_commit_stands_though_the_log_that_has_it_is_gone() -> None:
    swarm = four_replicas()
    a = side(swarm, "a").conductor
    assert a is not None
    swarm.settle(lambda: any(n.step == 2 for n in swarm.nodes.values()))
    assert a.state.step == 2
    swarm.kill_coordinator("a")  # "b" has not heard of step 2
    swarm.start("b")
    swarm.finish()
    texts = [text for _, kind, text in swarm.conductor.events if kind == "recovered"]
    assert texts == ["step 2 was committed in term 1"]
    assert swarm.conductor.state.records[2].term == 1


@pytest.mark.parametrize("moment", range(0, 128, 4))
def test_a_standby_takes_over_whenever_the_coordinator_dies(moment: int) -> None:
    swarm = four_replicas()
    counter = iter(range(moment))
    swarm.settle(lambda: next(counter, None) is None)
    assert not swarm.conductor.ended, "nothing is left to take over"
    swarm.kill_coordinator("a")
    swarm.start("b")
    swarm.finish()
    assert swarm.conductor.state.step == 4
    for step, record in swarm.conductor.state.records.items():
        assert record.sums_digests == swarm.expected.sums[step]


def test_a_log_whose_last_record_was_never_announced_does_not_lead_with_its_voters() -> None:
    """Side "a" commits step 2 with two of four nodes and dies; "b" leads with the other two and one
    that prepared. Then "a" and the fourth would be a majority of what only "a" has recorded."""
    swarm = four_replicas()
    first, second, third, fourth = nodes_of(swarm)
    swarm.settle(lambda: swarm.conductor.ledger is not None)
    swarm.kill_node(third)
    swarm.kill_node(fourth)
    swarm.settle(lambda: swarm.conductor.state.step == 2)
    assert swarm.conductor.state.council.voters == {first.peer_id, second.peer_id}
    swarm.kill_coordinator("a")
    swarm.cut.add((first.peer_id, "b"))
    swarm.revive()
    for peer_id in (second.peer_id, third.peer_id, fourth.peer_id):
        swarm.cut.add((peer_id, "a"))
    swarm.start("b")
    swarm.run_until(lambda: swarm.sides["b"].leads)
    swarm.start("a")
    swarm.pass_time(5)
    swarm.settle()
    assert not swarm.sides["a"].leads
    assert "needs" in swarm.conductor.waiting_for
    swarm.kill_coordinator("a")
    swarm.cut.clear()
    side(swarm, "b")
    swarm.finish()
    assert swarm.conductor.state.step == 4


def test_a_run_without_a_majority_waits_and_says_for_whom() -> None:
    swarm = four_replicas()
    for node in nodes_of(swarm)[:3]:
        swarm.kill_node(node)
    swarm.pass_time(1)
    swarm.settle()
    step = swarm.conductor.state.step
    assert "needs 1 more of the last step's nodes" in swarm.conductor.waiting_for
    assert "--force-term" in swarm.conductor.waiting_for
    assert not swarm.conductor.ended
    swarm.revive()
    swarm.finish()
    assert swarm.conductor.state.step > step


def test_a_claimant_takes_no_node_away_from_the_leader() -> None:
    swarm = four_replicas()
    a = swarm.conductor
    swarm.is_link_cut = True
    swarm.start("b")
    stray = nodes_of(swarm)[0]
    stray.drop()
    swarm.prefers[stray.peer_id] = "b"
    swarm.pass_time(1.2)
    swarm.settle(lambda: stray.greeted is not None)
    assert stray.conductor is swarm.sides["b"].conductor
    assert not stray.is_asked()
    swarm.give_up_waiting(stray)
    swarm.conductor = a
    swarm.finish()
    assert a.deposed is None
    assert swarm.highest[stray.peer_id] == 1


def test_a_leader_that_hears_of_a_higher_term_records_nothing_more() -> None:
    swarm = four_replicas()
    a = swarm.conductor
    for node in nodes_of(swarm)[1:]:
        swarm.partition(node, "a")
    swarm.start("b")
    swarm.run_until(lambda: swarm.sides["b"].leads)
    swarm.cut.clear()
    recorded = len(swarm.sides["a"].disk)
    node = nodes_of(swarm)[1]
    node.drop()
    swarm.prefers[node.peer_id] = "a"
    swarm.conductor = a
    swarm.pass_time(1.2)
    swarm.settle(lambda: a.deposed is not None)
    assert isinstance(a.deposed, TermError)
    assert a.deposed.term == 2
    assert "term 2" in a.waiting_for
    a.stop()
    a.tick()
    grown = {e.kind for e in swarm.sides["a"].disk[recorded:]}
    assert not grown - {"node_fenced"}, "only what its silence cost it before it heard"
    with pytest.raises(TermError):
        a.greet(node.peer_id, pb.Hello(protocol_version=PROTOCOL_VERSION))
    side(swarm, "b")
    swarm.kill_coordinator("a")
    swarm.finish()


def test_a_node_can_not_depose_a_coordinator_with_a_term_that_nobody_claimed() -> None:
    swarm = four_replicas()
    a, node = swarm.conductor, nodes_of(swarm)[0]
    for proof in (b"", b"x" * 64, a.terms.lead().proof):
        liar = pb.Promise(refused=True, term=1 << 40, coordinator_id="b", proof=proof)
        with pytest.raises(RecordError):
            a.attach(node.peer_id, pb.Hello(), liar)
    assert a.deposed is None
    swarm.finish()


def test_incarnations_of_two_terms_never_share_a_number() -> None:
    swarm = four_replicas()
    before = swarm.conductor.state.last_incarnation
    swarm.kill_coordinator("a")
    swarm.start("b")
    swarm.run_until(lambda: swarm.conductor.state.last_incarnation > before)
    assert swarm.conductor.state.last_incarnation >= 1 << 32


def test_a_term_is_logged_before_anything_is_given_out_in_it() -> None:
    swarm = four_replicas()
    swarm.kill_coordinator("a")
    count = len(swarm.sides["b"].disk)
    swarm.start("b")
    swarm.run_until(lambda: swarm.sides["b"].leads)
    kinds = [e.kind for e in swarm.sides["b"].disk[count:]]
    assert kinds[0] == TermOpened.model_fields["kind"].default


def test_who_promised_before_a_record_was_taken_over_does_not_count_as_keeping_it() -> None:
    swarm = four_replicas()
    swarm.settle(lambda: any(n.step == 2 for n in swarm.nodes.values()))
    swarm.kill_coordinator("a")
    swarm.start("b")
    b = swarm.conductor
    swarm.settle(lambda: len(b.sessions) == 4)
    assert swarm.sides["b"].leads
    assert b.state.step == 2
    assert "to keep the record of step 2" in b.terms.open_obstacle(b.sessions)
    swarm.finish()
    assert b.state.step == 4


def test_two_records_of_one_number_are_sealed_apart() -> None:
    swarm = four_replicas()
    terms, record = swarm.conductor.terms, swarm.conductor.state.last_record
    assert record is not None
    first = terms.seal(record)
    second = terms.seal(record.model_copy(update={"term": record.term + 1}))
    assert first.record != second.record
    assert terms.seal(record) == first


@pytest.mark.parametrize("moment", range(0, 80, 4))
def test_a_standby_takes_over_from_the_first_opening_on(moment: int) -> None:
    """Also before the first commit, and between that and the opening of step 2."""
    run = make_run(steps=3, stages=1, replicas=4, min_nodes=4, microbatches=4, validation_every=0)
    swarm = RivalSwarm(run, 4)
    swarm.register_standby()
    swarm.settle(lambda: swarm.conductor.ledger is not None)
    counter = iter(range(moment))
    swarm.settle(lambda: next(counter, None) is None)
    swarm.follow()
    assert swarm.conductor.state.step < 3
    swarm.kill_coordinator("a")
    swarm.start("b")
    swarm.finish()
    assert swarm.sides["b"].leads
    for step, record in swarm.conductor.state.records.items():
        assert record.sums_digests == swarm.expected.sums[step]


def test_before_the_first_commit_a_standby_needs_a_majority_too() -> None:
    run = make_run(steps=3, stages=1, replicas=4, min_nodes=4, microbatches=4, validation_every=0)
    swarm = RivalSwarm(run, 4)
    swarm.register_standby()
    a = swarm.conductor
    swarm.settle(lambda: a.ledger is not None)
    swarm.follow()
    assert len(a.state.council.voters) == 4
    for node in nodes_of(swarm)[:2]:
        swarm.partition(node, "a")
    swarm.start("b")
    swarm.pass_time(3)
    swarm.settle()
    assert not swarm.sides["b"].leads
    assert "needs 3 more" in swarm.conductor.waiting_for, "two at the door are not even asked"


def test_a_standby_of_a_run_that_has_not_begun_says_who_may_lead_it() -> None:
    run = make_run(steps=3, stages=1, replicas=4, min_nodes=4, microbatches=4, validation_every=0)
    swarm = RivalSwarm(run, 0)
    swarm.register_standby()
    swarm.kill_coordinator("a")
    swarm.start("b")
    assert "no step has been opened yet" in swarm.conductor.waiting_for
    assert "start that one again" in swarm.conductor.waiting_for


def test_nodes_leave_a_claimant_that_lacks_records_for_one_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promises, "MAX_RECORDS", 1)
    swarm = four_replicas()
    swarm.settle(
        lambda: swarm.conductor.state.step == 3 and all(n.step == 3 for n in swarm.nodes.values())
    )
    swarm.kill_coordinator("a")
    swarm.start("b")  # its log ends at step 1
    b = swarm.conductor
    swarm.run_until(lambda: "keeps all of the records between (1 missing)" in b.waiting_for)
    swarm.settle()
    assert not b.sessions, "nobody is kept waiting here"
    assert not swarm.sides["b"].leads
    assert "start the coordinator that led last" in b.waiting_for
    assert "--force-term" in b.waiting_for
    swarm.start("a")
    swarm.run_until(lambda: swarm.conductor.deposed is not None)  # by what they promised to "b"
    swarm.supervise()
    swarm.finish()
    assert swarm.sides["a"].leads
    assert swarm.conductor.state.step == 4
