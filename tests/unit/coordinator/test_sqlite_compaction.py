# SPDX-License-Identifier: Apache-2.0
"""Compaction of the real log: all or nothing, whatever interrupts it; and the file stays small."""

import sqlite3
from pathlib import Path

import pytest

from shoal.coordinator.history import SqliteHistory
from shoal.coordinator.sqlite_store import SqliteEventStore, read_event_log, read_log_and_history
from shoal.coordinator.step_row import StepRow, row_of
from shoal.protocol.errors import DiskFullError
from shoal.protocol.ids import PeerId

from .test_state import committed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.sqlite"


def row(step: int) -> StepRow:
    return row_of(committed(step), (1, 2), 2)


def filled(path: Path, *, events: int = 40) -> SqliteEventStore:
    store = SqliteEventStore(path)
    for number in range(1, events + 1):
        store.append("event", {"number": number, "padding": "x" * 2000})
    return store


def seen(path: Path) -> tuple[list[int], list[int]]:
    """Sequences of the events and steps of the rows, as a restarted coordinator finds them."""
    with SqliteEventStore(path) as store:
        events = list(store.read())
        steps = [row.step for row in store.history.rows()]
        assert store.history.totals.num_steps == len(steps)
        assert (store.history.slots_of(PeerId("a")) == 9) == bool(steps)
    return [event.sequence for event in events], steps


OLD = (list(range(1, 41)), [])
NEW = (list(range(30, 41)), [1, 2, 3])


def copied(path: Path, to: Path) -> Path:
    """What a kill at this instant leaves; the operating system has every written byte."""
    to.mkdir(parents=True)
    for file in path.parent.glob("events.sqlite*"):
        if not file.name.endswith("-shm"):
            (to / file.name).write_bytes(file.read_bytes())
    return to / path.name


def compact(store: SqliteEventStore) -> None:
    store.compact(30, "State", {}, [row(1), row(2), row(3)], {PeerId("a"): 9})


def test_a_kill_within_a_compaction_leaves_the_old_log(path: Path, tmp_path: Path) -> None:
    copies: list[Path] = []
    with filled(path) as store:
        store._database.set_trace_callback(
            lambda sql: copies.append(copied(path, tmp_path / f"at-{len(copies)}"))
        )
        compact(store)
        store._database.set_trace_callback(None)
    found = [seen(copy) for copy in copies]
    assert len(found) > 8
    assert found[0] == OLD
    assert found[-1] == NEW
    assert found == sorted(found, key=lambda state: state == NEW)
    assert all(state in (OLD, NEW) for state in found)


def test_an_error_within_a_compaction_leaves_the_old_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(path) as store:

        def fails(*_: object) -> list[StepRow]:
            SqliteHistory.write(store.history, [row(1)], {PeerId("a"): 9})
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(store.history, "write", fails)
            with pytest.raises(DiskFullError, match="free some space"):
                compact(store)
        assert store.history.row(1) is None
        assert store.append("event", {}) == 41
        compact(store)
    assert seen(path) == ([*range(30, 42)], [1, 2, 3])


def test_a_write_ahead_log_cut_off_anywhere_is_the_old_log_or_the_new(
    path: Path, tmp_path: Path
) -> None:
    """What a power cut leaves of the last transaction."""
    store = filled(path)
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    store._database.execute("PRAGMA wal_autocheckpoint = 0")
    with store._transaction():  # as a compaction, without the checkpoint after it
        store.history.write([row(1), row(2), row(3)], {PeerId("a"): 9})
        store._database.execute("DELETE FROM events WHERE sequence <= 30")
        store._database.execute("INSERT INTO events VALUES (30, 'State', '{}')")
    whole = copied(path, tmp_path / "whole")
    store.close()
    wal = whole.with_name(whole.name + "-wal").read_bytes()
    found = []
    for number, size in enumerate([*range(0, len(wal), 2060), len(wal)]):
        copy = copied(whole, tmp_path / f"cut-{number}")
        copy.with_name(copy.name + "-wal").write_bytes(wal[:size])
        found.append(seen(copy))
    assert found[0] == OLD
    assert found[-1] == NEW
    assert all(state in (OLD, NEW) for state in found)


def test_the_file_stays_small_however_much_is_logged(path: Path) -> None:
    sizes = []
    with SqliteEventStore(path) as store:
        for _ in range(12):
            for _ in range(100):
                store.append("event", {"padding": "x" * 2000})
            store.compact(store.last_sequence - 10, "State", {})
            sizes.append(sum(f.stat().st_size for f in path.parent.glob("events.sqlite*")))
        (free,) = store._database.execute("PRAGMA freelist_count").fetchone()
    assert max(sizes[4:]) <= max(sizes[:4]) + 200_000
    assert free == 0
    assert path.stat().st_size < 300_000


def test_a_reader_beside_a_writer_sees_every_step_once(path: Path) -> None:
    with filled(path) as store:
        compact(store)
        events, rows = read_log_and_history(path)
        assert [e.sequence for e in events] == NEW[0]
        assert [r.step for r in rows] == NEW[1]


def test_a_log_of_the_version_before_is_taken_over(path: Path) -> None:
    with filled(path):
        pass
    database = sqlite3.connect(path)
    for statement in ("DROP TABLE steps", "DROP TABLE shares", "PRAGMA user_version = 1"):
        database.execute(statement)
    database.commit()
    database.close()
    assert len(list(read_event_log(path))) == 40
    assert read_log_and_history(path)[1] == []
    with SqliteEventStore(path) as store:
        compact(store)
    assert seen(path) == NEW
