# SPDX-License-Identifier: Apache-2.0
"""A mapping from ascending numbers (steps, incarnations) to values that never changes, and whose
successors share its storage: adding at the end costs the same however long it is."""

from collections.abc import Iterator, Mapping
from typing import Self, TypeVar, overload

V = TypeVar("V")
D = TypeVar("D")


class Timeline(Mapping[int, V]):
    """Iterates in ascending order. Equal to any mapping with the same items."""

    __slots__ = ("_index", "_keys", "_num", "_values")

    def __init__(self, items: Mapping[int, V] | None = None) -> None:
        ordered = sorted((items or {}).items())
        self._keys = [key for key, _ in ordered]
        self._values = [value for _, value in ordered]
        self._index = {key: i for i, key in enumerate(self._keys)}
        self._num = len(ordered)
        # Lists and index are shared with successors, which only ever add behind `_num`.

    @classmethod
    def of(cls, items: Mapping[int, V]) -> "Timeline[V]":
        """`items` itself where it is a timeline."""
        return items if isinstance(items, Timeline) else Timeline(items)

    def adding(self, key: int, value: V) -> "Timeline[V]":
        """With one more item, or with another value for `key`; this one stays as it is. Cheap
        for a key above all others, unless that was done to this timeline before."""
        if self._num == len(self._keys) and (not self._keys or key > self._keys[-1]):
            self._index[key] = self._num
            self._keys.append(key)
            self._values.append(value)
            return self._view(self._num + 1)
        if key in self and self[key] == value:
            return self
        return Timeline({**self, key: value})

    def _view(self, num: int) -> Self:
        view = object.__new__(type(self))
        view._keys, view._values, view._index = self._keys, self._values, self._index
        view._num = num
        return view

    def __getitem__(self, key: int) -> V:
        i = self._index[key]
        if i >= self._num:
            raise KeyError(key)
        return self._values[i]

    @overload
    def get(self, key: int, /) -> V | None: ...
    @overload
    def get(self, key: int, /, default: V | D) -> V | D: ...
    def get(self, key: int, /, default: V | D | None = None) -> V | D | None:
        i = self._index.get(key, self._num)
        return self._values[i] if i < self._num else default

    def __contains__(self, key: object) -> bool:
        return self._index.get(key, self._num) < self._num  # type: ignore[call-overload, no-any-return]

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys[: self._num])

    def __len__(self) -> int:
        return self._num

    def last(self, count: int) -> list[V]:
        """The values of the highest `count` keys, in order."""
        return self._values[max(0, self._num - count) : self._num]

    def __repr__(self) -> str:
        return f"Timeline({dict(self)!r})"
