# SPDX-License-Identifier: Apache-2.0
"""Which chunks to ask of which donor, and for how long to wait for them. Pure: no clock, no I/O.

Every donor has one request under way, sized to about a second of its measured speed, so the fast
ones get more. What a donor fails to bring goes to the others. When nothing is left to ask for, a
donor without work is asked for what another is late with.
"""

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

D = TypeVar("D")  # hashable
T = TypeVar("T")

LEAST_DEADLINE_S = 5.0
MOST_DEADLINE_S = 120.0
MAX_FAILURES = 3
"""In a row: then a donor isn't asked any more."""

_REQUEST_S = 1.0
_MAX_REQUEST = 16
_DEVIATIONS = 8
_UNKNOWN_DEADLINE_S = 30.0
_LATE = 2.0


def deadline_s(samples: Collection[float]) -> float:
    """How long the next piece of a request may take: the median of the seconds that the donor's
    chunks took plus eight times their median deviation, within bounds."""
    if not samples:
        return _UNKNOWN_DEADLINE_S
    median = statistics.median(samples)
    deviation = statistics.median(abs(s - median) for s in samples)
    return min(
        max(LEAST_DEADLINE_S, median + _DEVIATIONS * max(deviation, median / 4)), MOST_DEADLINE_S
    )


def ranked(votes: Mapping[D, T]) -> list[list[D]]:
    """Donors by what they describe: the largest group first, ties by the order of the votes."""
    groups: dict[T, list[D]] = {}
    for donor, description in votes.items():
        groups.setdefault(description, []).append(donor)
    return sorted(groups.values(), key=len, reverse=True)


@dataclass(slots=True)
class _Donor:
    in_flight: list[int] = field(default_factory=list)
    moved_s: float = 0.0
    """When its request was made, or the last chunk of it arrived."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """Of its chunks, each."""
    failures: int = 0

    def each_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


class ChunkSchedule(Generic[D]):
    def __init__(self, num_chunks: int, *, have: Iterable[int] = ()) -> None:
        self._missing = set(range(num_chunks)) - set(have)
        self._donors: dict[D, _Donor] = {}

    @property
    def done(self) -> bool:
        return not self._missing

    @property
    def donors(self) -> list[D]:
        """Those that are still asked."""
        return list(self._donors)

    def add(self, donor: D) -> None:
        self._donors.setdefault(donor, _Donor())

    def take(self, donor: D, now_s: float) -> list[int]:
        """What to ask of it now; nothing while the others bring all that is missing in time."""
        books = self._donors.get(donor)
        if books is None or self.done:
            return []
        assert not books.in_flight, "one request at a time"
        each_s = books.each_s()
        number = 1 if each_s is None else round(_REQUEST_S / max(each_s, 1e-6))
        number = min(max(number, 1), _MAX_REQUEST)
        asked = {chunk for other in self._donors.values() for chunk in other.in_flight}
        free = sorted(self._missing - asked)[:number]
        books.in_flight = free or self._late(books, now_s)[:number]
        books.moved_s = now_s
        return list(books.in_flight)

    def _late(self, books: _Donor, now_s: float) -> list[int]:
        """Chunks under way elsewhere that this donor, doing as before, would bring earlier."""
        own_s = books.each_s() or 0.0
        found: list[tuple[float, int]] = []
        for other in self._donors.values():
            each_s = other.each_s()
            for position, chunk in enumerate(other.in_flight):
                expected_s = (1.0 if each_s is None else each_s) * _LATE * (position + 1)
                left_s = other.moved_s + expected_s - now_s
                slower = each_s is not None and left_s > _LATE * own_s > 0
                if chunk in self._missing and (left_s < 0 or slower):
                    found.append((left_s, chunk))
        holders = [chunk for other in self._donors.values() for chunk in other.in_flight]
        return [chunk for _, chunk in sorted(found) if holders.count(chunk) == 1]

    def deadline_s(self, donor: D) -> float:
        """For the next piece of what it was asked for."""
        books = self._donors.get(donor)
        return deadline_s(books.seconds) if books is not None else LEAST_DEADLINE_S

    def arrived(self, donor: D, chunk: int, now_s: float) -> bool:
        """A chunk came and was verified. False when another brought it earlier."""
        books = self._donors.get(donor)
        if books is not None and chunk in books.in_flight:
            books.in_flight.remove(chunk)
            books.seconds.append(max(0.0, now_s - books.moved_s))
            books.moved_s, books.failures = now_s, 0
        fresh = chunk in self._missing
        self._missing.discard(chunk)
        return fresh

    def failed(self, donor: D) -> bool:
        """Its request ended without all its chunks. Whether it may be asked again."""
        books = self._donors.get(donor)
        if books is None:
            return False
        books.in_flight.clear()
        books.failures += 1
        if books.failures >= MAX_FAILURES:
            self.drop(donor)
        return donor in self._donors

    def drop(self, donor: D) -> None:
        """It died, or lied: it isn't asked again, and what it should bring is free."""
        self._donors.pop(donor, None)
