# SPDX-License-Identifier: Apache-2.0
"""A mapping that shares its storage with its successors and yet never changes."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.timeline import Timeline

items = st.lists(st.tuples(st.integers(0, 20), st.integers()), max_size=40)


@given(items=items, branches=st.lists(st.integers(0, 40), max_size=10))
def test_every_version_stays_what_it_was_whatever_is_added_to_which(
    items: list[tuple[int, int]], branches: list[int]
) -> None:
    versions: list[tuple[Timeline[int], dict[int, int]]] = [(Timeline(), {})]
    for number, (key, value) in enumerate(items):
        old, plain = (
            versions[branches[number] % len(versions)] if number < len(branches) else versions[-1]
        )
        versions.append((old.adding(key, value), {**plain, key: value}))
    for version, plain in versions:
        assert dict(version) == plain
        assert list(version) == sorted(plain)
        assert len(version) == len(plain)
        assert version == plain
        for key in range(-1, 22):
            assert version.get(key) == plain.get(key)
            assert (key in version) == (key in plain)
        assert version.last(3) == [plain[key] for key in sorted(plain)][-3:]


def test_adding_at_the_end_copies_nothing() -> None:
    first = Timeline({1: "a"})
    second = first.adding(2, "b")
    assert second._keys is first._keys
    assert first.adding(2, "c") == {1: "a", 2: "c"}
    assert second == {1: "a", 2: "b"}
    assert first == {1: "a"}


def test_the_same_value_again_is_the_same_timeline() -> None:
    timeline = Timeline({1: "a", 2: "b"})
    assert timeline.adding(1, "a") is timeline
    assert Timeline.of(timeline) is timeline
