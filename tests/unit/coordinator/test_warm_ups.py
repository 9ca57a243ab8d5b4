# SPDX-License-Identifier: Apache-2.0
"""Which version a joiner warms up with, and for how long it is kept for one that is gone."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.coordinator.transfers import Transfer, Version, pins
from shoal.coordinator.warm_ups import LINGER_S, MAX_VERSIONS, WarmUp, chosen, kept
from shoal.protocol.ids import Incarnation, PeerId, Stage
from shoal.protocol.proto.types_pb2 import STATE_PART_MOMENTS, STATE_PART_WEIGHTS

FOX, OWL = PeerId("fox"), PeerId("owl")


def transfer(step: int, *donors: int, urgent: bool = False) -> Transfer:
    version = Version(step, STATE_PART_WEIGHTS)
    return Transfer(version, tuple(Incarnation(d) for d in donors), urgent)


def warm_up(step: int, *, stage: int = 0, seen_s: float = 0.0) -> WarmUp:
    return WarmUp(Stage(stage), transfer(step, 1), seen_s)


def session(state: str, *, is_warm: bool = False) -> Any:
    return SimpleNamespace(state=state, is_warm=is_warm)


@pytest.mark.parametrize(
    ("found", "now_s", "stays"),
    [
        (None, LINGER_S - 1, True),
        (None, LINGER_S + 1, False),
        (session("attached"), LINGER_S - 1, True),
        (session("warming"), 10 * LINGER_S, True),
        (session("warming", is_warm=True), 1.0, False),
        (session("ready"), 1.0, False),
    ],
)
def test_a_version_is_kept_while_somebody_may_fetch_it(
    found: Any, now_s: float, stays: bool
) -> None:
    sessions = {} if found is None else {FOX: found}
    assert (FOX in kept({FOX: warm_up(5)}, sessions, now_s)) == stays


def test_a_joiner_that_comes_back_takes_its_own_version_up_again() -> None:
    own = warm_up(5)
    assert chosen({FOX: own}, FOX, Stage(0)) == own.transfer
    assert chosen({FOX: own}, FOX, Stage(1)) is None
    assert chosen({FOX: own}, OWL, Stage(0)) is None


def test_many_joiners_share_the_newest_version_of_their_stage() -> None:
    many = {PeerId(f"p{step}"): warm_up(step) for step in range(5, 5 + MAX_VERSIONS)}
    found = chosen(many, OWL, Stage(0))
    assert found is not None
    assert found.version.step == 4 + MAX_VERSIONS
    assert chosen(many, OWL, Stage(1)) is None


def test_donors_pin_what_anybody_fetches_from_them() -> None:
    moments = Transfer(Version(4, STATE_PART_MOMENTS), (Incarnation(2),))
    found = pins([transfer(5, 1, 2), transfer(5, 2, urgent=True), moments])
    assert found == {
        1: {Version(5, STATE_PART_WEIGHTS): False},
        2: {Version(5, STATE_PART_WEIGHTS): True, Version(4, STATE_PART_MOMENTS): False},
    }
