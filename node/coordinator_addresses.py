# SPDX-License-Identifier: Apache-2.0
"""At which addresses a node looks for its coordinator, and in which order. Pure."""

from collections.abc import Iterable

MAX_ADDRESSES = 12


class CoordinatorAddresses:
    """They are asked in turn, and whoever led last is the first: a session that broke is attached
    again where it was, before the node looks elsewhere."""

    def __init__(self, address: str) -> None:
        self._known = [address]
        self._position = 0

    @property
    def current(self) -> str:
        """Whom to ask now."""
        return self._known[self._position % len(self._known)]

    def answered(self) -> None:
        """`current` led."""
        self._known = list(dict.fromkeys([self.current, *self._known]))
        self._position = 0

    def failed(self) -> None:
        """`current` did not lead: the next one's turn."""
        self._position += 1

    def learn(self, found: Iterable[str]) -> None:
        """Newly found ones come before what is known longer, but for the first."""
        first, *others = self._known
        self._known = list(dict.fromkeys([first, *found, *others]))[:MAX_ADDRESSES]
