# SPDX-License-Identifier: Apache-2.0
"""Which fault is due, and how a fault is written down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import ConfigError
from shoal.protocol.faults import (
    COORDINATOR_MOMENTS,
    NODE_MOMENTS,
    Action,
    Fault,
    FaultBook,
    FiredFault,
    Moment,
    parse_fault,
    parse_fired,
)


def fault(id: str = "a", step: int = 3, **fields: object) -> Fault:
    return Fault.model_validate(
        {"id": id, "step": step, "moment": "prepared", "action": "kill", **fields}
    )


def test_every_moment_is_a_nodes_or_the_coordinators() -> None:
    assert sorted([*NODE_MOMENTS, *COORDINATOR_MOMENTS]) == sorted(Moment)


def test_a_fault_is_due_at_its_moment_in_its_step_and_never_again() -> None:
    book = FaultBook()
    book.learn([fault()])
    assert book.reach(Moment.PREPARED, 2) == []
    assert book.reach(Moment.COMMITTED, 3) == []
    assert book.reach(Moment.PREPARED, 3) == [fault()]
    assert book.reach(Moment.PREPARED, 3) == []
    assert book.reach(Moment.PREPARED, 4) == []


def test_a_moment_missed_in_its_step_is_caught_in_a_later_one() -> None:
    book = FaultBook()
    book.learn([fault(step=3)])
    assert book.reach(Moment.PREPARED, 7) == [fault(step=3)]


def test_skip_lets_the_first_times_pass() -> None:
    book = FaultBook()
    book.learn([fault(skip=2)])
    assert [len(book.reach(Moment.PREPARED, step)) for step in (2, 3, 3, 4, 5)] == [0, 0, 0, 1, 0]


def test_a_fault_that_is_learned_again_is_still_the_same_one() -> None:
    book = FaultBook()
    book.learn([fault(skip=1)])
    assert book.reach(Moment.PREPARED, 3) == []
    book.learn([fault(skip=1)])
    assert book.reach(Moment.PREPARED, 3) == [fault(skip=1)]
    book.learn([fault(skip=1)])
    assert book.waiting == []


def test_what_has_fired_before_the_restart_does_not_fire_again() -> None:
    book = FaultBook(fired=["a"])
    book.learn([fault("a"), fault("b")])
    assert [due.id for due in book.reach(Moment.PREPARED, 3)] == ["b"]


@given(
    faults=st.lists(
        st.builds(
            Fault,
            id=st.text("ab", min_size=1, max_size=3),
            step=st.integers(0, 5),
            moment=st.sampled_from(Moment),
            action=st.sampled_from(Action),
            skip=st.integers(0, 3),
        ),
        max_size=6,
    ),
    reached=st.lists(st.tuples(st.sampled_from(Moment), st.integers(0, 8)), max_size=40),
)
def test_no_fault_fires_twice_early_or_elsewhere(
    faults: list[Fault], reached: list[tuple[Moment, int]]
) -> None:
    book, fired = FaultBook(), []
    book.learn(faults)
    for moment, step in reached:
        for due in book.reach(moment, step):
            assert due.moment is moment
            assert due.step <= step
            fired.append(due.id)
    assert len(fired) == len(set(fired))
    for waiting in book.waiting:
        times = sum(m is waiting.moment and step >= waiting.step for m, step in reached)
        assert times <= waiting.skip


def test_a_line_is_a_fault() -> None:
    line = '{"id":"a","step":3,"moment":"mid_reduce","action":"stop","seconds":1.5}'
    assert parse_fault(line) == fault(moment="mid_reduce", action="stop", seconds=1.5)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "the line"),
        ("[]", "the line"),
        ('{"id":"a","step":1,"moment":"now","action":"kill"}', "moment"),
        ('{"id":"a","step":1,"moment":"prepared","action":"explode"}', "action"),
        ('{"id":"a","step":1,"moment":"prepared","action":"stop","seconds":-1}', "seconds"),
        ('{"id":"a","step":1,"moment":"prepared","action":"stop","seconds":1e9}', "seconds"),
        ('{"id":"a","step":1,"moment":"prepared","action":"kill","when":1}', "when"),
    ],
)
def test_anything_else_is_refused_by_field(line: str, what: str) -> None:
    with pytest.raises(ConfigError, match=rf": {what}: .*one JSON object a line"):
        parse_fault(line)


def test_a_fired_line_that_was_cut_short_is_left_out() -> None:
    fired = FiredFault(
        id="a", step=3, moment=Moment.PREPARED, action=Action.KILL, time_s=1.0, pid=7
    )
    line = fired.model_dump_json()
    assert parse_fired(f"{line}\n{line[:20]}") == [fired]
