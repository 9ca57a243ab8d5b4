# SPDX-License-Identifier: Apache-2.0
"""Links between nodes that fail although both sessions live: who is to blame. Pure."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.protocol.ids import Incarnation

Link = tuple[Incarnation, Incarnation]
"""(reporter, the peer that it can't reach)."""


@dataclass(slots=True)
class BrokenLinks:
    """Reports of the open step. One that isn't repeated within `patience_s` is forgotten."""

    patience_s: float
    _seen: dict[Link, tuple[float, float]] = field(default_factory=dict)  # first, last

    def report(self, reporter: Incarnation, peer: Incarnation, now_s: float) -> bool:
        """True when the link has been broken for `patience_s`."""
        self._seen = {
            link: (first_s, last_s)
            for link, (first_s, last_s) in self._seen.items()
            if now_s - last_s <= self.patience_s
        }
        first_s, _ = self._seen.get((reporter, peer), (now_s, now_s))
        self._seen[reporter, peer] = (first_s, now_s)
        return now_s - first_s >= self.patience_s

    def forget(self, lost: Collection[Incarnation]) -> None:
        self._seen = {link: seen for link, seen in self._seen.items() if not set(link) & set(lost)}

    def links(self) -> list[Link]:
        return list(self._seen)


def whom_to_fence(
    broken: Link, links: Collection[Link], replaceable: Collection[Incarnation]
) -> Incarnation | None:
    """The side of a broken link with more broken links, else the one that was reported; never a
    stage's only holder: without it nothing moves either, and its state would be lost."""
    reporter, peer = broken
    count = Counter(who for link in {*links, broken} for who in link)
    suspects = [who for who in (peer, reporter) if who in replaceable]
    return max(suspects, key=lambda who: count[who], default=None)
