# SPDX-License-Identifier: Apache-2.0
"""The run's event log: what the coordinator's state is replayed from.

An event is a kind and a JSON payload. Its sequence number counts up from 1 without holes; reading
checks that. A durable append has reached the disk when it returns. Others are kept in memory and
go with the next durable append, with `flush`, or once they are numerous; a kill may lose them, and
only them: what is lost is always the log's end.

Compaction replaces the log's beginning by one event, and in the same transaction moves the steps
that were committed there to the history (`history.py`).
"""

import abc
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from shoal.coordinator.history import InMemoryHistory, StepHistory
from shoal.coordinator.step_row import StepRow
from shoal.protocol.errors import DiskFullError, StorageError
from shoal.protocol.ids import PeerId
from shoal.protocol.spec import canonical_json

MAX_KIND_CHARS = 100
MAX_PAYLOAD_BYTES = 4 << 20
MAX_PENDING = 1000
"""Events in memory; the next append writes them all."""

MAX_HELD = 20_000
"""Events that are kept in memory while the disk is full."""


@dataclass(frozen=True, slots=True)
class Event:
    sequence: int
    kind: str
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its payload as the bytes on disk."""

    sequence: int
    kind: str
    payload: bytes


class EventStore(abc.ABC):
    """Append-only, one writer. Safe to call from several threads; durable appends block."""

    history: StepHistory
    """The steps that compaction took out of the log."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pending: list[StoredEvent] = []
        self._last = 0
        self._closed = False
        self._watchers: list[Callable[[], None]] = []

    @property
    def last_sequence(self) -> int:
        """Of the newest event, durable or not; 0 when there is none."""
        return self._last

    def append(self, kind: str, payload: Mapping[str, Any], *, durable: bool = True) -> int:
        """The event's sequence number. `payload` must be JSON; tuples come back as lists.

        Raises `DiskFullError`, or `StorageError` when the payload is too large; the event is then
        not in the log, and earlier ones that weren't durable are still to be written.
        """
        encoded = _encode(kind, payload)
        with self._lock:
            self._check_open()
            record = StoredEvent(self._last + 1, kind, encoded)
            if durable or len(self._pending) >= MAX_PENDING:
                self._write([*self._pending, record])
                self._pending.clear()
                self._written()
            else:
                self._pending.append(record)
            self._last = record.sequence
            return record.sequence

    def hold(self, kind: str, payload: Mapping[str, Any]) -> int:
        """Like `append` while the disk is full: the event stays in memory until `flush` or an
        append succeeds. Whoever calls this announces nothing until then. Raises `StorageError`
        when too many are held."""
        encoded = _encode(kind, payload)
        with self._lock:
            self._check_open()
            if len(self._pending) >= MAX_HELD:
                raise StorageError(f"{MAX_HELD} events wait for a disk that stays full.")
            self._last += 1
            self._pending.append(StoredEvent(self._last, kind, encoded))
            return self._last

    def flush(self) -> None:
        """Make everything durable. For the daemon's timer. Raises `StorageError`."""
        with self._lock:
            self._check_open()
            if self._pending:
                self._write(self._pending)
                self._pending.clear()
                self._written()

    def read(self, after: int = 0) -> Iterator[Event]:
        """Events with a higher sequence number than `after`, in order, also those not durable.

        Raises `StorageError` for a damaged log.
        """
        with self._lock:
            self._check_open()
            records = [*self._read(after), *(r for r in self._pending if r.sequence > after)]
        return decode(records)

    def compact(
        self,
        through: int,
        kind: str,
        payload: Mapping[str, Any],
        rows: Sequence[StepRow] = (),
        shares: Mapping[PeerId, int] | None = None,
    ) -> None:
        """Replace all events up to and including `through` by one, with that sequence number:
        the state that they add up to; and add `rows` and `shares` (slots by peer) to the history.
        Durable, all or nothing. Raises `StorageError`."""
        assert 0 < through <= self._last
        record = StoredEvent(through, kind, _encode(kind, payload))
        with self._lock:
            self.flush()
            self._replace(record, rows, shares or {})

    # ---- copies at standby coordinators --------------------------------------------------

    def durable(self, after: int = 0) -> list[StoredEvent]:
        """What is on the disk beyond `after`, in order. Raises `StorageError`."""
        with self._lock:
            self._check_open()
            return self._read(after)

    def adopt(self, records: list[StoredEvent]) -> None:
        """Append events as another log has them, durably. Raises `StorageError` for a gap."""
        with self._lock:
            self._check_open()
            for number, record in enumerate(records, self._last + 1):
                if record.sequence != number:
                    raise StorageError(f"event {record.sequence} of the leader's log, not {number}")
            if records:
                self._write(records)
                self._last = records[-1].sequence
                self._written()

    def watch(self, written: Callable[[], None]) -> Callable[[], None]:
        """Call `written`, from any thread, whenever more is durable; returns what ends that."""
        self._watchers.append(written)
        return lambda: self._watchers.remove(written)

    def _written(self) -> None:
        for watcher in list(self._watchers):
            watcher()

    def close(self) -> None:
        """Flush and let go; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            try:
                self.flush()
            finally:
                self._closed = True
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("the event log is closed.")

    @abc.abstractmethod
    def _write(self, records: list[StoredEvent]) -> None:
        """All or nothing, durable."""

    @abc.abstractmethod
    def _read(self, after: int) -> list[StoredEvent]: ...

    @abc.abstractmethod
    def _replace(
        self, record: StoredEvent, rows: Sequence[StepRow], shares: Mapping[PeerId, int]
    ) -> None: ...

    @abc.abstractmethod
    def _release(self) -> None: ...


class InMemoryEventStore(EventStore):
    """For tests and the simulator. `disk` and `history` hold what is durable: a second store on
    them sees what a restarted coordinator would. With `capacity_bytes` the disk can be full."""

    history: InMemoryHistory

    def __init__(
        self,
        disk: list[StoredEvent] | None = None,
        *,
        history: InMemoryHistory | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.disk = [] if disk is None else disk
        self.history = history or InMemoryHistory()
        self.capacity_bytes = capacity_bytes
        self._last = self.disk[-1].sequence if self.disk else 0

    def _write(self, records: list[StoredEvent]) -> None:
        self._check_room([*self.disk, *records])
        self.disk.extend(records)

    def _check_room(self, records: list[StoredEvent]) -> None:
        if self.capacity_bytes is None:
            return
        if sum(len(record.payload) for record in records) > self.capacity_bytes:
            raise DiskFullError(f"the event log's {self.capacity_bytes} bytes are full.")

    def _read(self, after: int) -> list[StoredEvent]:
        return [record for record in self.disk if record.sequence > after]

    def _replace(
        self, record: StoredEvent, rows: Sequence[StepRow], shares: Mapping[PeerId, int]
    ) -> None:
        kept = [r for r in self.disk if r.sequence > record.sequence]
        self._check_room([record, *kept])
        self.history.write(rows, shares)
        self.disk[:] = [record, *kept]

    def _release(self) -> None:
        pass


def _encode(kind: str, payload: Mapping[str, Any]) -> bytes:
    encoded = canonical_json(dict(payload))
    if len(kind) > MAX_KIND_CHARS or len(encoded) > MAX_PAYLOAD_BYTES:
        raise StorageError(
            f"event {kind[:MAX_KIND_CHARS]!r} of {len(encoded)} bytes exceeds the log's "
            f"{MAX_PAYLOAD_BYTES}. Store large things as files, and log their digest."
        )
    return encoded


def decode(records: Iterable[StoredEvent]) -> Iterator[Event]:
    previous: int | None = None
    for record in records:
        if previous is not None and record.sequence != previous + 1:
            raise StorageError(
                f"the event log is damaged: {record.sequence} follows {previous}. "
                "Restore the run folder from a copy."
            )
        previous = record.sequence
        try:
            payload = json.loads(record.payload)
        except ValueError as error:
            raise StorageError(
                f"the event log is damaged at {record.sequence}: {error}. "
                "Restore the run folder from a copy."
            ) from None
        yield Event(record.sequence, record.kind, payload)
