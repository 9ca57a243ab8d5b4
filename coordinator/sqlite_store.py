# SPDX-License-Identifier: Apache-2.0
"""The event log in a run folder: one SQLite file, one writer, and readers beside it."""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shoal.coordinator.history import TABLES, SqliteHistory, select_rows
from shoal.coordinator.step_row import StepRow
from shoal.coordinator.store import Event, EventStore, StoredEvent, decode
from shoal.protocol.atomic_file import storage_error
from shoal.protocol.disk import require_space
from shoal.protocol.errors import CapacityError, DiskFullError, StorageError, VersionError
from shoal.protocol.ids import PeerId
from shoal.version import EVENT_LOG_VERSION

_MIGRATES_FROM = 1
"""Logs of this version become the present one when they are opened for writing."""

_MAX_WAL_BYTES = 4 << 20
"""The write-ahead log is cut back to this whenever it starts over."""

_APPLICATION_ID = 0x53484F41  # "SHOA", in the database's header


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
        return decode(events), rows


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
