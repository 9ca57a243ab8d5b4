# SPDX-License-Identifier: Apache-2.0
"""What every event store promises. `Disk` is what survives a restart."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.coordinator import store as store_module
from shoal.coordinator.store import (
    EventStore,
    InMemoryEventStore,
    SqliteEventStore,
    StoredEvent,
    read_event_log,
)
from shoal.protocol.errors import StorageError


class Disk:
    """Opens stores on the same storage."""

    def open(self) -> EventStore:
        raise NotImplementedError

    def kill(self, store: EventStore) -> None:
        """Let the store's process die without closing it."""
        raise NotImplementedError

    def fill(self, store: EventStore) -> None:
        """Let the next megabyte not fit any more."""
        raise NotImplementedError

    def clear(self, store: EventStore) -> None:
        """Make room again."""
        raise NotImplementedError


class MemoryDisk(Disk):
    def __init__(self, folder: Path) -> None:
        self.events: list[StoredEvent] = []

    def open(self) -> EventStore:
        return InMemoryEventStore(self.events)

    def kill(self, store: EventStore) -> None:
        pass

    def fill(self, store: EventStore) -> None:
        assert isinstance(store, InMemoryEventStore)
        store.capacity_bytes = 100_000

    def clear(self, store: EventStore) -> None:
        assert isinstance(store, InMemoryEventStore)
        store.capacity_bytes = None


class SqliteDisk(Disk):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "run" / "events.sqlite"

    def open(self) -> EventStore:
        return SqliteEventStore(self.path)

    def kill(self, store: EventStore) -> None:
        assert isinstance(store, SqliteEventStore)
        store._release()

    def fill(self, store: EventStore) -> None:
        assert isinstance(store, SqliteEventStore)
        store._database.execute("PRAGMA max_page_count = 20")

    def clear(self, store: EventStore) -> None:
        assert isinstance(store, SqliteEventStore)
        store._database.execute("PRAGMA max_page_count = 1000000")


@pytest.fixture(params=[MemoryDisk, SqliteDisk])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    made: Disk = request.param(tmp_path)
    return made


@pytest.fixture
def store(disk: Disk) -> Iterator[EventStore]:
    with disk.open() as store:
        yield store


def kinds(store: EventStore, after: int = 0) -> list[tuple[int, str]]:
    return [(event.sequence, event.kind) for event in store.read(after)]


def test_events_come_back_in_order_with_their_payloads(store: EventStore) -> None:
    assert store.append("StepOpened", {"step": 1, "ids": (1, 2), "loss": 0.1}) == 1
    assert store.append("Received", {"é": None}, durable=False) == 2
    assert store.append("Committed", {}) == 3
    events = list(store.read())
    assert [event.kind for event in events] == ["StepOpened", "Received", "Committed"]
    assert [event.sequence for event in events] == [1, 2, 3]
    assert events[0].payload == {"step": 1, "ids": [1, 2], "loss": 0.1}
    assert events[1].payload == {"é": None}
    assert kinds(store, after=2) == [(3, "Committed")]


def test_a_closed_store_goes_on_where_it_was_when_opened_again(disk: Disk) -> None:
    with disk.open() as store:
        store.append("a", {})
        store.append("b", {}, durable=False)
    with disk.open() as store:
        assert store.last_sequence == 2
        assert store.append("c", {}) == 3
        assert kinds(store) == [(1, "a"), (2, "b"), (3, "c")]


def test_a_kill_loses_at_most_the_events_after_the_last_durable_one(disk: Disk) -> None:
    store = disk.open()
    store.append("a", {}, durable=False)
    store.append("b", {})
    store.append("c", {}, durable=False)
    disk.kill(store)
    with disk.open() as store:
        assert kinds(store) == [(1, "a"), (2, "b")]
        assert store.append("d", {}) == 3


def test_flush_makes_everything_durable(disk: Disk) -> None:
    store = disk.open()
    store.append("a", {}, durable=False)
    store.flush()
    disk.kill(store)
    with disk.open() as store:
        assert kinds(store) == [(1, "a")]


def test_events_in_memory_are_bounded(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_PENDING", 3)
    store = disk.open()
    for _ in range(5):
        store.append("a", {}, durable=False)
    disk.kill(store)
    with disk.open() as store:
        assert store.last_sequence == 4


def test_a_full_disk_refuses_the_event_and_keeps_the_log_whole(disk: Disk) -> None:
    with disk.open() as store:
        store.append("a", {})
        store.append("b", {}, durable=False)
        disk.fill(store)
        with pytest.raises(StorageError, match="full"):
            store.append("large", {"text": "x" * 1_000_000})
        assert kinds(store) == [(1, "a"), (2, "b")]
        disk.clear(store)
        assert store.append("c", {}) == 3
    with disk.open() as store:
        assert kinds(store) == [(1, "a"), (2, "b"), (3, "c")]


def test_a_payload_over_the_bound_is_refused(store: EventStore) -> None:
    with pytest.raises(StorageError, match="exceeds the log's"):
        store.append("large", {"text": "x" * store_module.MAX_PAYLOAD_BYTES})
    with pytest.raises(StorageError, match="exceeds the log's"):
        store.append("x" * 101, {})
    assert store.last_sequence == 0


def test_compaction_replaces_the_beginning_and_keeps_the_numbering(disk: Disk) -> None:
    with disk.open() as store:
        for number in range(1, 6):
            store.append("event", {"number": number}, durable=number % 2 == 0)
        store.compact(3, "State", {"sum": 6})
    with disk.open() as store:
        assert kinds(store) == [(3, "State"), (4, "event"), (5, "event")]
        assert next(store.read()).payload == {"sum": 6}
        store.compact(5, "State", {"sum": 15})
        assert store.append("event", {}) == 6
        assert kinds(store) == [(5, "State"), (6, "event")]


def test_a_closed_store_says_so(disk: Disk) -> None:
    store = disk.open()
    store.close()
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.append("a", {})


WRITER = """
import sys
from pathlib import Path
from shoal.coordinator.store import SqliteEventStore
store = SqliteEventStore(Path(sys.argv[1]))
while True:
    store.append("note", {}, durable=False)
    print(store.append("fact", {"text": "x" * 500}), flush=True)
"""


def test_killing_a_real_writer_keeps_every_event_it_called_durable(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.sqlite"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()
    finally:
        writer.kill()
        writer.wait()
        if writer.stdout is not None:
            writer.stdout.close()
    promised = max([40, *(int(line) for line in rest.splitlines(keepends=True) if "\n" in line)])
    assert [event.sequence for event in read_event_log(path)][:promised] == [
        *range(1, promised + 1)
    ]
    with SqliteEventStore(path) as store:
        assert store.last_sequence >= promised
        store.append("after", {})
