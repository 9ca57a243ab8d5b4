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
import contextlib
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.coordinator.history import (
    TABLES,
    InMemoryHistory,
    SqliteHistory,
    StepHistory,
    select_rows,
)
from shoal.coordinator.step_row import StepRow
from shoal.protocol.atomic_file import storage_error
from shoal.protocol.disk import require_space
from shoal.protocol.errors import CapacityError, DiskFullError, StorageError, VersionError
from shoal.protocol.ids import PeerId
from shoal.protocol.spec import canonical_json
from shoal.version import EVENT_LOG_VERSION

MAX_KIND_CHARS = 100
MAX_PAYLOAD_BYTES = 4 << 20
MAX_PENDING = 1000
"""Events in memory; the next append writes them all."""

MAX_HELD = 20_000
"""Events that are kept in memory while the disk is full."""

_MIGRATES_FROM = 1
"""Logs of this version become the present one when they are opened for writing."""

_MAX_WAL_BYTES = 4 << 20
"""The write-ahead log is cut back to this whenever it starts over."""

_APPLICATION_ID = 0x53484F41  # "SHOA", in the database's header


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
        return _decode(records)

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


class SqliteEventStore(EventStore):
    """One SQLite file (WAL, fsync at each commit), and a lock on its folder while it is open."""

    history: SqliteHistory

    def __init__(self, path: Path) -> None:
        """Raises `CapacityError` when another process has the folder, `VersionError` for another
        release's log (left unchanged), `StorageError` for what isn't a log."""
        super().__init__()
        self.path = path
        self._folder_lock = RunFolderLock(path.parent)
        try:
            if path.exists():
                _check_version(path)
            with _storage_errors(path):
                self._database = sqlite3.connect(
                    path, isolation_level=None, check_same_thread=False
                )
                try:
                    self._prepare()
                except BaseException:
                    self._database.close()
                    raise
        except BaseException:
            self._folder_lock.release()
            raise

    def _prepare(self) -> None:
        execute = self._database.execute
        execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file; an old one reuses its pages
        execute("PRAGMA journal_mode = WAL")
        execute(f"PRAGMA journal_size_limit = {_MAX_WAL_BYTES}")
        execute("PRAGMA synchronous = FULL")
        (version,) = execute("PRAGMA user_version").fetchone()
        if version != EVENT_LOG_VERSION:
            with self._transaction():
                if not version:  # a new file
                    execute(
                        "CREATE TABLE events "
                        "(sequence INTEGER PRIMARY KEY, kind TEXT NOT NULL, payload BLOB NOT NULL)"
                    )
                    execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                for table in TABLES:
                    execute(table)
                execute(f"PRAGMA user_version = {EVENT_LOG_VERSION}")
        (last,) = execute("SELECT coalesce(max(sequence), 0) FROM events").fetchone()
        self._last = last
        self.history = SqliteHistory(self._database, lambda: _storage_errors(self.path))

    def _write(self, records: list[StoredEvent]) -> None:
        with _storage_errors(self.path), self._transaction():
            require_space(self.path)
            self._database.executemany(
                "INSERT INTO events VALUES (?, ?, ?)",
                [(record.sequence, record.kind, record.payload) for record in records],
            )

    def _read(self, after: int) -> list[StoredEvent]:
        with _storage_errors(self.path):
            return _select(self._database, after)

    def _replace(
        self, record: StoredEvent, rows: Sequence[StepRow], shares: Mapping[PeerId, int]
    ) -> None:
        with _storage_errors(self.path):
            with self._transaction():
                require_space(self.path)
                new = self.history.write(rows, shares)
                self._database.execute("DELETE FROM events WHERE sequence <= ?", (record.sequence,))
                self._database.execute(
                    "INSERT INTO events VALUES (?, ?, ?)",
                    (record.sequence, record.kind, record.payload),
                )
            self.history.written(new)
            # Give the freed pages back; what a reader beside still needs goes another time.
            # (`execute` would stop after one page, as the statement gives no rows.)
            with contextlib.suppress(sqlite3.Error):  # the compaction is done, whatever comes
                self._database.executescript("PRAGMA incremental_vacuum")
                self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def backup(self, path: Path) -> None:
        """A consistent copy of the whole file, at `path`. Blocks. Raises `StorageError`."""
        with _storage_errors(path), contextlib.closing(_read_only(self.path)) as source:
            with contextlib.closing(sqlite3.connect(path)) as target:
                source.backup(target)

    def _release(self) -> None:
        try:
            with _storage_errors(self.path):
                self._database.close()
        finally:
            self._folder_lock.release()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # a full disk may have rolled back already
                self._database.execute("ROLLBACK")
            raise


