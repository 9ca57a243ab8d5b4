# SPDX-License-Identifier: Apache-2.0
"""The run's durable state and its log, and what people are told about the run.

While the log's disk is full, events are held in memory and applied; whoever sends commands waits
until they are written (`can_announce`), so that nothing is announced that a restart wouldn't know.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection

from shoal.coordinator.history import StepHistory
from shoal.coordinator.log_compaction import compact_log
from shoal.coordinator.state import (
    DURABLE,
    AnyEvent,
    Paused,
    RolledBack,
    StepApplied,
    StepCommitted,
    apply,
    replay,
)
from shoal.coordinator.step_row import StepRow
from shoal.coordinator.store import EventStore
from shoal.protocol.errors import DiskFullError

log = logging.getLogger(__name__)

_EVENT_LINES = 200
_RETRY_S = 1.0
_RETRY_LIMIT_S = 15.0


class RunLog:
    """Replays the log when made; afterwards every change goes through `record`."""

    def __init__(self, store: EventStore, clock: Callable[[], float]) -> None:
        self._store = store
        self.clock = clock
        self.state = replay((event.kind, event.payload) for event in store.read())
        self.blocked = ""
        """Why the log can't be written now, and the remedy; empty when it can."""
        self.can_announce = asyncio.Event()
        """Set while everything in `state` is in the log."""
        self.can_announce.set()
        self._retry_after_s = _RETRY_S
        self._retry_at_s = 0.0
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=_EVENT_LINES)
        """(time, kind, text), newest last; for people."""
        self.waiting_for = ""
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None
        self._recall()

    @property
    def history(self) -> StepHistory:
        """Of the steps that `state.records` has no more."""
        return self._store.history

    def recorded(self, step: int) -> StepCommitted | StepRow | None:
        """What is known of a committed step, however old: its first record, or the row that is
        left of it. Raises `StorageError`."""
        old = self.history.row(step) if step <= self.history.totals.last_step else None
        return old or self.state.records.get(step)

    # ---- writing -------------------------------------------------------------------------

    def record(self, event: AnyEvent) -> None:
        """Log an event, durably where something follows from it, then apply it. When the disk is
        full the log is `blocked` from here on.

        Raises `StorageError` for a damaged log; then nothing has changed, and nothing may be
        announced.
        """
        payload = event.model_dump(mode="json")
        if self.blocked:
            self._store.hold(event.kind, payload)
        else:
            try:
                self._store.append(event.kind, payload, durable=isinstance(event, DURABLE))
            except DiskFullError as error:
                self._store.hold(event.kind, payload)
                self.block(error)
        self.state = apply(event, self.state)
        if isinstance(event, RolledBack | StepCommitted):
            self._recall()

    def flush(self) -> None:
        """Make soft events durable too. Raises `StorageError`."""
        self._store.flush()

    def block(self, error: DiskFullError) -> None:
        """Announce nothing until the log can be written again."""
        if not self.blocked:
            self.can_announce.clear()
            self._retry_after_s, self._retry_at_s = _RETRY_S, self.clock() + _RETRY_S
            self.blocked = f"the coordinator can't write: {error}"
            self.say("disk_full", f"{self.blocked} The run waits for it")

    def unblock(self) -> bool:
        """While blocked, call it often: it tries now and then, less often each time. Returns
        whether the log can be written. Raises `StorageError` for other trouble than a full disk.
        """
        if self.blocked and self.clock() >= self._retry_at_s:
            try:
                self._store.flush()
            except DiskFullError:
                self._retry_after_s = min(2 * self._retry_after_s, _RETRY_LIMIT_S)
                self._retry_at_s = self.clock() + self._retry_after_s
            else:
                self.blocked = ""
                self.can_announce.set()
                self.say("disk_free", "the coordinator can write again; the run goes on")
        return not self.blocked

    # ---- what grows ----------------------------------------------------------------------

    def compact(
        self, *, oldest_snapshot: int, live: Collection[int], num_microbatches: int
    ) -> None:
        """As `compact_log`."""
        if self.blocked:
            return
        before = self.state
        self.state = compact_log(
            self._store,
            before,
            oldest_snapshot=oldest_snapshot,
            live=live,
            num_microbatches=num_microbatches,
            now_s=self.clock(),
        )
        if self.state is not before:
            self._recall()

    def _recall(self) -> None:
        """A run that went back to before its first record compares weights with the history."""
        step = self.state.step
        if step in self.state.weights_digests or step > self.history.totals.last_step:
            return
        row = self.history.row(step)
        if row is not None and row.weights_digests:
            self.record(
                StepApplied(time_s=self.clock(), step=step, weights_digests=row.weights_digests)
            )

    # ---- for people ----------------------------------------------------------------------

    def say(self, kind: str, text: str) -> None:
        log.info("%s", text)
        self.lines.append((self.clock(), kind, text))
        self.changed()

    def wait(self, reason: str) -> None:
        """Why nothing moves; empty when something does."""
        if reason != self.waiting_for:
            self.waiting_for = reason
            if reason:
                log.info("waiting: %s", reason)
            self.changed()

    def changed(self) -> None:
        self.version += 1
        self.on_change()

    def pause(self, reason: str) -> None:
        """Raises `StorageError`."""
        if self.state.paused is None:
            self.record(Paused(time_s=self.clock(), reason=reason))
            self.say("paused", f"{reason}; resume it with the dashboard's API")
