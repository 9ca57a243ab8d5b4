# SPDX-License-Identifier: Apache-2.0
"""How long a node may be silent, and what a session remembers."""

import math

import pytest

from shoal.coordinator.sessions import Session, lease_timeout_s, sane
from shoal.protocol.ids import Incarnation, PeerId, Stage
from shoal.protocol.proto import coordinator_pb2


def make() -> Session:
    return Session(PeerId("p"), "amber-fox", coordinator_pb2.Hello(), 100.0)


def test_a_regular_heart_gets_the_least_lease_an_irregular_one_more() -> None:
    assert lease_timeout_s([0.5] * 8, least_s=5.0) == 5.0
    irregular = lease_timeout_s([0.5, 3.0, 0.4, 2.5, 1.0, 4.0], least_s=5.0)
    assert 5.0 < irregular <= 20.0
    assert lease_timeout_s([30.0, 60.0, 1.0, 90.0], least_s=5.0) == 20.0


def test_a_heart_that_has_hardly_beaten_gets_twice_the_least() -> None:
    assert lease_timeout_s([], least_s=5.0) == 10.0


def test_any_message_is_a_sign_of_life_but_only_heartbeats_are_timed() -> None:
    session = make()
    assert session.silent_s(103.0) == 3.0
    session.heard(104.0, heartbeat=True)
    session.heard(104.2, heartbeat=False)
    session.heard(105.0, heartbeat=True)
    assert list(session.intervals) == [1.0]
    assert session.silent_s(105.5) == 0.5


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
def test_measurements_that_can_not_be_count_as_none(number: float) -> None:
    assert sane(number) == 0.0


def test_a_node_out_of_its_stage_offers_its_state_only_while_that_is_whole() -> None:
    session = make()
    session.assign(Stage(1), Incarnation(3), step=4, keeps=False, now_s=0.0)
    session.weights_digest = 99
    session.unassign(still_holds=True)
    held = session.held()
    assert held is not None
    assert (held.stage, held.step, held.weights_digest) == (1, 4, 99)
    assert (session.incarnation, session.stage, session.last_stage) == (0, None, 1)
    session.assign(Stage(1), Incarnation(4), step=4, keeps=True, now_s=0.0)
    session.unassign(still_holds=False)
    assert session.held() is None


def test_a_node_is_told_once_what_it_waits_for() -> None:
    session = make()
    for reason in ("a", "a", "b"):
        session.say(reason)
    assert session.outbox.qsize() == 2


def test_a_node_at_rest_forgets_its_older_measurements_until_it_counts_as_average() -> None:
    session = make()
    session.busy.extend([4.0, 4.0, 4.0, 1.0, 1.0])
    session.rest()
    assert list(session.busy) == [1.0, 1.0]
    session.rest()
    session.rest()
    session.rest()
    assert session.speed == 0.0


def beat(session: Session, now_s: float, done: int = 1) -> None:
    session.heard(now_s, heartbeat=True)
    progress = coordinator_pb2.Progress(done=done)
    session.beat(coordinator_pb2.Heartbeat(progress=progress))


def test_only_time_in_which_the_heart_beats_counts_as_still() -> None:
    session = make()
    beat(session, 101.0)
    beat(session, 101.5)
    beat(session, 102.0)
    assert session.still_s == 1.0
    beat(session, 150.0)  # it was suspended
    assert session.still_s == 3.0


@pytest.mark.parametrize("what", ["progress", "command", "receipt"])
def test_progress_a_command_or_a_receipt_end_the_stillness(what: str) -> None:
    session = make()
    for now_s in (101.0, 102.0):
        beat(session, now_s)
    assert session.still_s == 1.0
    if what == "progress":
        beat(session, 103.0, done=2)
    elif what == "command":
        session.asked(103.0)
    else:
        session.moved()
    assert session.still_s == 0
