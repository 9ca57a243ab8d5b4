# SPDX-License-Identifier: Apache-2.0
"""Which side of a broken link goes."""

from shoal.coordinator.broken_links import BrokenLinks, whom_to_fence
from shoal.protocol.ids import Incarnation

A, B, C, D = (Incarnation(i) for i in (1, 2, 3, 4))
ALL = {A, B, C, D}


def test_the_reported_side_of_a_single_broken_link_goes() -> None:
    assert whom_to_fence((A, B), [(A, B)], ALL) == B


def test_who_can_not_reach_several_peers_goes_itself() -> None:
    assert whom_to_fence((A, B), [(A, B), (A, C)], ALL) == A


def test_whom_several_peers_can_not_reach_goes() -> None:
    assert whom_to_fence((A, B), [(A, B), (C, B), (A, D)], ALL) == B


def test_a_stages_only_holder_stays_the_other_side_goes() -> None:
    assert whom_to_fence((A, B), [(A, B)], {A}) == A
    assert whom_to_fence((A, B), [(A, B)], set()) is None


def test_a_link_counts_as_broken_once_it_has_been_for_long() -> None:
    links = BrokenLinks(lease_s=5.0)
    assert [links.report(A, B, now_s) for now_s in (0.0, 2.5, 4.9, 5.0)] == [
        False, False, False, True,
    ]  # fmt: skip


def test_a_link_that_recovered_is_forgotten() -> None:
    links = BrokenLinks(lease_s=5.0)
    links.report(A, B, 0.0)
    assert not links.report(A, B, 60.0)
    assert links.links() == [(A, B)]


def test_links_of_lost_nodes_are_forgotten() -> None:
    links = BrokenLinks(lease_s=5.0)
    links.report(A, B, 0.0)
    links.report(C, D, 0.0)
    links.forget([B])
    assert links.links() == [(C, D)]
