# SPDX-License-Identifier: Apache-2.0
"""What every event store promises. `Disk` is what survives a restart."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.coordinator import store as store_module
from shoal.coordinator.history import MAX_POINTS, InMemoryHistory, Totals
from shoal.coordinator.sqlite_store import SqliteEventStore, read_event_log
from shoal.coordinator.step_row import StepRow
from shoal.coordinator.store import EventStore, InMemoryEventStore, StoredEvent
from shoal.protocol.errors import DiskFullError, StorageError
from shoal.protocol.ids import PeerId


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
        self.history = InMemoryHistory()

    def open(self) -> EventStore:
        return InMemoryEventStore(self.events, history=self.history)

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
        with pytest.raises(DiskFullError, match="full"):
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


def row(step: int, **fields: object) -> StepRow:
    values = {
        "step": step, "time_s": step + 0.5, "loss": 3.25, "validation_loss": None,
        "grad_norm": 1.5, "learning_rate": 1e-3, "loss_scale": 1.0, "scale_exponent": 43,
        "num_tokens": 64, "seconds": 2.0, "boundary_bytes": 10, "reduce_bytes": 5, "counted": 8,
        "missing": 0, "double": 0, "sums_digests": (step, (1 << 64) - 1), "weights_digests": (1, 2),
    }  # fmt: skip
    return StepRow(**{**values, **fields})  # type: ignore[arg-type]


A, B = PeerId("a"), PeerId("b")


def test_steps_that_left_the_log_are_in_the_history_for_ever(disk: Disk) -> None:
    rows = [row(1), row(2, validation_loss=2.5, missing=1), row(3, weights_digests=())]
    with disk.open() as store:
        assert store.history.totals == Totals()
        assert list(store.history.rows()) == []
        for _ in range(6):
            store.append("event", {})
        store.compact(3, "State", {}, rows[:2], {A: 5, B: 1})
        store.compact(4, "State", {}, rows[2:], {A: 2})
    with disk.open() as store:
        history = store.history
        assert list(history.rows()) == rows
        assert list(history.rows(after=2)) == rows[2:]
        assert history.row(2) == rows[1]
        assert history.row(9) is None
        assert history.points() == rows
        assert (history.slots_of(A), history.slots_of(B), history.slots_of(PeerId("c"))) == (
            7,
            1,
            0,
        )
        assert history.totals == Totals(
            num_steps=3, last_step=3, counted=24, missing=1, double=0, num_bytes=45,
            first_loss=3.25, validation_loss=2.5,
        )  # fmt: skip
        store.append("event", {})
        store.compact(7, "State", {}, [row(4, loss=1.0)])
        assert history.totals.num_steps == 4
        assert history.totals.last_step == 4


def test_the_first_row_of_a_step_stands_but_weights_may_be_added(disk: Disk) -> None:
    with disk.open() as store:
        for _ in range(3):
            store.append("event", {})
        store.compact(1, "State", {}, [row(1, weights_digests=()), row(2)])
        store.compact(2, "State", {}, [row(1, loss=9.0), row(2, loss=9.0, weights_digests=(8, 8))])
        assert list(store.history.rows()) == [row(1), row(2)]
        assert store.history.totals.num_steps == 2


def test_any_number_of_steps_makes_a_bounded_chart_with_the_validated_ones(disk: Disk) -> None:
    rows = [row(n, validation_loss=1.0 if n % 50 == 3 else None) for n in range(1, 5001)]
    with disk.open() as store:
        for n in range(0, 5000, 500):
            store.append("event", {})
            store.compact(store.last_sequence, "State", {}, rows[n : n + 500])
        points = store.history.points()
    with disk.open() as store:
        for shown in (points, store.history.points()):
            assert MAX_POINTS / 2 <= len(shown) <= MAX_POINTS
            assert [r.step for r in shown] == sorted({r.step for r in shown})
            assert sum(r.validation_loss is not None for r in shown) == 100
            assert shown[0].step <= 8
            assert shown[-1].step > 4990


def test_a_full_disk_refuses_a_compaction_and_keeps_everything(disk: Disk) -> None:
    with disk.open() as store:
        store.append("a", {})
        store.append("b", {}, durable=False)
        store.append("c", {})
        disk.fill(store)
        with pytest.raises(DiskFullError, match="full"):
            store.compact(2, "State", {"text": "x" * 1_000_000}, [row(1)], {A: 1})
        assert kinds(store) == [(1, "a"), (2, "b"), (3, "c")]
        assert store.history.totals == Totals()
        assert store.history.row(1) is None
        assert store.history.slots_of(A) == 0
        disk.clear(store)
        store.compact(2, "State", {}, [row(1)])
        assert kinds(store) == [(2, "State"), (3, "c")]
        assert store.history.row(1) == row(1)


def test_what_is_held_while_the_disk_is_full_is_written_later_in_its_place(disk: Disk) -> None:
    with disk.open() as store:
        store.append("a", {})
        store.append("b", {}, durable=False)
        disk.fill(store)
        large = {"text": "x" * 200_000}
        with pytest.raises(DiskFullError):
            store.append("c", large)
        assert store.hold("c", large) == 3
        assert store.hold("d", {}) == 4
        with pytest.raises(DiskFullError):
            store.flush()
        assert kinds(store) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
        disk.clear(store)
        assert store.append("e", {}) == 5
    with disk.open() as store:
        assert kinds(store) == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]


def test_not_more_is_held_than_fits_into_memory(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_HELD", 2)
    with disk.open() as store:
        store.hold("a", {})
        store.hold("a", {})
        with pytest.raises(StorageError, match="stays full"):
            store.hold("a", {})


def test_a_closed_store_says_so(disk: Disk) -> None:
    store = disk.open()
    store.close()
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.append("a", {})


WRITER = """
import sys
from pathlib import Path
from shoal.coordinator.sqlite_store import SqliteEventStore
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
