# SPDX-License-Identifier: Apache-2.0
"""Sessions and snapshots over a real connection: who doesn't read, and a disk without room."""

import asyncio
import errno
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from shoal.coordinator import service as service_module
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.sessions import MAX_OUTBOX, Session
from shoal.protocol.atomic_file import storage_error
from shoal.protocol.authority import Authority
from shoal.protocol.errors import (
    CapacityError,
    CoordinatorDiskError,
    MalformedFrameError,
    StorageError,
)
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.proto import coordinator_pb2_grpc, peer_pb2
from shoal.protocol.rpc import error_from_rpc
from shoal.protocol.state_file import StateReceiver


class Books:
    """What the service asks of a conductor."""

    def __init__(self, folder: Path) -> None:
        self.sessions: dict[PeerId, Session] = {}
        self.session = Session(PeerId("peer"), "node", pb.Hello(), 0.0)
        self.can_announce = asyncio.Event()
        self.can_announce.set()
        self.over = asyncio.Event()
        self.refused: list[tuple[int, str]] = []
        self.state = SimpleNamespace(weights_digests={})
        self.snapshots = SimpleNamespace(
            receiver=lambda step, stage: StateReceiver(folder / "incoming", 1000), add=self._add
        )
        self.trouble: Exception | None = None
        is_worth = asyncio.Event()
        is_worth.set()
        self.terms = SimpleNamespace(
            num_here=0, is_worth_a_promise=is_worth, lead=lambda: pb.Lead(term=3),
            went=lambda peer_id: None,
        )  # fmt: skip

    def greet(self, peer_id: PeerId, hello: pb.Hello) -> None:
        pass

    def attach(self, peer_id: PeerId, hello: pb.Hello, promise: pb.Promise) -> Session:
        assert promise.term == 3
        return self.session

    def detach(self, session: Session, reason: str = "") -> None:
        self.over.set()

    def receive(self, session: Session, event: pb.NodeEvent) -> None:
        pass

    def expects_snapshot(self, peer_id: PeerId, step: int, stage: int) -> bool:
        return True

    def snapshot_refused(self, step: int, reason: str) -> None:
        self.refused.append((step, reason))

    def _add(self, *_: object, **__: object) -> bool:
        assert self.trouble is not None
        raise self.trouble


class Line:
    def __init__(self, books: Books, stub: Any) -> None:
        self.books = books
        self.stub = stub


@pytest.fixture
async def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    monkeypatch.setattr(service_module, "peer_id_from_context", lambda context: PeerId("peer"))
    books: Any = Books(tmp_path)
    service = CoordinatorService(
        books, Authority.load_or_create(tmp_path / "keys"), run_folder=tmp_path,
        session_address=lambda: "", discovery_addresses=list,
    )  # fmt: skip
    server = grpc.aio.server()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Line(books, coordinator_pb2_grpc.CoordinatorStub(channel))
    await server.stop(None)


async def begin(line: Line) -> Any:
    """A session until the node has promised."""
    call = line.stub.Session()
    await call.write(pb.NodeEvent(hello=pb.Hello()))
    lead = await call.read()
    await call.write(pb.NodeEvent(heartbeat=pb.Heartbeat()))
    await call.write(pb.NodeEvent(promise=pb.Promise(term=lead.lead.term)))
    return call


async def test_a_session_without_a_promise_is_refused(line: Line) -> None:
    call = line.stub.Session()
    await call.write(pb.NodeEvent(hello=pb.Hello()))
    assert (await call.read()).lead.term == 3
    await call.write(pb.NodeEvent(ready=pb.Ready()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert isinstance(error_from_rpc(caught.value), MalformedFrameError)


async def test_commands_arrive_in_order_and_none_ends_the_session(line: Line) -> None:
    call = await begin(line)
    for reason in ("a", "b"):
        line.books.session.send(wait=pb.Wait(reason=reason))
    line.books.session.outbox.put_nowait(None)
    assert [(await call.read()).wait.reason for _ in range(2)] == ["a", "b"]
    assert await call.read() is grpc.aio.EOF
    await line.books.over.wait()


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_node_that_reads_no_commands_is_cut_off_and_told_so(line: Line) -> None:
    call = await begin(line)
    session = line.books.session
    while not session.is_deaf:
        session.send(wait=pb.Wait(reason="x" * 20_000))
        await asyncio.sleep(0)
    assert session.outbox.qsize() == MAX_OUTBOX
    session.cut()
    await line.books.over.wait()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert isinstance(error_from_rpc(caught.value), CapacityError)


async def test_nothing_is_sent_while_the_log_can_not_be_written(line: Line) -> None:
    line.books.can_announce.clear()
    call = await begin(line)
    line.books.session.send(wait=pb.Wait(reason="not yet"))
    reading = asyncio.ensure_future(call.read())
    await asyncio.wait({reading}, timeout=0.2)
    assert line.books.session.outbox.empty()
    assert not reading.done()
    line.books.can_announce.set()
    assert (await reading).wait.reason == "not yet"
    call.cancel()


# ---- snapshots ---------------------------------------------------------------------------


def upload(data: bytes) -> list[pb.SnapshotChunk]:
    chunk = peer_pb2.StateChunk(
        data=data, offset=0, total_bytes=len(data), sha256=hashlib.sha256(data).digest()
    )
    first = peer_pb2.StateRequest(run_id="run", stage=1, step=4)
    return [pb.SnapshotChunk(snapshot=first), pb.SnapshotChunk(chunk=chunk)]


async def refusal(line: Line) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await line.stub.StoreSnapshot(iter(upload(b"state")))
    return error_from_rpc(caught.value)


async def test_a_snapshot_without_room_is_refused_in_the_coordinators_name(line: Line) -> None:
    full = storage_error(Path("/run/x"), OSError(errno.ENOSPC, "No space left on device"))
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    line.books.trouble = full
    error = await refusal(line)
    assert isinstance(error, CoordinatorDiskError)
    assert "the coordinator's disk: /run/x: No space left" in str(error)
    ((step, reason),) = line.books.refused
    assert step == 4
    assert "free some space" in reason


async def test_no_room_while_the_bytes_come_in_is_the_coordinators_trouble_too(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: StateReceiver, chunk: peer_pb2.StateChunk) -> None:
        cause = OSError(errno.ENOSPC, "No space left on device")
        raise storage_error(self.path, cause) from cause

    monkeypatch.setattr(StateReceiver, "feed", full)
    assert isinstance(await refusal(line), CoordinatorDiskError)
    assert line.books.refused


async def test_a_damaged_snapshot_is_the_nodes_trouble(line: Line) -> None:
    line.books.trouble = StorageError("incoming: damaged.")
    error = await refusal(line)
    assert type(error) is StorageError
    assert not line.books.refused
