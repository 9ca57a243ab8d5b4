# SPDX-License-Identifier: Apache-2.0
"""Carries out a compaction of an event log; the leader does so with its own, a standby with its
copy."""

import logging
from collections.abc import Collection

from shoal.coordinator.compaction import WORTHWHILE_STEPS, compaction, first_kept
from shoal.coordinator.state import RunState, parse
from shoal.coordinator.store import EventStore
from shoal.protocol.errors import DiskFullError

log = logging.getLogger(__name__)


def compact_log(
    store: EventStore,
    state: RunState,
    *,
    oldest_snapshot: int,
    live: Collection[int],
    num_microbatches: int,
    now_s: float,
) -> RunState:
    """Move the records that nobody needs any more to the history, where it is worth while; returns
    the state that the log adds up to then, `state` before.

    `live` are the incarnations that may still be named in a record. A full disk puts it off.
    Raises `StorageError` for a damaged log.
    """
    moved = first_kept(state.step, oldest_snapshot) - next(iter(state.records), 0)
    if not state.records or moved < WORTHWHILE_STEPS:
        return state
    found = compaction(
        [(event.sequence, parse(event.kind, event.payload)) for event in store.read()],
        oldest_snapshot=oldest_snapshot,
        live=live,
        is_known=lambda step: store.history.row(step) is not None,
        num_microbatches=num_microbatches,
        now_s=now_s,
    )
    if found is None:
        return state
    payload = found.event.model_dump(mode="json")
    try:
        store.compact(found.through, found.event.kind, payload, found.rows, found.shares)
    except DiskFullError as error:
        log.warning("the event log is compacted another time: %s", error)
        return state
    return found.state
