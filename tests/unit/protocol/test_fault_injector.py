# SPDX-License-Identifier: Apache-2.0
"""The injector in this process, and in one that it kills, ends and stops."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.protocol import disk
from shoal.protocol.atomic_file import AtomicFile
from shoal.protocol.errors import StorageError, UnreachableError
from shoal.protocol.fault_injector import (
    NO_FAULTS,
    InjectedFaults,
    faults_from,
    read_fired,
)
from shoal.protocol.faults import Action, Fault, Moment
from shoal.protocol.ids import PeerId, display_name

FOX, OWL = PeerId("f" * 26), PeerId("o" * 26)


def order(path: Path, action: Action, id: str = "a", step: int = 1, **fields: object) -> None:
    values = {"id": id, "step": step, "moment": "prepared", "action": action, **fields}
    with path.open("a", encoding="utf-8") as file:
        file.write(Fault.model_validate(values).model_dump_json() + "\n")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "faults"
    disk.fill(0)


def test_without_a_file_nothing_ever_happens() -> None:
    assert faults_from(None) is NO_FAULTS
    NO_FAULTS.reach(Moment.PREPARED, 1)
    NO_FAULTS.check_link(FOX)
    assert not NO_FAULTS.take_poison()
    assert NO_FAULTS.delay_s(FOX) == 0


def test_the_file_may_come_later_and_grow(path: Path) -> None:
    faults = faults_from(path)
    faults.reach(Moment.PREPARED, 1)
    order(path, Action.POISON)
    faults.reach(Moment.PREPARED, 2)
    assert faults.take_poison()
    order(path, Action.POISON, "b")
    faults.reach(Moment.PREPARED, 3)
    assert [(f.id, f.step, f.pid) for f in read_fired(path)] == [
        ("a", 2, os.getpid()),
        ("b", 3, os.getpid()),
    ]


def test_a_half_written_line_waits_for_its_end(path: Path) -> None:
    faults = InjectedFaults(path)
    order(path, Action.POISON)
    whole = path.read_bytes()
    path.write_bytes(whole[:30])
    faults.reach(Moment.PREPARED, 1)
    path.write_bytes(whole)
    faults.reach(Moment.PREPARED, 1)
    assert faults.take_poison()


def test_a_wrong_line_does_not_hide_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text('{"id": "wrong"}\n', encoding="utf-8")
    order(path, Action.POISON)
    faults = InjectedFaults(path)
    faults.reach(Moment.PREPARED, 1)
    assert faults.take_poison()
    assert "wrong" in caplog.text


def test_what_has_fired_never_fires_again_after_a_restart(path: Path) -> None:
    order(path, Action.POISON)
    InjectedFaults(path).reach(Moment.PREPARED, 1)
    again = InjectedFaults(path)
    again.reach(Moment.PREPARED, 2)
    assert not again.take_poison()


def test_one_poison_spoils_one_gradient(path: Path) -> None:
    faults = InjectedFaults(path)
    order(path, Action.POISON)
    faults.reach(Moment.PREPARED, 1)
    assert faults.take_poison()
    assert not faults.take_poison()


# ---- links -------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [display_name(FOX), FOX[:8], ""])
async def test_a_dropped_link_is_broken_for_its_time_and_only_it(path: Path, named: str) -> None:
    clock = Clock()
    faults = InjectedFaults(path, clock=clock)
    drops = asyncio.create_task(faults.link_drops(FOX))
    await asyncio.sleep(0)
    order(path, Action.DROP_LINK, seconds=2, peer=named)
    faults.reach(Moment.PREPARED, 1)
    await drops
    with pytest.raises(UnreachableError, match=display_name(FOX)):
        faults.check_link(FOX)
    faults.check_link(OWL)
    clock.now_s += 2
    faults.check_link(FOX)


def test_a_delayed_link_is_late_for_its_time(path: Path) -> None:
    clock = Clock()
    faults = InjectedFaults(path, clock=clock)
    order(path, Action.DELAY_LINK, seconds=2, delay_s=0.3, peer=FOX)
    faults.reach(Moment.PREPARED, 1)
    assert (faults.delay_s(FOX), faults.delay_s(OWL)) == (0.3, 0)
    faults.check_link(FOX)
    clock.now_s += 2
    assert faults.delay_s(FOX) == 0


# ---- the disk ----------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "state"
    with AtomicFile(target) as file:
        file.write(b"old")
    started = AtomicFile(target)
    order(path, Action.FULL_DISK, seconds=3600)
    InjectedFaults(path).reach(Moment.PREPARED, 1)
    with pytest.raises(StorageError, match=r"No space left.*free some space"):
        AtomicFile(target)
    with pytest.raises(StorageError, match="No space left"):
        started.commit()
    disk.fill(0)
    assert target.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["faults", "faults.fired", "state"]


# ---- the process -------------------------------------------------------------------------

_PROGRAM = """
import sys
from pathlib import Path
from shoal.protocol.fault_injector import InjectedFaults
from shoal.protocol.faults import Moment
InjectedFaults(Path(sys.argv[1])).reach(Moment.PREPARED, 1)
print("alive", flush=True)
"""


def start(path: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(path)], stdout=subprocess.PIPE, start_new_session=True
    )


@pytest.mark.parametrize(
    ("action", "number"), [(Action.KILL, signal.SIGKILL), (Action.TERM, signal.SIGTERM)]
)
def test_a_process_ends_itself_once(path: Path, action: Action, number: int) -> None:
    order(path, action)
    process = start(path)
    assert process.communicate(timeout=60) == (b"", None)
    assert process.returncode == -number
    assert [f.id for f in read_fired(path)] == ["a"]
    again = start(path)
    assert again.communicate(timeout=60)[0] == b"alive\n"


def test_a_process_stops_and_goes_on(path: Path) -> None:
    order(path, Action.STOP, seconds=0.5)
    process = start(path)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    (helper,) = psutil.Process(process.pid).children()
    assert os.getsid(helper.pid) == helper.pid
    assert process.communicate(timeout=60)[0] == b"alive\n"
    assert process.returncode == 0