class RunFolderLock:
    """At most one coordinator works in a run folder. The kernel lets go when the process dies."""

    def __init__(self, folder: Path) -> None:
        """Raises `CapacityError` naming the process that holds it."""
        path = folder / "coordinator.lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="ascii")
        except OSError as error:
            raise storage_error(path, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            pid = self._file.read(20).strip() or "unknown"
            self._file.close()
            raise CapacityError(
                f"{folder}: another coordinator (pid {pid}) has this run. "
                "Stop it first, or leave it running and use `shoal status`."
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def read_event_log(path: Path, after: int = 0) -> Iterator[Event]:
    """The durable events, beside a coordinator that may be running. Takes no lock.

    Compaction removes the events of steps that neither a rollback nor a chart of recent steps
    needs: see `read_log_and_history` for all steps. Raises `StorageError` or `VersionError`.
    """
    return read_log_and_history(path, after)[0]


def read_log_and_history(path: Path, after: int = 0) -> tuple[Iterator[Event], list[StepRow]]:
    """The durable events, and the rows of the steps that compaction took out of them; from one
    moment, so that each committed step is in one of them. Raises as `read_event_log` does."""
    if not path.exists():
        raise StorageError(f"{path}: no event log here. Give the folder of a run.")
    version = _check_version(path)
    with _storage_errors(path), contextlib.closing(_read_only(path)) as database:
        database.execute("BEGIN")
        events = _select(database, after)
        rows = list(select_rows(database)) if version == EVENT_LOG_VERSION else []
        return _decode(events), rows


def last_sequence(path: Path) -> int:
    """Of the newest event in a log that nobody writes; 0 when there is none."""
    with _storage_errors(path), contextlib.closing(_read_only(path)) as database:
        (last,) = database.execute("SELECT coalesce(max(sequence), 0) FROM events").fetchone()
    return int(last)


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def _check_version(path: Path) -> int:
    with _storage_errors(path), contextlib.closing(_read_only(path)) as database:
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if (application, version, tables) == (0, 0, 0):
        return 0  # created, and killed before anything was written
    if application != _APPLICATION_ID:
        raise StorageError(f"{path}: not an event log. Move it away, or choose another folder.")
    if version not in (_MIGRATES_FROM, EVENT_LOG_VERSION):
        raise VersionError(
            f"{path}: event log version {version}, this release reads {EVENT_LOG_VERSION}. "
            "Use the release that wrote it; the file is unchanged."
        )
    return int(version)


def _select(database: sqlite3.Connection, after: int) -> list[StoredEvent]:
    rows = database.execute(
        "SELECT sequence, kind, payload FROM events WHERE sequence > ? ORDER BY sequence", (after,)
    )
    return [StoredEvent(*row) for row in rows]


def _encode(kind: str, payload: Mapping[str, Any]) -> bytes:
    encoded = canonical_json(dict(payload))
    if len(kind) > MAX_KIND_CHARS or len(encoded) > MAX_PAYLOAD_BYTES:
        raise StorageError(
            f"event {kind[:MAX_KIND_CHARS]!r} of {len(encoded)} bytes exceeds the log's "
            f"{MAX_PAYLOAD_BYTES}. Store large things as files, and log their digest."
        )
    return encoded


def _decode(records: Iterable[StoredEvent]) -> Iterator[Event]:
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


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise DiskFullError(
                f"{path}: {error}; free some space under {path.parent}, and the run goes on."
            ) from error
        if getattr(error, "sqlite_errorcode", None) in (
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        ):
            remedy = "restore the run folder from a copy"
        else:
            remedy = "check that the disk is healthy and the folder is writable"
        raise StorageError(f"{path}: {error}; {remedy}.") from error
