# SPDX-License-Identifier: Apache-2.0
"""Links between nodes that fail although both sessions live: who is to blame. Pure."""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.protocol.deadlines import adaptive_s
from shoal.protocol.ids import Incarnation

Link = tuple[Incarnation, Incarnation]
"""(reporter, the peer that it can't reach)."""


_MOST_LEASES = 4.0
_REPORTS_APART_S = 8.0
"""A link that stays broken is reported at least so often: connecting is given up after five
seconds, and tried again after two."""


@dataclass(slots=True)
class BrokenLinks:
    """Reports of the open step, and how long links were broken that healed."""

    lease_s: float
    _seen: dict[Link, tuple[float, float]] = field(default_factory=dict)  # first, last
    _healed_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    @property
    def patience_s(self) -> float:
        """How long a link may be broken: what such breaks lasted before, within bounds."""
        return adaptive_s(
            self._healed_s,
            least_s=self.lease_s / 2,
            most_s=_MOST_LEASES * self.lease_s,
            unknown_s=self.lease_s,
        )

    def report(self, reporter: Incarnation, peer: Incarnation, now_s: float) -> bool:
        """True when the link has been broken for too long. A report that isn't repeated is
        forgotten: the link has healed."""
        window_s = max(self.patience_s, _REPORTS_APART_S)
        for link, (first_s, last_s) in list(self._seen.items()):
            if now_s - last_s > window_s:
                del self._seen[link]
                self._healed_s.append(last_s - first_s)
        first_s, _ = self._seen.get((reporter, peer), (now_s, now_s))
        self._seen[reporter, peer] = (first_s, now_s)
        return now_s - first_s >= self.patience_s

    def forget(self, lost: Collection[Incarnation]) -> None:
        self._seen = {link: seen for link, seen in self._seen.items() if not set(link) & set(lost)}

    def forget_all(self) -> None:
        """The step is over, whatever the links were like."""
        self._healed_s.extend(last_s - first_s for first_s, last_s in self._seen.values())
        self._seen.clear()

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
