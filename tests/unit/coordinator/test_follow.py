# SPDX-License-Identifier: Apache-2.0
"""Who may follow, what a standby is given, and what it takes."""

import asyncio
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.coordinator import follow, standby_link
from shoal.coordinator.follow import FollowDesk, event_digest
from shoal.coordinator.rivals import require_own_log
from shoal.coordinator.sqlite_store import SqliteEventStore
from shoal.coordinator.standby_copy import StandbyCopy
from shoal.coordinator.state import RunState, StandbyRegistered, TermOpened, apply
from shoal.coordinator.store import StoredEvent
from shoal.protocol.authority import Authority
from shoal.protocol.errors import (
    AdmissionError,
    CapacityError,
    MalformedFrameError,
    ShoalError,
    StorageError,
    TermError,
    VersionError,
)
from shoal.protocol.ids import RunId
from shoal.protocol.join_link import JoinLink
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.version import PROTOCOL_VERSION

RUN = RunId("run-00000000")


class World:
    """A leader's folder and log, and a conductor that only counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.authority = Authority.load_or_create(self.folder / "keys")
        for name in follow.RUN_FILES:
            path = self.folder / name
            if not path.exists():
                path.write_bytes(f"content of {name}".encode())
        self.store = SqliteEventStore(self.folder / "events.sqlite")
        self.registered: list[StandbyRegistered] = []
        self.conductor: Any = SimpleNamespace(
            run=SimpleNamespace(run_id=RUN), followers={}, say_changed=lambda: None,
            register_standby=self.registered.append, deposed=None, ended=False, can_write=True,
            waiting_for="", terms=SimpleNamespace(term=3, log_id="leader"),
            state=SimpleNamespace(step=5),
            snapshots=SimpleNamespace(complete_steps=lambda: [4]),
        )  # fmt: skip
        self.desk = FollowDesk(
            self.conductor, self.authority, self.store, folder=self.folder,
            session_address=lambda: "127.0.0.1:2",
        )  # fmt: skip

    def token(self, role: Any = "standby", lasts_s: float = 60) -> str:
        return self.authority.issue_token(RUN, int(time.time() + lasts_s), role)

    def request(self, **changes: Any) -> pb.FollowRequest:
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION, "run_id": RUN, "token": self.token(),
            "standby_id": "a" * 32, "has_files": True,
            "addresses": pb.Standby(admission="127.0.0.1:3", session="127.0.0.1:4"),
        }  # fmt: skip
        return pb.FollowRequest(**{**fields, **changes})

    def append(self, count: int) -> None:
        for number in range(count):
            self.store.append("resumed", {"kind": "resumed", "time_s": float(number)})


@pytest.fixture
def world(tmp_path: Path) -> Any:
    made = World(tmp_path)
    yield made
    made.store.close()


async def until_beat(events: AsyncIterator[pb.FollowEvent]) -> list[pb.FollowEvent]:
    found = []
    async for event in events:
        found.append(event)
        if event.HasField("beat"):
            break
    return found


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"protocol_version": 1}, VersionError),
        ({"run_id": "other-00000000"}, AdmissionError),
        ({"token": "x"}, AdmissionError),
        ({"standby_id": "../../etc"}, MalformedFrameError),
        (
            {"addresses": pb.Standby(admission="unix:/x", session="127.0.0.1:4")},
            MalformedFrameError,
        ),
    ],
)
async def test_a_stranger_is_refused(
    world: World, changes: dict[str, Any], error: type[ShoalError]
) -> None:
    with pytest.raises(error):
        await anext(aiter(world.desk.follow(world.request(**changes))))
    assert not world.registered


async def test_a_join_links_token_does_not_make_a_standby(world: World) -> None:
    with pytest.raises(AdmissionError):
        await anext(aiter(world.desk.follow(world.request(token=world.token("join")))))
    with pytest.raises(AdmissionError, match="expired"):
        await anext(aiter(world.desk.follow(world.request(token=world.token(lasts_s=-9)))))


def test_a_standbys_token_does_not_admit_a_node(world: World) -> None:
    with pytest.raises(AdmissionError):
        world.authority.check_token(world.token(), RUN, time.time())


async def test_a_run_has_a_bounded_number_of_standbys(world: World) -> None:
    world.conductor.followers.update({str(i): None for i in range(follow.MAX_STANDBYS)})
    with pytest.raises(CapacityError):
        await anext(aiter(world.desk.follow(world.request())))


async def test_a_log_that_is_a_beginning_is_continued_and_events_come_as_they_are_written(
    world: World,
) -> None:
    world.append(5)
    third = world.store.durable(2)[0]
    request = world.request(last_sequence=3, last_digest=event_digest(third))
    stream = aiter(world.desk.follow(request))
    begin, log, _ = await until_beat(stream)
    assert (begin.begin.term, begin.begin.anew) == (3, False)
    assert [event.sequence for event in log.log.events] == [4, 5]
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    world.append(1)
    event = await waiting
    assert [e.sequence for e in event.log.events] == [6]
    await stream.aclose()  # type: ignore[attr-defined]
    assert not world.conductor.followers


async def test_a_log_that_has_parted_is_replaced_whole(world: World, tmp_path: Path) -> None:
    world.append(5)
    request = world.request(last_sequence=3, last_digest=b"another", has_files=False)
    events = await until_beat(aiter(world.desk.follow(request)))
    assert events[0].begin.anew
    with StandbyCopy(tmp_path / "standby", link(world)) as copy:
        for event in events:
            if event.HasField("file"):
                copy.take(event.file)
        assert copy.has_files
        assert copy.store is not None
        assert [e.payload["time_s"] for e in copy.store.read()] == [0.0, 1.0, 2.0, 3.0, 4.0]
        key = copy.folder / "keys" / "authority.pem"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert copy.authority.fingerprint == world.authority.fingerprint
        with pytest.raises(StorageError, match="not 6"):
            copy.store.adopt([StoredEvent(8, "resumed", b"{}")])


async def test_the_end_of_the_run_ends_the_standby_in_peace(world: World) -> None:
    stream = aiter(world.desk.follow(world.request()))
    await until_beat(stream)
    world.conductor.ended = True
    world.append(1)
    assert [event.end.reason async for event in stream][-1] == "the run is finished"


def link(world: World) -> JoinLink:
    return JoinLink(
        addresses=("127.0.0.1:1",), run_id=RUN, fingerprint=world.authority.fingerprint,
        token=world.token(), expires_s=int(time.time() + 60),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["../keys/authority.pem", "events.sqlite-wal", "", "keys"])
def test_only_a_runs_files_are_taken(world: World, tmp_path: Path, name: str) -> None:
    with StandbyCopy(tmp_path / "standby", link(world)) as copy, pytest.raises(MalformedFrameError):
        copy.take(pb.RunFile(name=name, content=b"x", last=True))


def test_a_standby_link_is_a_private_file_that_can_be_read_back(
    world: World, tmp_path: Path
) -> None:
    standby_link.write(tmp_path, link(world))
    path = tmp_path / standby_link.LINK_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert standby_link.read(str(path)) == link(world)
    assert standby_link.read(path.read_text(encoding="utf-8").strip()) == link(world)
    with pytest.raises(AdmissionError, match="no standby link"):
        standby_link.parse(str(link(world)))


def test_a_copy_of_a_log_that_decided_alone_is_told_what_it_takes() -> None:
    state = apply(TermOpened(time_s=0, term=1, log_id="home"), RunState())
    require_own_log(state, "home", Path("run"))
    with pytest.raises(TermError, match="--force-term"):
        require_own_log(state, "copy", Path("run"))
    registered = StandbyRegistered(time_s=0, log_id="s", admission="h:1", session="h:2")
    require_own_log(apply(registered, state), "copy", Path("run"))  # a majority decides
