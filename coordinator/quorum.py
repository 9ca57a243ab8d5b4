# SPDX-License-Identifier: Apache-2.0
"""Who may lead a run, and whose word a commit needs. Pure.

A council is the nodes that prepared a step and the log in which it was recorded first, each with
one vote. What needs a quorum needs a strict majority of the council, so two quorums of one council
share a voter, and a voter keeps to the highest term that it has promised. The council changes with
every commit; a commit needs a quorum of the council before it, and the step after it opens only
once quorums of both councils keep its record. So whoever asks a quorum of any council hears of
the commits that came after it, one after the other.

While no standby was ever registered, no other log can lead: then the log's vote is enough.
"""

from collections.abc import Collection
from dataclasses import dataclass

from shoal.protocol.ids import PeerId


@dataclass(frozen=True, slots=True)
class Council:
    voters: frozenset[PeerId] = frozenset()
    log_id: str = ""
    """The log that has a vote; empty in a run that nobody has led yet."""


def is_quorum(
    council: Council, present: Collection[PeerId], *, log_id: str, is_alone: bool
) -> bool:
    """Whether `present` and the coordinator at the log `log_id` may decide for the council."""
    if not council.log_id:
        return True
    at_home = log_id == council.log_id
    if is_alone:
        return at_home
    return len(council.voters.intersection(present)) + at_home >= needed(council)


def needed(council: Council) -> int:
    """A strict majority of the nodes and the log."""
    return (len(council.voters) + 1) // 2 + 1


def missing(
    council: Council, present: Collection[PeerId], *, log_id: str
) -> tuple[int, list[PeerId]]:
    """How many more voters a quorum needs, and which nodes are not among `present`."""
    have = len(council.voters.intersection(present)) + (log_id == council.log_id)
    return max(0, needed(council) - have), sorted(council.voters.difference(present))
