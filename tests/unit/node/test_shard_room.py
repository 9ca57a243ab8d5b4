# SPDX-License-Identifier: Apache-2.0
"""Which cached shards go."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shoal.node.shard_room import CachedFile, evict, to_evict

FILES = [CachedFile("a", 10, 1.0), CachedFile("b", 10, 3.0), CachedFile("c", 10, 2.0)]


def test_those_used_longest_ago_go_first_and_no_more_than_needed() -> None:
    assert to_evict(FILES, 30, kept=()) == []
    assert [f.name for f in to_evict(FILES, 29, kept=())] == ["a"]
    assert [f.name for f in to_evict(FILES, 15, kept=())] == ["a", "c"]


def test_those_in_use_stay_even_when_they_are_too_many() -> None:
    assert [f.name for f in to_evict(FILES, 15, kept={"a"})] == ["c", "b"]
    assert to_evict(FILES, 0, kept={"a", "b", "c"}) == []


@given(
    sizes=st.lists(st.integers(0, 50), max_size=12),
    budget=st.integers(0, 200),
    kept=st.sets(st.integers(0, 11)),
)
def test_the_rest_fits_unless_what_is_in_use_does_not(
    sizes: list[int], budget: int, kept: set[int]
) -> None:
    files = [CachedFile(str(i), size, float(i * 7 % 5)) for i, size in enumerate(sizes)]
    names = {str(i) for i in kept}
    going = to_evict(files, budget, kept=names)
    left = [f for f in files if f not in going]
    assert not {f.name for f in going} & names
    in_use = sum(f.num_bytes for f in files if f.name in names)
    assert sum(f.num_bytes for f in left) <= max(budget, in_use)


def test_only_shards_are_removed(tmp_path: Path) -> None:
    for number, name in enumerate(("old.bin", "new.bin", "keys.pem")):
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (number, number))
    evict(tmp_path, 10, kept=())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["keys.pem", "new.bin"]
