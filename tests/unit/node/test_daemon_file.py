# SPDX-License-Identifier: Apache-2.0
"""A daemon is found through its folder, and nobody else is ever signalled."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
import pytest

from shoal.node import daemon_file
from shoal.node.daemon_file import (
    FINISH_SIGNAL,
    LOCK_FILE,
    ask_to_finish,
    is_held,
    own_record,
    read_record,
    take_request,
    write_record,
)
from shoal.node.finish import finish
from shoal.protocol.errors import HandOverError, UnreachableError


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    with (folder / LOCK_FILE).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of the kind that asks a daemon to finish, as this process gets them."""
    got: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        got.append(number)

    before = signal.signal(FINISH_SIGNAL, note)
    yield got
    signal.signal(FINISH_SIGNAL, before)


def test_the_daemon_that_holds_the_folder_is_asked(tmp_path: Path, signals: list[int]) -> None:
    record = own_record("amber-fox")
    with holding(tmp_path):
        write_record(tmp_path, record)
        assert ask_to_finish(tmp_path, 7.5) == record
    assert signals == [FINISH_SIGNAL]
    request = take_request(tmp_path, record)
    assert request is not None
    assert request.grace_s == 7.5
    assert take_request(tmp_path, record) is None, "once"


def test_nobody_is_asked_where_no_daemon_runs(tmp_path: Path, signals: list[int]) -> None:
    with pytest.raises(UnreachableError, match="no node daemon runs"):
        ask_to_finish(tmp_path, None)
    write_record(tmp_path, own_record("amber-fox"))
    (tmp_path / LOCK_FILE).touch()
    assert not is_held(tmp_path)
    with pytest.raises(UnreachableError, match="no node daemon runs"):
        ask_to_finish(tmp_path, None)
    assert signals == []


def test_a_process_that_got_the_pid_of_a_dead_daemon_is_left_alone(
    tmp_path: Path, signals: list[int]
) -> None:
    record = own_record("amber-fox")
    write_record(tmp_path, record.model_copy(update={"started_s": record.started_s - 100}))
    with holding(tmp_path), pytest.raises(UnreachableError, match="just starting or ending"):
        ask_to_finish(tmp_path, None)
    assert signals == []


@pytest.mark.skipif(not psutil.LINUX, reason="elsewhere processes keep their times")
def test_a_daemon_is_found_though_the_clock_was_set_meanwhile(
    tmp_path: Path, signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(tmp_path, own_record("amber-fox"))
    boot_s = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_s + 3600.0)
    with holding(tmp_path):
        assert ask_to_finish(tmp_path, None).name == "amber-fox"
    assert signals == [FINISH_SIGNAL]


def test_a_daemon_that_ends_in_this_moment_is_not_signalled(
    tmp_path: Path, signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(tmp_path, own_record("amber-fox"))
    held = iter([True, False])
    monkeypatch.setattr(daemon_file, "is_held", lambda folder: next(held))
    with pytest.raises(UnreachableError, match="no node daemon runs"):
        ask_to_finish(tmp_path, None)
    assert signals == []


def test_a_request_for_another_process_is_not_taken(tmp_path: Path) -> None:
    record = own_record("amber-fox")
    (tmp_path / "finish.json").write_text(
        f'{{"pid": {os.getpid()}, "started_s": 1.0, "grace_s": 5}}', encoding="utf-8"
    )
    assert take_request(tmp_path, record) is None
    (tmp_path / "finish.json").write_text("{", encoding="utf-8")
    assert take_request(tmp_path, record) is None


class Daemon:
    """Says what a daemon says, a word each time that somebody looks."""

    def __init__(self, folder: Path, *, handed_over: bool | None) -> None:
        self.folder, self.now_s, self.handed_over = folder, 0.0, handed_over
        self.looks = 0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.looks += 1
        record = own_record("amber-fox")
        update = {"doing": f"leaving {self.looks // 2}", "leave_by_s": 30.0}
        write_record(self.folder, record.model_copy(update=update))

    def is_held(self, folder: Path) -> bool:
        if self.looks < 4:
            return True
        update = {"handed_over": self.handed_over}
        write_record(folder, own_record("amber-fox").model_copy(update=update))
        return False


@pytest.mark.parametrize("handed_over", [True, False, None])
def test_finish_tells_what_the_daemon_does_and_whether_it_handed_over(
    tmp_path: Path,
    signals: list[int],
    monkeypatch: pytest.MonkeyPatch,
    handed_over: bool | None,
) -> None:
    daemon, said = Daemon(tmp_path, handed_over=handed_over), list[str]()
    write_record(tmp_path, own_record("amber-fox"))
    monkeypatch.setattr("shoal.node.finish.is_held", daemon.is_held)

    def run() -> None:
        finish(tmp_path, None, said.append, clock=lambda: daemon.now_s, sleep=daemon.sleep)

    with holding(tmp_path):
        if handed_over:
            run()
            assert said[-1] == "amber-fox has handed over and left"
        else:
            with pytest.raises(HandOverError, match="computes again") as caught:
                run()
            assert caught.value.exit_code == 12
    assert [s for s in said if s.startswith("leaving")] == ["leaving 0", "leaving 1"]


def test_finish_does_not_wait_for_ever(
    tmp_path: Path, signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(tmp_path, handed_over=True)
    write_record(tmp_path, own_record("amber-fox"))
    monkeypatch.setattr("shoal.node.finish.is_held", lambda folder: True)
    with holding(tmp_path), pytest.raises(UnreachableError, match="kill -9"):
        finish(tmp_path, None, print, clock=lambda: daemon.now_s, sleep=daemon.sleep)
    assert daemon.now_s < 61
    assert read_record(tmp_path) is not None
