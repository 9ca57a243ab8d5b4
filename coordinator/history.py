# SPDX-License-Identifier: Apache-2.0
"""The steps that compaction took out of the event log: one row each, for ever.

A row of a step is written once and stays as it is, also when the step is recomputed after a
rollback; only weight digests that were not known yet are added to it. Rows lie in the event log's
database and change in the same transaction as its events do.
"""

import abc
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from shoal.coordinator.step_row import StepRow
from shoal.coordinator.thinned import Thinned
from shoal.protocol.ids import PeerId

MAX_POINTS = 1000
"""Of a chart over all rows."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Over all rows."""

    num_steps: int = 0
    last_step: int = 0
    """0 while there is no row."""
    counted: int = 0
    missing: int = 0
    double: int = 0
    num_bytes: int = 0
    first_loss: float | None = None
    validation_loss: float | None = None
    """The newest."""

    def plus(self, row: StepRow) -> "Totals":
        """With one more row, in any order of steps."""
        newer = row.step > self.last_step
        return Totals(
            num_steps=self.num_steps + 1,
            last_step=max(self.last_step, row.step),
            counted=self.counted + row.counted,
            missing=self.missing + row.missing,
            double=self.double + row.double,
            num_bytes=self.num_bytes + row.boundary_bytes + row.reduce_bytes,
            first_loss=row.loss if self.first_loss is None or row.step == 1 else self.first_loss,
            validation_loss=row.validation_loss
            if row.validation_loss is not None and (newer or self.validation_loss is None)
            else self.validation_loss,
        )


class StepHistory(abc.ABC):
    """For the thread that owns the event store; the store writes, others read."""

    totals: Totals

    @abc.abstractmethod
    def row(self, step: int) -> StepRow | None: ...

    @abc.abstractmethod
    def rows(self, after: int = 0) -> Iterator[StepRow]:
        """Those of higher steps than `after`, ascending."""

    @abc.abstractmethod
    def points(self) -> list[StepRow]:
        """At most `MAX_POINTS` of them, evenly spread, ascending."""

    @abc.abstractmethod
    def slots_of(self, peer_id: PeerId) -> int:
        """How many (microbatch, stage) slots in these rows a peer computed."""


