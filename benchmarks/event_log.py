# SPDX-License-Identifier: Apache-2.0
"""How long an event log takes to replay, to compact and to write, and how large it gets.

    python benchmarks/event_log.py [--events 200000]

Prints one line a measure. Replaying must take time in proportion to the number of events.
"""

import argparse
import tempfile
import time
from pathlib import Path

from shoal.coordinator.compaction import compaction
from shoal.coordinator.sqlite_store import SqliteEventStore
from shoal.coordinator.state import (
    AnyEvent,
    RunState,
    SnapshotStored,
    StageAssigned,
    StepApplied,
    StepCommitted,
    StepOpened,
    apply,
    dump,
    replay,
)
from shoal.protocol.ids import Incarnation, PeerId

SNAPSHOT_EVERY = 50


def log_of(num_events: int) -> list[AnyEvent]:
    """A run of two stages with two replicas each, 16 microbatches, one new node every 20 steps."""
    events: list[AnyEvent] = []
    step, incarnation = 0, 4
    while len(events) < num_events:
        step += 1
        if step % 20 == 1:
            incarnation += 1
            events.append(
                StageAssigned(
                    time_s=step, incarnation=Incarnation(incarnation), name="node", stage=0,
                    peer_id=PeerId(f"peer-{incarnation}"),
                )
            )  # fmt: skip
        halves = {
            Incarnation(incarnation): tuple(range(8)),
            Incarnation(incarnation - 1): tuple(range(8, 16)),
        }
        events.append(StepOpened(time_s=step, step=step, attempt=1))
        events.append(
            StepCommitted(
                time_s=step, step=step, attempt=1, loss=3.0, validation_loss=None, grad_norm=1.0,
                clip_scale=1.0, learning_rate=1e-3, scale_exponent=43, loss_scale=1.0,
                num_tokens=8192, sums_digests=(step, step), contributions=(halves, halves),
                boundary_bytes=1 << 20, reduce_bytes=1 << 22, seconds=2.0,
            )
        )  # fmt: skip
        events.append(StepApplied(time_s=step, step=step, weights_digests=(step, step)))
        if step % SNAPSHOT_EVERY == 0:
            events.append(SnapshotStored(time_s=step, step=step))
    return events


def say(what: str, seconds: float, detail: str = "") -> None:
    print(f"{what:<44} {seconds:8.2f} s  {detail}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200_000)
    events = log_of(parser.parse_args().events)

    begun = time.perf_counter()
    state = RunState()
    for event in events:
        state = apply(event, state)
    say(f"apply {len(events):,} events", time.perf_counter() - begun, f"step {state.step:,}")

    logged = [(event.kind, event.model_dump(mode="json")) for event in events]
    begun = time.perf_counter()
    assert replay(logged) == state
    say("parse and apply them (a restart without compaction)", time.perf_counter() - begun)

    begun = time.perf_counter()
    found = compaction(
        list(enumerate(events, 1)), oldest_snapshot=state.snapshot_step - SNAPSHOT_EVERY,
        live=(), is_known=lambda step: False, num_microbatches=16, now_s=0.0,
    )  # fmt: skip
    assert found is not None
    say("compact them at once", time.perf_counter() - begun, f"{len(found.rows):,} rows")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.sqlite"
        with SqliteEventStore(path) as store:
            for event in events:
                store.append(event.kind, event.model_dump(mode="json"), durable=False)
            store.flush()
            store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            before = path.stat().st_size
            begun = time.perf_counter()
            store.compact(
                found.through, "compacted", found.event.model_dump(mode="json"), found.rows,
                found.shares,
            )  # fmt: skip
            say("write the compaction", time.perf_counter() - begun)
        after = path.stat().st_size
        with SqliteEventStore(path) as store:
            begun = time.perf_counter()
            assert replay((e.kind, e.payload) for e in store.read()) == found.state
            say("replay what is left (a restart)", time.perf_counter() - begun)
    per_row = after / max(1, len(found.rows))
    print(
        f"{before / 1e6:.1f} MB of log became {after / 1e6:.1f} MB, {per_row:.0f} bytes a step; "
        f"the state itself is {len(repr(dump(found.state))) / 1e3:.0f} kB"
    )


if __name__ == "__main__":
    main()
