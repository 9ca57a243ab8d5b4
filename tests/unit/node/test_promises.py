# SPDX-License-Identifier: Apache-2.0
"""A node keeps its promises over restarts, and the newest records for whoever leads next."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.node import promises
from shoal.node.promises import Promises
from shoal.protocol import disk
from shoal.protocol.authority import Authority
from shoal.protocol.errors import (
    MalformedFrameError,
    OversizedStreamError,
    ProtocolError,
    RecordError,
    StorageError,
    TermError,
)
from shoal.protocol.ids import RunId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.step_record import sign_step_record

RUN = RunId("run-00000000")
ADDRESS = "127.0.0.1:7"


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.load_or_create(folder / "keys")
        self.node = self.open()

    def open(self, run_id: RunId = RUN) -> Promises:
        node = Promises(self.folder / "node", run_id, self.authority.fingerprint)
        node.trust(self.authority.certificate_der)
        return node

    def sealed(self, commits: int, term: int = 1, **more: object) -> pb.SignedRecord:
        head = {"term": term, "commits": commits, "step": commits, "loss": 1.0, **more}
        content = json.dumps(head).encode()
        signature = sign_step_record(content, RUN, self.authority.sign)
        return pb.SignedRecord(record=content, signature=signature)

    def commit(self, commits: int, term: int = 1) -> pb.Commit:
        sealed = self.sealed(commits, term)
        return pb.Commit(term=term, record=sealed.record, signature=sealed.signature)

    def ask(
        self, term: int, who: str = "a", commits: int = 0, record: pb.SignedRecord | None = None
    ) -> pb.Promise:
        lead = pb.Lead(term=term, coordinator_id=who, commits=commits, record=record)
        return self.node.answer(lead, ADDRESS)


def numbers(promise: pb.Promise) -> list[tuple[int, int]]:
    heads = [json.loads(signed.record) for signed in promise.records]
    return [(head["commits"], head["term"]) for head in heads]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_higher_term_is_promised_and_a_lower_one_refused(desk: Desk) -> None:
    assert not desk.ask(3).refused
    refusal = desk.ask(2, "b")
    assert (refusal.refused, refusal.term, refusal.coordinator_id) == (True, 3, "a")
    assert refusal.address == ADDRESS
    assert not desk.ask(4, "b").refused


def test_one_term_is_promised_to_one_coordinator_only(desk: Desk) -> None:
    desk.ask(3)
    assert desk.ask(3, "b").refused
    assert not desk.ask(3, "a").refused


def test_a_promise_outlives_the_process(desk: Desk) -> None:
    desk.ask(5)
    desk.node = desk.open()
    assert desk.ask(4, "b").refused
    assert desk.ask(5, "b").refused


def test_another_run_is_promised_separately(desk: Desk) -> None:
    desk.ask(5)
    desk.node = desk.open(RunId("run-11111111"))
    assert not desk.ask(1).refused


def test_a_promise_that_the_disk_does_not_take_is_not_given(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.ask(2)

    def full(path: Path) -> None:
        raise StorageError("full")

    monkeypatch.setattr(promises, "AtomicFile", full)
    with pytest.raises(StorageError):
        desk.ask(3, "b")
    assert desk.node.term == 2
    assert not desk.ask(2).refused


def test_a_damaged_promise_is_an_error_and_never_broken(desk: Desk) -> None:
    desk.ask(2)
    (path,) = (desk.folder / "node" / "promises").glob("*.json")
    path.write_text("{", encoding="utf-8")
    with pytest.raises(StorageError, match="damaged"):
        desk.open()


def test_records_are_kept_and_offered_from_the_leaders_own_on(desk: Desk) -> None:
    desk.ask(1)
    for commits in range(1, 5):
        desk.node.keep(desk.commit(commits))
    promise = desk.ask(2, "b", commits=3)
    assert numbers(promise) == [(3, 1), (4, 1)]
    assert (promise.commits, promise.record_term) == (4, 1)


def test_the_newest_record_outlives_the_process(desk: Desk) -> None:
    desk.ask(1)
    desk.node.keep(desk.commit(1))
    desk.node.keep(desk.commit(2))
    desk.node = desk.open()
    assert numbers(desk.ask(2, "b")) == [(2, 1)]


def test_a_torn_record_file_is_none(desk: Desk) -> None:
    desk.ask(1)
    desk.node.keep(desk.commit(1))
    (path,) = (desk.folder / "node" / "promises").glob("*.record.json")
    path.write_bytes(path.read_bytes()[:-9])
    desk.node = desk.open()
    assert numbers(desk.ask(2, "b")) == []


def test_no_more_records_are_kept_than_the_bound(desk: Desk) -> None:
    desk.ask(1)
    for commits in range(1, promises.MAX_RECORDS + 10):
        desk.node.keep(desk.commit(commits))
    assert len(desk.ask(1).records) == promises.MAX_RECORDS


def test_a_commit_of_another_term_is_refused(desk: Desk) -> None:
    desk.ask(2)
    with pytest.raises(TermError, match="has promised term 2"):
        desk.node.keep(desk.commit(1, term=1))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda c: c.MergeFrom(pb.Commit(signature=b"x" * 64)), RecordError),
        (lambda c: c.MergeFrom(pb.Commit(record=c.record + b" ")), RecordError),
    ],
)
def test_a_record_that_the_authority_has_not_signed_is_refused(
    desk: Desk, spoil: Callable[[pb.Commit], None], error: type[ProtocolError]
) -> None:
    desk.ask(1)
    commit = desk.commit(1)
    spoil(commit)
    with pytest.raises(error):
        desk.node.keep(commit)
    assert numbers(desk.ask(1)) == []


def test_a_signed_text_without_a_head_is_no_record(desk: Desk) -> None:
    desk.ask(1)
    signature = sign_step_record(b"[]", RUN, desk.authority.sign)
    with pytest.raises(MalformedFrameError):
        desk.node.keep(pb.Commit(term=1, record=b"[]", signature=signature))


def test_a_claimants_record_replaces_only_one_of_a_lower_term(desk: Desk) -> None:
    desk.ask(1)
    desk.node.keep(desk.commit(1))
    desk.node.keep(desk.commit(2))
    # It is behind: what this node has beyond stays, and is offered.
    assert numbers(desk.ask(2, "b", commits=1, record=desk.sealed(1, 1))) == [(1, 1), (2, 1)]
    # It has the same step from a later term.
    assert numbers(desk.ask(3, "c", commits=2, record=desk.sealed(2, 2))) == [(2, 2)]
    # And from an earlier one.
    assert numbers(desk.ask(4, "d", commits=2, record=desk.sealed(2, 1))) == [(2, 2)]


def test_standbys_are_remembered_and_nonsense_is_not(desk: Desk) -> None:
    desk.node.know_standbys(
        pb.Standbys(
            standbys=[
                pb.Standby(admission="10.0.0.7:70", session="10.0.0.7:71"),
                pb.Standby(admission="unix:/tmp/x", session="10.0.0.8:71"),
            ]
        )
    )
    again = desk.open()
    assert again.admission_addresses == ["10.0.0.7:70"]
    assert again.session_addresses == ["10.0.0.7:71"]


def test_another_runs_authority_is_not_trusted(desk: Desk, tmp_path: Path) -> None:
    other = Authority.load_or_create(tmp_path / "other")
    with pytest.raises(ProtocolError):
        desk.node.trust(other.certificate_der)


def test_an_id_that_no_coordinator_has_is_refused_before_it_is_written(desk: Desk) -> None:
    with pytest.raises(OversizedStreamError):
        desk.ask(1, "x" * 201)
    assert desk.open().term == 0


def test_a_record_for_which_the_disk_has_no_room_stays_in_memory_and_leaves_no_file(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.ask(1)
    monkeypatch.setattr(disk, "_full_until_s", float("inf"))
    desk.node.keep(desk.commit(1))
    assert numbers(desk.ask(1)) == [(1, 1)]
    assert [p.suffixes for p in (desk.folder / "node" / "promises").iterdir()] == [[".json"]]
