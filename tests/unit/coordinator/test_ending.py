# SPDX-License-Identifier: Apache-2.0
"""What a node is told that comes when a coordinator's part in the run is over."""

import pytest

from shoal.coordinator.state import StandbyRegistered
from shoal.protocol.errors import TermError, UnreachableError
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.version import PROTOCOL_VERSION

from .fake_run import make_run
from .rival_swarm import RivalSwarm
from .test_terms import four_replicas, nodes_of, side

STANDBY = StandbyRegistered(time_s=0, log_id="c", admission="c:1", session="c:2")


def test_a_claim_that_was_given_up_sends_a_node_that_comes_late_elsewhere() -> None:
    """It would be wrong to tell it that the run is over: the leader is back."""
    swarm = four_replicas()
    swarm.start("b")
    b, node = swarm.conductor, nodes_of(swarm)[0]
    hello = pb.Hello(protocol_version=PROTOCOL_VERSION)
    b.greet(node.peer_id, hello)
    promise = node.promises.answer(b.terms.lead(), "127.0.0.1:1")
    b.withdraw("the coordinator at a:1 is back")
    with pytest.raises(UnreachableError, match="is back"):
        b.attach(node.peer_id, hello, promise)
    with pytest.raises(UnreachableError, match="is back"):
        b.greet(PeerId("another"), hello)
    assert not b.sessions


def test_a_deposed_coordinator_registers_no_standby() -> None:
    swarm = four_replicas()
    a = swarm.conductor
    for node in nodes_of(swarm)[1:]:
        swarm.partition(node, "a")
    swarm.start("b")
    swarm.run_until(lambda: swarm.sides["b"].leads)
    stray = nodes_of(swarm)[1]
    lead = a.terms.lead()
    with pytest.raises(TermError):
        a.attach(stray.peer_id, pb.Hello(), stray.promises.answer(lead, "127.0.0.1:1"))
    count = len(swarm.sides["a"].disk)
    with pytest.raises(TermError):
        a.register_standby(STANDBY)
    assert len(swarm.sides["a"].disk) == count
    side(swarm, "b")
    swarm.kill_coordinator("a")
    swarm.finish()


def test_nobody_is_registered_for_a_run_that_is_over() -> None:
    run = make_run(steps=1, stages=1, replicas=2, microbatches=2, validation_every=0)
    swarm = RivalSwarm(run, 2)
    swarm.finish()
    swarm.conductor.register_standby(STANDBY)
    assert not swarm.conductor.state.standbys
    assert swarm.sides["a"].disk[-1].kind == "run_finished"


def test_a_node_that_comes_to_a_finished_run_is_told_so() -> None:
    run = make_run(steps=1, stages=1, replicas=2, microbatches=2, validation_every=0)
    swarm = RivalSwarm(run, 2)
    swarm.finish()
    promise = pb.Promise(term=swarm.conductor.terms.term)
    session = swarm.conductor.attach(PeerId("late"), pb.Hello(), promise)
    assert session.dismissed
