# SPDX-License-Identifier: Apache-2.0
"""The disk under the event log, or under the snapshots, is full: the run waits, says why, announces
nothing that isn't in the log, and goes on when there is room."""

import errno
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.run_view import ConductorView
from shoal.coordinator.sqlite_store import SqliteEventStore, _storage_errors
from shoal.coordinator.store import StoredEvent
from shoal.protocol.errors import DiskFullError, StorageError
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.version import PROTOCOL_VERSION

from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed, in_step, kinds, lines


def fill(swarm: FakeSwarm, spare_bytes: int = 0) -> None:
    used = sum(len(record.payload) for record in swarm.disk)
    swarm.store.capacity_bytes = used + spare_bytes


def assert_nothing_was_announced_too_early(swarm: FakeSwarm) -> None:
    """What nodes were told, a coordinator that starts now knows too."""
    on_disk = Conductor(swarm.run, type(swarm.store)(list(swarm.disk)), swarm.snapshots)
    for node in swarm.nodes.values():
        assert node.step <= on_disk.state.step
        assert node.done is None
        for command in node.commands_seen:
            if command.HasField("commit"):
                assert command.commit.step in on_disk.state.records
            if command.HasField("assign"):
                assert command.assign.incarnation <= on_disk.state.last_incarnation
            if command.HasField("step_open"):
                opened = command.step_open
                state = on_disk.state
                assert (opened.step, opened.attempt) <= (state.step + 1, state.attempt)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("spare_bytes", range(0, 6000, 400))
def test_a_full_disk_holds_the_run_up_and_announces_nothing_that_is_not_in_the_log(
    spare_bytes: int, restarts: bool
) -> None:
    swarm = FakeSwarm(make_run(snapshot_every=50), 4)
    swarm.run_until(in_step(swarm))
    fill(swarm, spare_bytes)
    swarm.run_until(lambda: swarm.conductor.ended or not swarm.conductor.can_announce.is_set())
    if swarm.conductor.ended:
        return
    swarm.settle()
    swarm.pass_time(20)
    assert "full" in swarm.conductor.waiting_for
    assert not swarm.conductor.ended
    assert ConductorView(swarm.conductor, lambda: "link").view().state == "waiting"
    assert len(swarm.conductor.sessions) == 4
    assert_nothing_was_announced_too_early(swarm)
    if restarts:
        swarm.restart()
    else:
        swarm.store.capacity_bytes = None
    swarm.finish()
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)
    assert_nothing_was_lost(swarm)


def assert_nothing_was_lost(swarm: FakeSwarm) -> None:
    on_disk = Conductor(swarm.run, type(swarm.store)(list(swarm.disk)), swarm.snapshots)
    assert on_disk.state.records == swarm.conductor.state.records
    sequences = [record.sequence for record in swarm.disk]
    assert sequences == list(range(1, len(sequences) + 1))


def test_nodes_that_die_while_the_disk_is_full_are_fenced_once_it_has_room() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    fill(swarm)
    lost = swarm.at(0)[0]
    incarnation = lost.incarnation
    lost.kill()
    swarm.settle()
    swarm.pass_time(3)
    assert not any(b"node_fenced" in r.kind.encode() for r in swarm.disk)
    told = [c for n in swarm.nodes.values() for c in n.commands_seen if c.HasField("plan")]
    assert not any(incarnation in command.plan.fenced for command in told)
    swarm.store.capacity_bytes = None
    swarm.finish()
    assert any(r.kind == "node_fenced" for r in swarm.disk)
    assert_undisturbed(swarm)


def test_it_tries_to_write_again_less_often_each_time() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    fill(swarm)
    tries: list[float] = []
    write = swarm.store._write

    def counted(records: list[StoredEvent]) -> None:
        tries.append(swarm.now_s)
        write(records)

    swarm.store._write = counted  # type: ignore[method-assign]
    swarm.run_until(lambda: not swarm.conductor.can_announce.is_set())
    swarm.pass_time(120)
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses[:3] == sorted(pauses[:3])
    assert 10 <= max(pauses) <= 16
    assert len(tries) < 15
    assert lines(swarm).count("can't write") == 1


def test_a_node_that_joins_when_the_disk_is_full_is_told_to_come_again() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))
    fill(swarm)
    swarm.at(0)[0].kill()
    node = swarm.at(1)[0]
    with pytest.raises(StorageError, match="can't write"):
        swarm.conductor.greet(node.peer_id, pb.Hello(protocol_version=PROTOCOL_VERSION))
    promise = node.answer(swarm.conductor.terms.lead())
    with pytest.raises(StorageError, match="can't write"):
        swarm.conductor.attach(node.peer_id, pb.Hello(), promise)
    swarm.store.capacity_bytes = None
    swarm.finish()
    assert_undisturbed(swarm)


def test_soft_events_that_can_not_be_written_are_waited_for_too() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(lambda: bool(swarm.conductor.state.weights_digests))
    swarm.store.append("resumed", {"time_s": 0.0, "kind": "resumed"}, durable=False)
    fill(swarm)
    swarm.conductor.flush()
    swarm.conductor.tick()
    assert "can't write" in swarm.conductor.waiting_for
    swarm.store.capacity_bytes = None
    swarm.finish()
    assert_undisturbed(swarm)