class InMemoryHistory(StepHistory):
    """For tests and the simulator. Like a disk: it is handed from one store to the next."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._rows: dict[int, StepRow] = {}
        self._slots: dict[PeerId, int] = {}

    def row(self, step: int) -> StepRow | None:
        return self._rows.get(step)

    def rows(self, after: int = 0) -> Iterator[StepRow]:
        return iter([self._rows[step] for step in sorted(self._rows) if step > after])

    def points(self) -> list[StepRow]:
        return Thinned(MAX_POINTS, self.rows()).rows()

    def slots_of(self, peer_id: PeerId) -> int:
        return self._slots.get(peer_id, 0)

    def write(self, rows: Sequence[StepRow], shares: Mapping[PeerId, int]) -> None:
        for row in rows:
            known = self._rows.get(row.step)
            if known is None:
                self._rows[row.step] = row
                self.totals = self.totals.plus(row)
            elif not known.weights_digests:
                self._rows[row.step] = replace(known, weights_digests=row.weights_digests)
        for peer_id, slots in shares.items():
            self._slots[peer_id] = self.slots_of(peer_id) + slots


_COLUMNS = (
    "step", "time_s", "loss", "validation_loss", "grad_norm", "learning_rate", "loss_scale",
    "scale_exponent", "num_tokens", "seconds", "boundary_bytes", "reduce_bytes", "counted",
    "missing", "double", "sums", "weights",
)  # fmt: skip
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM steps"

TABLES = (
    """CREATE TABLE steps (
        step INTEGER PRIMARY KEY, time_s REAL, loss REAL, validation_loss REAL, grad_norm REAL,
        learning_rate REAL, loss_scale REAL, scale_exponent INTEGER, num_tokens INTEGER,
        seconds REAL, boundary_bytes INTEGER, reduce_bytes INTEGER, counted INTEGER,
        missing INTEGER, double INTEGER, sums BLOB, weights BLOB)""",
    "CREATE TABLE shares (peer_id TEXT PRIMARY KEY, slots INTEGER NOT NULL) WITHOUT ROWID",
)
"""Digests are little-endian unsigned 64-bit numbers, one a stage."""


class SqliteHistory(StepHistory):
    """Tables beside `events`."""

    def __init__(
        self,
        database: sqlite3.Connection,
        storage_errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`storage_errors` puts `sqlite3.Error` into words; where it isn't used the caller does."""
        self._database = database
        self._storage_errors = storage_errors
        totals = database.execute(
            "SELECT count(*), coalesce(max(step), 0), coalesce(sum(counted), 0),"
            " coalesce(sum(missing), 0), coalesce(sum(double), 0),"
            " coalesce(sum(boundary_bytes + reduce_bytes), 0),"
            " (SELECT loss FROM steps ORDER BY step LIMIT 1),"
            " (SELECT validation_loss FROM steps WHERE validation_loss IS NOT NULL"
            "  ORDER BY step DESC LIMIT 1) FROM steps"
        ).fetchone()
        self.totals = Totals(*totals)
        stride = 1
        while self.totals.last_step // stride >= MAX_POINTS:
            stride *= 2
        # A bare column beside max() comes from the row with the maximum.
        thin = database.execute(
            f"SELECT {', '.join(_COLUMNS)}, max(validation_loss IS NOT NULL) FROM steps"
            " GROUP BY step / ? ORDER BY step",
            (stride,),
        )
        self._thinned = Thinned(MAX_POINTS, (_to_row(row[:-1]) for row in thin), stride=stride)

    def row(self, step: int) -> StepRow | None:
        with self._storage_errors():
            found = self._database.execute(f"{_SELECT} WHERE step = ?", (step,)).fetchone()
        return _to_row(found) if found is not None else None

    def rows(self, after: int = 0) -> Iterator[StepRow]:
        with self._storage_errors():
            yield from select_rows(self._database, after)

    def points(self) -> list[StepRow]:
        return self._thinned.rows()

    def slots_of(self, peer_id: PeerId) -> int:
        with self._storage_errors():
            found = self._database.execute(
                "SELECT slots FROM shares WHERE peer_id = ?", (peer_id,)
            ).fetchone()
        return found[0] if found is not None else 0

    def write(self, rows: Sequence[StepRow], shares: Mapping[PeerId, int]) -> list[StepRow]:
        """Within the store's transaction. Returns the rows that are new: once the transaction is
        durable, give them to `written`."""
        new = []
        for row in rows:
            known = self.row(row.step)
            if known is None:
                new.append(row)
                marks = ", ".join("?" * len(_COLUMNS))
                self._database.execute(f"INSERT INTO steps VALUES ({marks})", _to_columns(row))
            elif not known.weights_digests:
                self._database.execute(
                    "UPDATE steps SET weights = ? WHERE step = ?",
                    (_pack(row.weights_digests), row.step),
                )
        self._database.executemany(
            "INSERT INTO shares VALUES (?, ?)"
            " ON CONFLICT (peer_id) DO UPDATE SET slots = slots + excluded.slots",
            list(shares.items()),
        )
        return new

    def written(self, new: Sequence[StepRow]) -> None:
        for row in new:
            self.totals = self.totals.plus(row)
            self._thinned.add(row)


def select_rows(database: sqlite3.Connection, after: int = 0) -> Iterator[StepRow]:
    found = database.execute(f"{_SELECT} WHERE step > ? ORDER BY step", (after,))
    return map(_to_row, found)


def _to_columns(row: StepRow) -> tuple[object, ...]:
    return (
        row.step, row.time_s, row.loss, row.validation_loss, row.grad_norm, row.learning_rate,
        row.loss_scale, row.scale_exponent, row.num_tokens, row.seconds, row.boundary_bytes,
        row.reduce_bytes, row.counted, row.missing, row.double, _pack(row.sums_digests),
        _pack(row.weights_digests),
    )  # fmt: skip


def _to_row(columns: tuple[object, ...]) -> StepRow:
    *numbers, sums, weights = columns
    return StepRow(*numbers, _unpack(sums), _unpack(weights))  # type: ignore[arg-type,call-arg]


def _pack(digests: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(digests)}Q", *digests)


def _unpack(packed: object) -> tuple[int, ...]:
    assert isinstance(packed, bytes)
    return struct.unpack(f"<{len(packed) // 8}Q", packed)
