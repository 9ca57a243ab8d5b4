# SPDX-License-Identifier: Apache-2.0
"""The chunk schedule: every chunk once, whoever fails; the fast bring more."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.chunk_schedule import (
    LEAST_DEADLINE_S,
    MAX_FAILURES,
    MOST_DEADLINE_S,
    ChunkSchedule,
    deadline_s,
    ranked,
)


def transfer(schedule: ChunkSchedule[str], speeds: dict[str, float]) -> dict[str, list[int]]:
    """Everybody brings his chunks at so many a second; who brought which that was fresh."""
    brought: dict[str, list[int]] = {who: [] for who in speeds}
    busy: dict[str, list[int]] = {}
    due: dict[str, float] = {}
    now_s = 0.0
    for who in speeds:
        schedule.add(who)
    while not schedule.done:
        for who, speed in speeds.items():
            if not busy.get(who):
                busy[who] = schedule.take(who, now_s)
                due[who] = now_s + 1 / speed
        working = [who for who in speeds if busy[who]]
        assert working, "nobody works, yet chunks are missing"
        who = min(working, key=lambda w: due[w])
        now_s = due[who]
        chunk = busy[who].pop(0)
        if schedule.arrived(who, chunk, now_s):
            brought[who].append(chunk)
        due[who] = now_s + 1 / speeds[who]
    return brought


def test_donors_share_the_chunks_by_speed() -> None:
    brought = transfer(ChunkSchedule(120), {"slow": 10.0, "fast": 50.0})
    assert sorted(brought["slow"] + brought["fast"]) == list(range(120))
    assert 3 < len(brought["fast"]) / len(brought["slow"]) < 8


def test_what_is_there_already_is_not_asked_for() -> None:
    brought = transfer(ChunkSchedule(10, have=range(8)), {"a": 1.0})
    assert brought["a"] == [8, 9]
    assert ChunkSchedule[str](3, have=range(3)).done


def test_an_idle_donor_brings_what_another_is_late_with() -> None:
    schedule: ChunkSchedule[str] = ChunkSchedule(2)
    schedule.add("stuck")
    schedule.add("well")
    assert schedule.take("stuck", 0.0) == [0]
    assert schedule.take("well", 0.0) == [1]
    schedule.arrived("well", 1, 0.1)
    assert schedule.take("well", 0.1) == []
    assert schedule.take("well", 5.0) == [0]
    assert schedule.arrived("well", 0, 5.1)
    assert not schedule.arrived("stuck", 0, 6.0), "it counts once"


def test_a_donor_that_fails_three_times_in_a_row_is_not_asked_again() -> None:
    schedule: ChunkSchedule[str] = ChunkSchedule(5)
    schedule.add("a")
    for failure in range(MAX_FAILURES):
        assert schedule.take("a", 0.0) == [0]
        assert schedule.failed("a") == (failure < MAX_FAILURES - 1)
    assert schedule.take("a", 0.0) == []
    assert schedule.donors == []


def test_a_success_forgives_earlier_failures() -> None:
    schedule: ChunkSchedule[str] = ChunkSchedule(100)
    schedule.add("a")
    for _ in range(10):
        schedule.take("a", 0.0)
        schedule.failed("a")
        [first, *_] = schedule.take("a", 0.0)
        schedule.arrived("a", first, 1.0)
        assert schedule.failed("a")


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([], 30.0), ([0.01] * 9, LEAST_DEADLINE_S), ([4.0] * 9, 12.0), ([900.0], MOST_DEADLINE_S)],
)
def test_deadlines_follow_what_is_observed_within_bounds(
    samples: list[float], expected: float
) -> None:
    assert deadline_s(samples) == expected


def test_the_description_of_most_is_tried_first() -> None:
    assert ranked({"a": "x", "b": "y", "c": "y"}) == [["b", "c"], ["a"]]
    assert ranked({"a": "x", "b": "y"}) == [["a"], ["b"]]


@settings(max_examples=300, deadline=None)
@given(
    chunks=st.integers(1, 60),
    have=st.sets(st.integers(0, 59)),
    donors=st.integers(1, 5),
    seed=st.integers(0, 1 << 32),
)
def test_every_chunk_is_verified_once_whatever_fails(
    chunks: int, have: set[int], donors: int, seed: int
) -> None:
    """In any order: chunks arrive, requests fail, donors lie and are dropped. One donor is true."""
    rng = random.Random(seed)
    schedule: ChunkSchedule[int] = ChunkSchedule(chunks, have=have)
    asked: dict[int, list[int]] = {}
    got: list[int] = []
    now_s = 0.0
    for donor in range(donors):
        schedule.add(donor)
        asked[donor] = []
    for _ in range(100_000):
        if schedule.done:
            break
        now_s += rng.expovariate(1.0)
        donor = rng.randrange(donors)
        if not asked[donor]:
            asked[donor] = schedule.take(donor, now_s)
            assert len(set(asked[donor])) == len(asked[donor])
            assert not set(asked[donor]) & (set(got) | have), "asked for what is there"
            continue
        event = rng.random()
        if event < 0.6 or donor == 0:
            chunk = asked[donor].pop(0)
            if schedule.arrived(donor, chunk, now_s):
                got.append(chunk)
        else:
            asked[donor] = []
            if event > 0.95:
                schedule.drop(donor)
            else:
                schedule.failed(donor)
    assert schedule.done
    assert sorted(got) == [c for c in range(chunks) if c not in have]
