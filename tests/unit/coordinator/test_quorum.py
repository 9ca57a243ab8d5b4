# SPDX-License-Identifier: Apache-2.0
"""Any two quorums of a council share a voter; a lone log is enough until there is a standby."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.quorum import Council, is_quorum, missing, needed
from shoal.protocol.ids import PeerId

peers = st.frozensets(st.sampled_from([PeerId(f"peer-{i}") for i in range(7)]))
logs = st.sampled_from(["a", "b"])
councils = st.builds(Council, voters=peers, log_id=logs)


def decides(council: Council, present: Collection[PeerId], log_id: str) -> bool:
    return is_quorum(council, present, log_id=log_id, is_alone=False)


@given(council=councils, one=peers, other=peers, first=logs, second=logs)
def test_two_quorums_of_a_council_share_a_node_or_stand_at_its_log(
    council: Council, one: frozenset[PeerId], other: frozenset[PeerId], first: str, second: str
) -> None:
    if decides(council, one, first) and decides(council, other, second):
        at_home = first == second == council.log_id
        assert at_home or council.voters & one & other


@given(council=councils, present=peers, more=peers, log_id=logs)
def test_more_voters_never_lose_a_quorum(
    council: Council, present: frozenset[PeerId], more: frozenset[PeerId], log_id: str
) -> None:
    if decides(council, present, log_id):
        assert decides(council, present | more, log_id)


@given(council=councils, present=peers, log_id=logs)
def test_what_is_missing_is_what_makes_a_quorum(
    council: Council, present: frozenset[PeerId], log_id: str
) -> None:
    count, absent = missing(council, present, log_id=log_id)
    assert (count == 0) == decides(council, present, log_id)
    if count <= len(absent):
        assert decides(council, present | set(absent[:count]), log_id)
        assert not count or not decides(council, present | set(absent[: count - 1]), log_id)


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[Council, frozenset[PeerId]]]:
    """Councils that follow one another, each with those of its voters that keep the next one's
    record: so many that, with the log "a", they are a quorum."""
    voters, chain = draw(peers), []
    for _ in range(draw(st.integers(1, 5))):
        council = Council(voters, "a")
        count = draw(st.integers(needed(council) - 1, len(voters)))
        keepers = frozenset(draw(st.permutations(sorted(voters)))[:count])
        chain.append((council, keepers))
        voters = keepers | draw(peers)
    return chain


@given(chain=chains(), present=peers)
def test_whoever_asks_a_quorum_of_an_old_council_hears_of_the_next_record(
    chain: list[tuple[Council, frozenset[PeerId]]], present: frozenset[PeerId]
) -> None:
    """From any council a claimant with another log is led on, record by record, to the newest."""
    for council, keepers in chain:
        assert decides(council, keepers, "a")
        if decides(council, present, "b"):
            assert keepers & present


@pytest.mark.parametrize(
    ("nodes", "log_id", "is_alone", "enough"),
    [
        (0, "a", True, True),  # nobody else can lead
        (4, "b", True, False),  # a copy of the folder
        (2, "a", False, True),  # two of four and the log
        (1, "a", False, False),
        (2, "b", False, False),
        (3, "b", False, True),  # a standby: three of four
    ],
)
def test_four_nodes_and_a_log(nodes: int, log_id: str, is_alone: bool, enough: bool) -> None:
    voters = [PeerId(f"peer-{i}") for i in range(4)]
    council = Council(frozenset(voters), "a")
    assert needed(council) == 3
    assert is_quorum(council, voters[:nodes], log_id=log_id, is_alone=is_alone) is enough


def test_a_run_that_nobody_has_led_is_anybodys() -> None:
    assert is_quorum(Council(), (), log_id="x", is_alone=False)
