# SPDX-License-Identifier: Apache-2.0
"""What a standby makes of a leader's stream, and which ports it keeps for itself."""

import io
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from shoal.coordinator.ports import ReservedPorts, wanted_ports
from shoal.coordinator.run_folder import Live
from shoal.coordinator.serving import LaunchConfig
from shoal.coordinator.standby import Standby
from shoal.coordinator.standby_copy import StandbyCopy
from shoal.coordinator.state import TermOpened
from shoal.coordinator.store import StoredEvent
from shoal.protocol.errors import CapacityError, MalformedFrameError, TermError, UnreachableError
from shoal.protocol.join_link import JoinLink
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.terminal import Terminal

from .test_standby_copy import copy, log_of, opened

__all__ = ["copy"]

LEADER = "127.0.0.1:1"


@pytest.fixture
def standby(copy: StandbyCopy, tmp_path: Path) -> Iterator[Standby]:
    link = JoinLink(
        addresses=(LEADER,), run_id=copy.run.run_id, fingerprint=copy.authority.fingerprint,
        token="x", expires_s=int(time.time() + 60),
    )  # fmt: skip
    config = LaunchConfig(folder=copy.folder, discovery=False)
    made = Standby(copy, link, config, None, Terminal(Console(file=io.StringIO())))
    yield made
    made._ports.release()


async def stream(*events: pb.FollowEvent) -> AsyncIterator[pb.FollowEvent]:
    for event in events:
        yield event


def begin(term: int) -> pb.FollowEvent:
    return pb.FollowEvent(begin=pb.FollowBegin(term=term, session_address="127.0.0.1:2"))


def piece(content: bytes, *, last: bool) -> pb.FollowEvent:
    return pb.FollowEvent(file=pb.RunFile(name="tokenizer.json", content=content, last=last))


async def test_a_leader_is_followed_until_it_says_that_the_run_is_over(
    standby: Standby, copy: StandbyCopy
) -> None:
    events = stream(
        begin(1),
        pb.FollowEvent(log=log_of([StoredEvent(1, "step_opened", opened(1))])),
        pb.FollowEvent(beat=pb.FollowBeat(step=3, snapshots=[10, 20, 30])),
        pb.FollowEvent(end=pb.FollowEnd(reason="the run is finished")),
    )
    assert await standby._take_all(events, LEADER) == "the run is finished"
    assert copy.state.attempt == 1
    assert "step 0 of 3" in standby.status_line()
    assert standby._bulk.wanted_snapshots == (20, 30)
    assert standby._bulk.leader == "127.0.0.1:2"


async def test_a_stream_that_breaks_off_in_a_file_leaves_nothing_of_it(
    standby: Standby, copy: StandbyCopy
) -> None:
    with pytest.raises(UnreachableError, match="ended the stream"):
        await standby._take_all(stream(begin(1), piece(b"half of ", last=False)), LEADER)
    again = stream(begin(1), piece(b"whole", last=True), pb.FollowEvent(end=pb.FollowEnd()))
    await standby._take_all(again, LEADER)
    assert (copy.folder / "tokenizer.json").read_bytes() == b"whole"


async def test_a_leader_of_a_lower_term_is_not_followed(
    standby: Standby, copy: StandbyCopy
) -> None:
    event = TermOpened(time_s=0, term=5, log_id="home").model_dump_json().encode()
    copy.append(log_of([StoredEvent(1, "term_opened", event)]))
    with pytest.raises(TermError, match="has been replaced"):
        await standby._take_all(stream(begin(4)), LEADER)
    with pytest.raises(MalformedFrameError, match="unexpected"):
        await standby._take_all(stream(begin(5), pb.FollowEvent()), LEADER)


async def test_what_can_not_be_copied_shows(standby: Standby) -> None:
    standby._bulk.trouble = "the disk is full"
    assert "not copied yet: the disk is full" in standby.status_line()


def test_the_ports_of_last_time_are_tried_before_any() -> None:
    live = Live(run_id="r", pid=1, dashboard="", admission="h:7000", session="h:7001", link="")
    assert wanted_ports(0, live) == [(7000, 7001), (0, 0)]
    assert wanted_ports(9000, live) == [(9000, 9001)]
    assert wanted_ports(0, None) == [(0, 0)]


def test_reserved_ports_are_nobody_elses_and_do_not_answer() -> None:
    ports = ReservedPorts("127.0.0.1", "127.0.0.1", [(0, 0)])
    try:
        address = ports.addresses().admission
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with socket.socket() as busy:
            busy.bind(("127.0.0.1", 0))
            busy.listen()
            taken = busy.getsockname()[1]
            with pytest.raises(CapacityError, match=str(taken)):
                ReservedPorts("127.0.0.1", "127.0.0.1", [(taken, 0)])
            other = ReservedPorts("127.0.0.1", "127.0.0.1", [(taken, 0), (0, 0)])
            other.release()
    finally:
        ports.release()