def test_the_last_record_of_a_run_is_waited_for() -> None:
    swarm = FakeSwarm(make_run(snapshot_every=2), 4)
    swarm.run_until(lambda: swarm.conductor.state.step == 4)
    swarm.run_until(lambda: not any(n.events for n in swarm.nodes.values()))
    fill(swarm)
    swarm.settle()
    swarm.pass_time(20)
    assert not swarm.conductor.ended
    assert all(node.done is None for node in swarm.nodes.values())
    swarm.store.capacity_bytes = None
    swarm.finish()
    assert swarm.disk[-1].kind == "run_finished"


def test_a_run_that_can_not_even_begin_says_why() -> None:
    swarm = FakeSwarm(make_run())
    store = type(swarm.store)([], capacity_bytes=1)
    with pytest.raises(DiskFullError, match="full"):
        Conductor(swarm.run, store, swarm.snapshots)


def test_a_damaged_log_still_fails_the_run() -> None:
    swarm = FakeSwarm(make_run(), 4)
    swarm.run_until(in_step(swarm))

    def damaged(records: list[StoredEvent]) -> None:
        raise StorageError("the disk image is malformed.")

    swarm.store._write = damaged  # type: ignore[method-assign]
    swarm.run_until(lambda: swarm.conductor.ended)
    assert "malformed" in swarm.conductor.failed


def test_a_real_log_on_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = FakeSwarm(make_run())
    with SqliteEventStore(tmp_path / "events.sqlite") as store:
        swarm.store = store  # type: ignore[assignment]
        swarm.conductor = swarm._conduct()
        for _ in range(4):
            swarm.join()
        swarm.run_until(in_step(swarm))
        real = SqliteEventStore._write
        full = True

        def refuses(self: SqliteEventStore, records: list[StoredEvent]) -> None:
            if not full:
                real(self, records)
                return
            with _storage_errors(self.path):
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(SqliteEventStore, "_write", refuses)
        swarm.settle()
        swarm.pass_time(5)
        assert str(tmp_path) in swarm.conductor.waiting_for
        assert "free some space" in swarm.conductor.waiting_for
        full = False
        swarm.finish()
        assert_undisturbed(swarm)


# ---- snapshots ---------------------------------------------------------------------------


def test_a_snapshot_that_the_coordinator_has_no_room_for_blames_nobody_and_comes_later() -> None:
    swarm = FakeSwarm(make_run(steps=6), 4)
    swarm.snapshots.full = True
    swarm.run_until(lambda: swarm.conductor.state.step == 3)
    assert "snapshot_failed" in kinds(swarm)
    assert "free some space" in lines(swarm)
    assert not swarm.snapshots.complete
    swarm.run_until(lambda: swarm.conductor.state.step == 6)
    swarm.settle()
    assert "the snapshot of step 6 waits" in swarm.conductor.waiting_for
    assert all(s.failures == 0 for s in swarm.conductor.sessions.values())
    assert len(swarm.conductor.sessions) == 4
    swarm.snapshots.full = False
    swarm.finish(within_s=700)
    assert 6 in swarm.snapshots.complete
    assert_undisturbed(swarm)


def test_a_refused_snapshot_is_asked_for_again_less_often_each_time() -> None:
    swarm = FakeSwarm(make_run(steps=2), 4)
    swarm.snapshots.full = True
    swarm.run_until(lambda: swarm.conductor.state.step == 2)
    for _ in range(1200):
        swarm.settle()
        swarm.pass_time(1)
    assert 4 <= kinds(swarm).count("snapshot_failed") <= 20


def test_a_node_whose_own_disk_is_full_trains_on_and_the_other_one_stores_the_stage() -> None:
    swarm = FakeSwarm(make_run(steps=6), 4)
    swarm.run_to_step(1)
    for stage in (0, 1):
        swarm.at(stage)[0].disk_full = True
    swarm.finish(within_s=60)
    assert "fenced" not in kinds(swarm)
    assert "failed" not in kinds(swarm)
    assert len(swarm.nodes) == 4
    assert 6 in swarm.snapshots.complete
    assert_undisturbed(swarm)


def test_a_stages_only_node_with_a_full_disk_keeps_its_place_and_is_asked_now_and_then() -> None:
    swarm = FakeSwarm(make_run(steps=6, replicas=1), 2)
    swarm.run_to_step(1)
    (node,) = swarm.at(1)
    node.disk_full = True
    swarm.run_until(lambda: swarm.conductor.state.step == 6)
    for _ in range(60):
        swarm.pass_time(1)
        swarm.settle()
    assert not swarm.conductor.ended
    assert node.done is None
    assert "free some space" in swarm.conductor.waiting_for
    asked = [c for c in node.commands_seen if c.HasField("snapshot") and c.snapshot.step == 6]
    assert 4 <= len(asked) <= 8
    node.disk_full = False
    swarm.finish()
    assert 6 in swarm.snapshots.complete
    assert "rolled_back" not in kinds(swarm)
    assert_undisturbed(swarm)
