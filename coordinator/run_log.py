# SPDX-License-Identifier: Apache-2.0
"""The run's durable state and its log, and what people are told about the run."""

import logging
from collections import deque
from collections.abc import Callable

from shoal.coordinator.state import DURABLE, AnyEvent, Paused, apply, replay
from shoal.coordinator.store import EventStore

log = logging.getLogger(__name__)

_EVENT_LINES = 200


class RunLog:
    """Replays the log when made; afterwards every change goes through `record`."""

    def __init__(self, store: EventStore, clock: Callable[[], float]) -> None:
        self._store = store
        self.clock = clock
        self.state = replay((event.kind, event.payload) for event in store.read())
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=_EVENT_LINES)
        """(time, kind, text), newest last; for people."""
        self.waiting_for = ""
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None

    def record(self, event: AnyEvent) -> None:
        """Log an event, durably where something follows from it, then apply it.

        Raises `StorageError`; then nothing has changed, and nothing may be announced.
        """
        self._store.append(
            event.kind, event.model_dump(mode="json"), durable=isinstance(event, DURABLE)
        )
        self.state = apply(event, self.state)

    def flush(self) -> None:
        """Make soft events durable too. Raises `StorageError`."""
        self._store.flush()

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
