# SPDX-License-Identifier: Apache-2.0
"""A standby's copy of a run: whole files, a log that it can read, and one that stays bounded."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.coordinator.data.shards import shard_path
from shoal.coordinator.follow import CHUNK_BYTES, RUN_FILES
from shoal.coordinator.sqlite_store import SqliteEventStore
from shoal.coordinator.standby_copy import StandbyCopy
from shoal.coordinator.state import StepOpened
from shoal.coordinator.store import StoredEvent
from shoal.protocol.authority import Authority
from shoal.protocol.errors import StorageError
from shoal.protocol.join_link import JoinLink
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.spec import ShardRef

from .fake_run import make_run
from .fake_swarm import FakeSwarm

TOKENS = bytes(2000)


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[StandbyCopy]:
    """It has the run's files and an empty log."""
    folder = tmp_path / "standby"
    run = make_run(steps=230, snapshot_every=10, microbatches=2)
    shard = ShardRef(sha256=hashlib.sha256(TOKENS).hexdigest(), num_tokens=1000)
    data = run.data.model_copy(update={"train": (shard,), "validation": ()})
    authority = Authority.load_or_create(folder / "keys")
    for name in RUN_FILES:
        if not (folder / name).exists():
            (folder / name).write_bytes(b"content")
    (folder / "run.json").write_bytes(run.model_copy(update={"data": data}).to_json())
    SqliteEventStore(folder / "events.sqlite").close()
    link = JoinLink(
        addresses=("127.0.0.1:1",), run_id=run.run_id, fingerprint=authority.fingerprint,
        token="x", expires_s=int(time.time() + 60),
    )  # fmt: skip
    with StandbyCopy(folder, link) as made:
        yield made


def log_of(records: list[StoredEvent]) -> pb.LogEvents:
    return pb.LogEvents(
        events=[pb.LogEvent(sequence=r.sequence, kind=r.kind, payload=r.payload) for r in records]
    )


def opened(step: int) -> bytes:
    return StepOpened(time_s=0, step=step, attempt=step).model_dump_json().encode()


def test_a_file_that_broke_off_is_begun_anew_with_the_next_stream(copy: StandbyCopy) -> None:
    copy.begin()
    copy.take(pb.RunFile(name="tokenizer.json", content=b"x" * CHUNK_BYTES))
    copy.begin()
    copy.take(pb.RunFile(name="tokenizer.json", content=b"whole", last=True))
    assert (copy.folder / "tokenizer.json").read_bytes() == b"whole"


@pytest.mark.parametrize("payload", [b'{"kind": "step_opened"}', b"no JSON"])
@pytest.mark.parametrize("kind", ["step_opened", "of the future"])
def test_an_event_that_cant_be_read_is_not_taken(
    copy: StandbyCopy, kind: str, payload: bytes
) -> None:
    copy.append(log_of([StoredEvent(1, "step_opened", opened(1))]))
    bad = log_of([StoredEvent(2, "step_opened", opened(2)), StoredEvent(3, kind, payload)])
    with pytest.raises(StorageError):
        copy.append(bad)
    assert copy.newest_event()[0] == 1
    assert copy.state.attempt == 1
    copy.append(log_of([StoredEvent(2, "step_opened", opened(5))]))
    assert copy.state.attempt == 5


def test_a_copy_knows_what_a_conductor_has_written_to_its_log(copy: StandbyCopy) -> None:
    assert copy.store is not None
    copy.store.append("step_opened", StepOpened(time_s=0, step=1, attempt=7).model_dump())
    copy.refresh()
    assert copy.state.attempt == 7


def test_a_log_that_is_followed_for_long_stays_bounded(
    copy: StandbyCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = FakeSwarm(copy.run, 4)
    # As if it had got those too.
    monkeypatch.setattr(copy, "snapshots", swarm.snapshots.complete_steps)
    taken = 0
    for step in range(10, 231, 10):
        swarm.run_until(lambda: swarm.conductor.state.step >= step, within_s=600)  # noqa: B023
        if step < 200:
            swarm.start_again(swarm.nodes[max(swarm.nodes)])
        fresh = [r for r in swarm.disk if r.sequence > taken]
        assert fresh[0].sequence == taken + 1
        copy.append(log_of(fresh))
        taken = fresh[-1].sequence
    state = copy.state
    assert state.step == 230
    assert len(state.records) < 150
    assert copy.store is not None
    assert copy.store.history.totals.num_steps + len(state.records) == 230
    assert copy.newest_event()[0] == swarm.disk[-1].sequence
    assert state.last_record == swarm.conductor.state.last_record
    named = {who for r in state.records.values() for stage in r.contributions for who in stage}
    assert state.peers.keys() >= named
    assert len(state.peers) < 20, "of those that were fenced, only who is in a record"


def test_a_shard_is_read_until_it_was_found_intact(
    copy: StandbyCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(copy.missing_shards()) == 1
    path = shard_path(copy.folder, copy.run.data.train[0].sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(TOKENS)
    assert copy.is_whole
    monkeypatch.setattr("shoal.coordinator.standby_copy.shard_is_intact", None)
    assert copy.is_whole
