# SPDX-License-Identifier: Apache-2.0
"""A run of more steps than the log keeps: everything is still known, compared and counted once."""

import pytest

from shoal.coordinator import compaction, conductor
from shoal.coordinator.run_view import ConductorView
from shoal.coordinator.state import replay
from shoal.coordinator.timeline import Timeline
from shoal.protocol.errors import DiskFullError
from shoal.protocol.proto.types_pb2 import STATE_PART_WEIGHTS

from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .fake_training import reference
from .swarm_checks import kinds, lines, untermed

STEPS = 230


def long_run(**fields: int) -> FakeSwarm:
    shape = {"steps": STEPS, "snapshot_every": 10, "microbatches": 2, **fields}
    return FakeSwarm(make_run(**shape), 4)


def assert_all_steps_are_known(swarm: FakeSwarm) -> None:
    expected, state, rows = reference(swarm.run), swarm.conductor.state, {}
    for row in swarm.history.rows():
        rows[row.step] = row
        assert row.sums_digests == expected.sums[row.step]
        assert row.weights_digests == expected.weights[row.step]
        assert (row.counted, row.missing, row.double) == (4, 0, 0)
    for step, record in state.records.items():
        assert record.sums_digests == expected.sums[step]
    assert sorted(rows.keys() | state.records.keys()) == list(range(1, state.highest_step + 1))
    view = ConductorView(swarm.conductor, lambda: "link").view()
    assert view.steps_lost == 0
    assert (view.microbatches_missing, view.microbatches_double) == (0, 0)
    assert view.bytes_total == state.highest_step * swarm_bytes(swarm)
    assert view.loss_first == pytest.approx(first_loss(swarm))
    # Nodes that were lost before the last restart are shown no more.
    slots = sum(n.contributed_microbatches for n in view.nodes)
    assert sum(n.contributed_share for n in view.nodes) == pytest.approx(
        slots / (4 * state.highest_step)
    )
    assert [p.step for p in view.history] == list(range(1, state.highest_step + 1))


def swarm_bytes(swarm: FakeSwarm) -> float:
    rows = list(swarm.history.rows())
    records = [*rows, *swarm.conductor.state.records.values()]
    steps = {r.step: r.boundary_bytes + r.reduce_bytes for r in records}
    return sum(steps.values()) / len(steps)


def first_loss(swarm: FakeSwarm) -> float:
    row = swarm.history.row(1)
    assert row is not None
    return row.loss


def test_a_long_run_keeps_a_row_for_every_step_and_records_of_the_newest() -> None:
    swarm = long_run()
    swarm.finish(within_s=600)
    state = swarm.conductor.state
    view = ConductorView(swarm.conductor, lambda: "link").view()
    assert sum(n.contributed_microbatches for n in view.nodes) == 4 * STEPS
    assert len(state.records) < 110
    assert len(swarm.disk) < 500
    assert swarm.disk[0].kind == "compacted"
    assert_all_steps_are_known(swarm)


def test_a_restart_finds_what_was_before_it() -> None:
    swarm = long_run()
    swarm.run_until(lambda: swarm.conductor.state.step == 150, within_s=600)
    swarm.store.flush()
    before = swarm.conductor.state
    swarm.restart()
    assert untermed(swarm.conductor.state) == untermed(before)
    swarm.finish(within_s=600)
    assert_all_steps_are_known(swarm)


def test_the_state_in_memory_is_always_the_logs() -> None:
    swarm = long_run(steps=140)
    seen = set()

    def same() -> bool:
        state = swarm.conductor.state
        if state.step % 7 == 0 and state.step not in seen:
            seen.add(state.step)
            assert state == replay((e.kind, e.payload) for e in swarm.store.read())
        return swarm.conductor.ended

    swarm.run_until(same, within_s=600)
    assert len(seen) == 21


def lose_everything(swarm: FakeSwarm) -> None:
    """All snapshots are damaged, and a stage is lost: the run goes back to the beginning."""
    swarm.snapshots.complete.clear()
    swarm.snapshots.incoming.clear()
    for node in swarm.at(1):
        node.kill()
    swarm.join()
    swarm.join()
    swarm.run_until(lambda: "rolled_back" in kinds(swarm), within_s=60)


