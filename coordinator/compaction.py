# SPDX-License-Identifier: Apache-2.0
"""Keeps the event log and the state bounded: which records stay, and what becomes of the others.

Records stay of the last `RECENT_STEPS` steps, and of all steps after the oldest snapshot that a
rollback may go back to; of `MAX_STEPS` at most. Everything before the first of them becomes one
`Compacted` event, and a row in the history for each step.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.coordinator.state import (
    AnyEvent,
    Compacted,
    RunState,
    StepCommitted,
    apply,
    dump,
)
from shoal.coordinator.step_row import StepRow, row_of, shares
from shoal.protocol.ids import PeerId

RECENT_STEPS = 64
MAX_STEPS = 1024

WORTHWHILE_STEPS = 32
"""Fewer are not moved. So no log is compacted before step 96."""


def first_kept(step: int, oldest_snapshot: int) -> int:
    """The first step whose record stays when the run is at `step`."""
    wanted = min(step - RECENT_STEPS, oldest_snapshot) + 1
    return max(wanted, step - MAX_STEPS + 1, 1)


@dataclass(frozen=True, slots=True)
class Compaction:
    """What replaces the events up to and including `through`."""

    through: int
    event: Compacted
    rows: tuple[StepRow, ...]
    shares: dict[PeerId, int]
    """Slots by peer, of rows that the history lacks."""
    state: RunState
    """What the log adds up to afterwards."""


def compaction(
    events: Sequence[tuple[int, AnyEvent]],
    *,
    oldest_snapshot: int,
    live: Collection[int],
    is_known: Callable[[int], bool],
    num_microbatches: int,
    now_s: float,
) -> Compaction | None:
    """Pure. None when it isn't worth while.

    `events` is the whole log with its sequence numbers; `live` are the incarnations that are
    attached, or took part in the open step; `is_known` tells whether the history has a step's row
    already: after a rollback to a step before the log's first record, recomputed steps are in both.
    """
    whole = _fold(event for _, event in events)
    kept_from = first_kept(whole.step, oldest_snapshot)
    records = ((s, e.step) for s, e in events if isinstance(e, StepCommitted))
    first = next((sequence for sequence, step in records if step >= kept_from), None)
    if first is None:
        return None
    before = [event for sequence, event in events if sequence < first]
    after = [event for sequence, event in events if sequence >= first]
    cut = _fold(before)
    if len(cut.records) < WORTHWHILE_STEPS:
        return None
    # Recomputed steps are recorded again, with others who counted.
    named = {
        who
        for event in after
        if isinstance(event, StepCommitted)
        for stage in event.contributions
        for who in stage
    }
    peers = {who: peer for who, peer in cut.peers.items() if who in named or who in live}
    digests = {s: d for s, d in cut.weights_digests.items() if s in (0, cut.step)}
    counted: Counter[PeerId] = Counter()
    for step, record in cut.records.items():
        if not is_known(step):
            counted += shares(record, cut.peers)
    bounded = replace(cut, records={}, weights_digests=digests, peers=peers)
    compacted = Compacted(time_s=now_s, state=dump(bounded))
    return Compaction(
        through=first - 1,
        event=compacted,
        rows=tuple(
            row_of(record, whole.weights_digests.get(step), num_microbatches)
            for step, record in cut.records.items()
        ),
        shares=dict(counted),
        state=_fold([compacted, *after]),
    )


def _fold(events: Iterable[AnyEvent]) -> RunState:
    state = RunState()
    for event in events:
        state = apply(event, state)
    return state
