# SPDX-License-Identifier: Apache-2.0
"""What only the SQLite event store has: versions, the folder's lock, damaged files."""

import os
import sqlite3
from pathlib import Path

import pytest

from shoal.coordinator.sqlite_store import RunFolderLock, SqliteEventStore, read_event_log
from shoal.protocol import disk
from shoal.protocol.errors import CapacityError, StorageError, VersionError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "events.sqlite"
    with SqliteEventStore(path) as store:
        store.append("a", {})
        store.append("b", {})
    return path


def execute(path: Path, statement: str) -> None:
    database = sqlite3.connect(path)
    database.execute(statement)
    database.commit()
    database.close()


def test_a_second_coordinator_on_the_run_folder_is_refused_by_pid(path: Path) -> None:
    with SqliteEventStore(path) as store:
        with pytest.raises(CapacityError, match=rf"pid {os.getpid()}\b"):
            SqliteEventStore(path)
        store.append("c", {})
    with SqliteEventStore(path) as store:
        assert store.last_sequence == 3


def test_a_refused_log_does_not_keep_the_folder_locked(path: Path) -> None:
    execute(path, "PRAGMA user_version = 9")
    with pytest.raises(VersionError):
        SqliteEventStore(path)
    RunFolderLock(path.parent).release()


def test_another_version_is_named_and_left_unharmed(path: Path) -> None:
    execute(path, "PRAGMA user_version = 9")
    before = path.read_bytes()
    for open_log in (SqliteEventStore, read_event_log):
        with pytest.raises(VersionError, match="version 9, this release reads 2"):
            open_log(path)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    execute(path, "CREATE TABLE things (name)")
    with pytest.raises(StorageError, match="not an event log"):
        SqliteEventStore(path)


def test_a_file_that_is_no_database_is_refused_unharmed(tmp_path: Path) -> None:
    path = tmp_path / "events.sqlite"
    path.write_bytes(b"plain text" * 100)
    with pytest.raises(StorageError, match="restore the run folder"):
        SqliteEventStore(path)
    assert path.read_bytes() == b"plain text" * 100


def test_a_file_left_empty_by_a_kill_at_the_first_start_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "events.sqlite"
    path.touch()
    with SqliteEventStore(path) as store:
        assert store.append("a", {}) == 1


def test_a_hole_in_the_log_is_found(path: Path) -> None:
    with SqliteEventStore(path) as store:
        store.append("c", {})
    execute(path, "DELETE FROM events WHERE sequence = 2")
    with SqliteEventStore(path) as store:
        with pytest.raises(StorageError, match="3 follows 1"):
            list(store.read())


def test_a_failed_append_is_rolled_back_and_does_not_block_the_next_one(path: Path) -> None:
    with SqliteEventStore(path) as store:
        execute(path, "INSERT INTO events VALUES (4, 'intruder', '{}')")
        store.append("c", {}, durable=False)
        with pytest.raises(StorageError, match="UNIQUE"):
            store.append("d", {})
        execute(path, "DELETE FROM events WHERE sequence = 4")
        assert store.append("d", {}) == 4
        assert [event.kind for event in store.read()] == ["a", "b", "c", "d"]


def test_a_log_opens_for_reading_on_a_full_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SqliteEventStore(path) as store:
        monkeypatch.setattr(SqliteEventStore, "_transaction", None)
    with SqliteEventStore(path) as store:
        assert [event.kind for event in store.read()] == ["a", "b"]


def test_the_log_can_be_read_beside_its_writer(path: Path) -> None:
    with SqliteEventStore(path) as store:
        store.append("c", {"x": 1})
        store.append("d", {}, durable=False)
        events = list(read_event_log(path, after=1))
    assert [(event.sequence, event.kind) for event in events] == [(2, "b"), (3, "c")]


def test_reading_an_absent_log_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="folder of a run"):
        read_event_log(tmp_path / "events.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_on_order_refuses_the_event_and_keeps_the_log(path: Path) -> None:
    with SqliteEventStore(path) as store:
        disk.fill(3600)
        try:
            with pytest.raises(StorageError, match=r"No space left.*free some space"):
                store.append("c", {})
            with pytest.raises(StorageError, match="No space left"):
                store.compact(1, "a", {})
        finally:
            disk.fill(0)
        assert [event.kind for event in store.read()] == ["a", "b"]
        assert store.append("c", {}) == 3