@pytest.mark.parametrize("restarts", [False, True])
def test_steps_from_before_the_log_are_recomputed_and_compared(restarts: bool) -> None:
    swarm = long_run()
    swarm.run_until(lambda: swarm.conductor.state.step == 150, within_s=600)
    before = list(swarm.history.rows())
    assert len(before) >= 64
    lose_everything(swarm)
    assert "goes back to the beginning" in lines(swarm)
    if restarts:
        swarm.run_until(lambda: swarm.conductor.state.step == 20, within_s=60)
        swarm.restart()
    swarm.finish(within_s=900)
    assert list(swarm.history.rows())[: len(before)] == before
    assert_all_steps_are_known(swarm)


def test_a_step_from_before_the_log_that_comes_out_otherwise_fails_the_run() -> None:
    for broken, words in (("corrupt_sums", "other sums"), ("corrupt_weights", "other weights")):
        swarm = long_run()
        swarm.run_until(lambda s=swarm: s.conductor.state.step == 150, within_s=600)  # type: ignore[misc]
        lose_everything(swarm)
        for node in swarm.nodes.values():
            setattr(node, broken, 1)
        swarm.run_until(lambda s=swarm: s.conductor.ended, within_s=600)  # type: ignore[misc]
        assert words in swarm.conductor.failed
        assert swarm.conductor.state.step <= 1


def test_a_full_disk_puts_compaction_off_and_nothing_else() -> None:
    swarm = long_run()
    swarm.run_until(lambda: swarm.conductor.state.step == 90, within_s=600)
    real = swarm.store._check_room

    def compaction_never_fits(records: list[object]) -> None:
        if records and getattr(records[0], "kind", "") == "compacted":
            raise DiskFullError("no room")
        real(records)  # type: ignore[arg-type]

    swarm.store._check_room = compaction_never_fits  # type: ignore[assignment,method-assign]
    swarm.run_until(lambda: swarm.conductor.state.step == 150, within_s=600)
    assert swarm.disk[0].kind != "compacted"
    swarm.store._check_room = real  # type: ignore[method-assign]
    swarm.finish(within_s=600)
    assert swarm.disk[0].kind == "compacted"
    assert_all_steps_are_known(swarm)


def test_without_snapshots_records_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MAX_STEPS", 70)
    monkeypatch.setattr(conductor, "MAX_STEPS", 70)
    swarm = long_run(snapshot_every=10_000)
    most = 0

    def over() -> bool:
        nonlocal most
        most = max(most, len(swarm.conductor.state.records))
        return swarm.conductor.ended

    swarm.run_until(over, within_s=600)
    assert most <= 70 + 4 * 32 + 1
    assert isinstance(swarm.conductor.state.records, Timeline)
    assert_all_steps_are_known(swarm)


def test_compaction_in_an_open_step_leaves_who_is_counted_in_it() -> None:
    """A node that warmed up for a hundred steps takes part for the first time, prepares, and is
    lost: it stays counted, and no record names it yet."""
    swarm = FakeSwarm(
        make_run(steps=STEPS, snapshot_every=50, microbatches=4, stages=1, replicas=3, min_nodes=2),
        2,
    )
    swarm.run_until(lambda: swarm.conductor.state.step == 20, within_s=600)
    late = swarm.join()
    late.slow_parts = {STATE_PART_WEIGHTS}
    swarm.run_until(lambda: swarm.conductor.state.step == 148, within_s=600)
    late.slow_parts = set()
    swarm.run_until(lambda: late.prepared is not None, within_s=60)
    step = swarm.conductor.state.step
    while any(e.HasField("prepared") for e in late.events):
        late.report()
    incarnation = late.incarnation
    late.kill()
    before = swarm.disk[0].sequence
    swarm.snapshots.complete[step] = {0: (0, 0)}
    swarm.conductor.snapshot_stored(step)
    assert swarm.disk[0].sequence > before
    assert swarm.conductor.state.step == step
    del swarm.snapshots.complete[step]
    swarm.run_until(lambda: swarm.conductor.state.step == step + 1, within_s=60)
    assert incarnation in swarm.conductor.state.records[step + 1].contributions[0]
