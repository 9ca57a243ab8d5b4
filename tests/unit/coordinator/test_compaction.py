# SPDX-License-Identifier: Apache-2.0
"""What compaction keeps, what it moves, and that nothing else changes."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.compaction import (
    MAX_STEPS,
    RECENT_STEPS,
    WORTHWHILE_STEPS,
    Compaction,
    compaction,
    first_kept,
)
from shoal.coordinator.history import InMemoryHistory
from shoal.coordinator.state import (
    AnyEvent,
    Compacted,
    NodeFenced,
    Paused,
    RolledBack,
    RunState,
    SnapshotStored,
    StageAssigned,
    StepApplied,
    StepOpened,
    apply,
    dump,
)
from shoal.protocol.ids import Incarnation, PeerId

from .test_state import committed


def assigned(incarnation: int) -> StageAssigned:
    who = Incarnation(incarnation)
    return StageAssigned(
        time_s=0, incarnation=who, peer_id=PeerId(f"peer-{incarnation}"), name="n", stage=0
    )


def digests(step: int) -> StepApplied:
    return StepApplied(time_s=0, step=step, weights_digests=(step, step + 1))


def a_log(steps: int, *, every: int = 10) -> list[tuple[int, AnyEvent]]:
    """Incarnations 2n-1 and 2n compute steps 10(n-1) to 10n, and are fenced then."""
    events: list[AnyEvent] = [digests(0)]
    for step in range(1, steps + 1):
        pair = 2 * ((step - 1) // 10) + 1
        if step % 10 == 1:
            if pair > 1:
                events.append(NodeFenced(time_s=0, incarnation=Incarnation(pair - 1), reason="x"))
            events += [assigned(pair), assigned(pair + 1)]
        events.append(StepOpened(time_s=0, step=step, attempt=1))
        events.append(
            committed(
                step,
                loss=float(step),
                sums_digests=(step, 7),
                contributions=({pair: (0, 1)}, {pair + 1: (0, 1)}),
            )
        )
        events.append(digests(step))
        if step % every == 0:
            events.append(SnapshotStored(time_s=0, step=step))
    return list(enumerate(events, 1))


def fold(events: list[tuple[int, AnyEvent]]) -> RunState:
    state = RunState()
    for _, event in events:
        state = apply(event, state)
    return state


def compacted(
    events: list[tuple[int, AnyEvent]], oldest_snapshot: int, *, live: tuple[int, ...] = ()
) -> Compaction:
    found = compaction(
        events, oldest_snapshot=oldest_snapshot, live=live, is_known=lambda step: False,
        num_microbatches=2, now_s=1.0,
    )  # fmt: skip
    assert found is not None
    return found


def test_records_stay_of_recent_steps_and_of_those_after_the_oldest_snapshot() -> None:
    assert first_kept(500, 490) == 500 - RECENT_STEPS + 1
    assert first_kept(500, 300) == 301
    assert first_kept(5000, 0) == 5000 - MAX_STEPS + 1
    assert first_kept(10, 5) == 1
    assert first_kept(0, 0) == 1


def test_a_short_run_is_never_compacted() -> None:
    events = a_log(RECENT_STEPS + WORTHWHILE_STEPS - 1)
    assert compaction(
        events, oldest_snapshot=90, live=(), is_known=lambda step: False, num_microbatches=2,
        now_s=1.0,
    ) is None  # fmt: skip


def test_what_is_moved_becomes_rows_and_the_rest_is_as_it_was() -> None:
    events = a_log(200)
    before, found = fold(events), compacted(events, 190)
    assert [row.step for row in found.rows] == list(range(1, 137))
    assert list(found.state.records) == list(range(137, 201))
    for step, record in found.state.records.items():
        assert record == before.records[step]
    row = found.rows[41]
    assert (row.step, row.loss, row.sums_digests, row.weights_digests) == (
        42, 42.0, (42, 7), (42, 43),
    )  # fmt: skip
    assert (row.counted, row.missing, row.double) == (4, 0, 0)
    assert sum(found.shares.values()) == 136 * 4
    kept = {f.name: getattr(before, f.name) for f in fields(before)}
    for name in kept.keys() - {"records", "weights_digests", "peers"}:
        assert getattr(found.state, name) == kept[name], name


def test_weights_can_be_compared_at_every_step_that_stays_and_at_the_one_before() -> None:
    found = compacted(a_log(200), 190)
    assert list(found.state.weights_digests) == [0, *range(136, 201)]


def test_peers_stay_that_computed_a_kept_step_or_are_attached() -> None:
    found = compacted(a_log(200), 190, live=(3,))
    assert list(found.state.peers) == [3, *range(27, 41)]


def test_a_compacted_log_can_be_compacted_again() -> None:
    events = a_log(200)
    first = compacted(events, 190)
    again = [(first.through, first.event), *(e for e in a_log(400) if e[0] > first.through)]
    second = compacted(again, 390)
    assert second.rows[0].step == 137
    assert second.state == compacted(a_log(400), 390).state


def test_the_event_for_the_past_does_not_grow_with_the_run() -> None:
    sizes = [len(repr(compacted(a_log(n), n).event.state)) for n in (200, 400, 800)]
    assert max(sizes) - min(sizes) < 60


def test_every_part_of_the_state_is_written_and_read_back() -> None:
    state = fold(
        [*a_log(3), (99, Paused(time_s=0, reason="why")), (100, SnapshotStored(time_s=0, step=2))]
    )
    assert apply(Compacted(time_s=0, state=dump(state)), RunState()) == state


def test_a_recomputed_step_that_has_its_row_is_not_counted_again() -> None:
    """The run went back to before its first record."""
    first = compacted(a_log(200), 190)
    history = InMemoryHistory()
    history.write(first.rows, first.shares)
    before = history.totals
    events = [
        (1, first.event),
        (2, RolledBack(time_s=0, to_step=0, reason="x")),
        *((s + 2, e) for s, e in a_log(300)),
    ]
    found = compaction(
        events, oldest_snapshot=290, live=(), is_known=lambda s: history.row(s) is not None,
        num_microbatches=2, now_s=1.0,
    )  # fmt: skip
    assert found is not None
    history.write(found.rows, found.shares)
    assert history.totals.num_steps == 236
    assert before.counted == 136 * 4
    assert history.totals.counted == 236 * 4
    assert sum(history.slots_of(PeerId(f"peer-{n}")) for n in range(1, 100)) == 236 * 4


LOG = a_log(300)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, len(LOG)), min_size=1, max_size=4, unique=True),
    snapshots=st.lists(st.integers(0, 300), min_size=4, max_size=4),
)
def test_whenever_it_happens_rows_and_records_together_are_all_steps(
    cuts: list[int], snapshots: list[int]
) -> None:
    history, log = InMemoryHistory(), list(LOG)
    for end, snapshot in zip(sorted(cuts), snapshots, strict=False):
        past = [e for e in log if e[0] <= end]
        found = compaction(
            past, oldest_snapshot=snapshot, live=(), is_known=lambda s: history.row(s) is not None,
            num_microbatches=2, now_s=1.0,
        )  # fmt: skip
        if found is not None:
            history.write(found.rows, found.shares)
            log = [(found.through, found.event), *(e for e in log if e[0] > found.through)]
    state, whole = fold(log), fold(LOG)
    assert sorted([*(r.step for r in history.rows()), *state.records]) == list(range(1, 301))
    assert all(r.sums_digests == whole.records[r.step].sums_digests for r in history.rows())
    assert (state.step, state.last_incarnation, state.snapshot_step) == (
        whole.step, whole.last_incarnation, whole.snapshot_step,
    )  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(RunState)])
def test_the_state_has_no_part_that_compaction_does_not_know(name: str) -> None:
    """Whoever adds a mapping or a list decides in `compaction` what of it stays."""
    value = getattr(RunState(), name)
    assert not hasattr(value, "__len__") or isinstance(value, str) or name in (
        "records", "weights_digests", "peers", "standbys",  # the last is bounded
    )  # fmt: skip
