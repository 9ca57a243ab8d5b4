# SPDX-License-Identifier: Apache-2.0
"""The peer service behind a real mutual-TLS server: what strangers and faulty peers may do."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from shoal.compression.codec import CodecContext
from shoal.compression.registry import parse_boundary
from shoal.node import peer_service
from shoal.node.inbox import BoundaryInbox, BoundaryTensor
from shoal.node.links import INCARNATION_METADATA, PeerLinks
from shoal.node.peer_service import PeerService
from shoal.node.reduce_inbox import ReduceInbox
from shoal.node.state_pins import PinnedState
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import (
    CapacityError,
    ChecksumError,
    FencedError,
    ImpossibleLeaseError,
    ImpossibleStepError,
    MalformedFrameError,
    NonFiniteError,
    OversizedStreamError,
    ProtocolError,
    ShoalError,
    TruncatedStreamError,
    UnknownPeerError,
    UnreachableError,
    WrongLeaseError,
    WrongRunError,
    WrongShapeError,
    WrongStepError,
)
from shoal.protocol.fault_injector import Faults
from shoal.protocol.ids import Incarnation, PeerId, RunId
from shoal.protocol.proto import coordinator_pb2, peer_pb2, peer_pb2_grpc, types_pb2
from shoal.protocol.rpc import error_from_rpc
from shoal.protocol.spec import DataManifest, ResolvedRun, RunSpec
from shoal.protocol.state_chunks import describe
from shoal.protocol.wire import checksum, encode_frame, frames, open_tensor_stream

from .loopback import Loopback, member

RUN_ID = RunId("tiny-0a1b2c3d")
HERE, UP, TWIN, OUTSIDER = (PeerId(c * 26) for c in "hutx")
SHAPE = (2, 3, 8)
NUMEL = 48
STEP = 5
BOUNDARY = parse_boundary("bf16")
STATE = bytes(range(256)) * 600 + b"end"


def resolved_run() -> ResolvedRun:
    spec = RunSpec.model_validate(
        {
            "model": {
                "dim": 8, "num_heads": 2, "num_layers": 2, "seq_len": 3, "vocab_size": 256
            },
            "batch": {"microbatches": 4, "microbatch_size": 2},
            "pipeline": {"stages": 2, "cuts": [1]},
        }
    )  # fmt: skip
    data = DataManifest(vocab_size=256, token_bytes=2, train=(), validation=(), tokenizer_sha256="")
    return ResolvedRun(run_id=RUN_ID, spec=spec, data=data)


class Node:
    """Incarnation 1 at stage 1 of 2, with step 5 open. Incarnation 2 stands upstream of it,
    incarnation 3 is its replica."""

    def __init__(self, folder: Path) -> None:
        self.swarm = SwarmView()
        run = resolved_run()
        self.boundary: BoundaryInbox | None = BoundaryInbox(
            run, run.stage(1), BOUNDARY, self.swarm, torch.device("cpu"), STEP - 1
        )
        self.reduction: ReduceInbox | None = ReduceInbox(RUN_ID, 1, 6, STEP - 1)
        self.boundary.open_step(STEP, 0, self.deliver)
        self.got: list[BoundaryTensor] = []
        self.bad: list[tuple[PeerId, str]] = []
        self.folder = folder
        self.state_asked = asyncio.Event()
        self.state_ready = asyncio.Event()
        self.state_ready.set()
        (folder / "state").write_bytes(STATE)
        self.service = PeerService(
            RUN_ID,
            self.swarm,
            self,
            lambda who, error, key: self.bad.append((who, type(error).__name__)),
        )

    async def plan(self, *extra: types_pb2.Member, fenced: Iterable[int] = ()) -> None:
        members = [member(1, HERE, stage=1), member(2, UP), member(3, TWIN, stage=1), *extra]
        await self.swarm.update(coordinator_pb2.Plan(epoch=1, members=members, fenced=fenced))

    def deliver(self, received: BoundaryTensor) -> bool:
        self.got.append(received)
        return len({t.microbatch for t in self.got}) == len(self.got)

    @property
    def boundary_inbox(self) -> BoundaryInbox | None:
        return self.boundary

    @property
    def reduce_inbox(self) -> ReduceInbox | None:
        return self.reduction

    @property
    def committed_step(self) -> int:
        return STEP - 1

    async def pinned(
        self, stage: int, step: int, part: types_pb2.StatePart.ValueType
    ) -> PinnedState:
        if stage != 1:
            raise WrongLeaseError(f"not stage {stage}")
        self.state_asked.set()
        await self.state_ready.wait()
        path = self.folder / "state"
        return PinnedState(path, describe(path), urgent=False)


class Swarm:
    def __init__(self, loopback: Loopback, node: Node, port: int) -> None:
        self.loopback = loopback
        self.node = node
        self.port = port

    def channel(self, peer_id: PeerId) -> grpc.aio.Channel:
        return self.loopback.credentials(peer_id).channel(f"127.0.0.1:{self.port}", HERE)

    async def send(
        self,
        messages: Iterable[bytes],
        *,
        peer: PeerId = UP,
        method: str = "Push",
        incarnation: int = 2,
    ) -> tuple[list[peer_pb2.PushAck], ShoalError | None]:
        """The answers to a whole stream, and the error that ended it, if any."""
        acks: list[peer_pb2.PushAck] = []
        async with asyncio.timeout(20), self.channel(peer) as channel:
            metadata = ((INCARNATION_METADATA, str(incarnation)),)
            call = open_tensor_stream(channel, method, metadata)
            try:
                for message in messages:
                    await call.write(message)
                await call.done_writing()
                async for ack in call:
                    acks.append(ack)
            except asyncio.InvalidStateError:  # refused before everything was written
                pass
            except grpc.aio.AioRpcError as error:
                return acks, error_from_rpc(error)
            code = await call.code()
            details = await call.details()
            if code is not grpc.StatusCode.OK:
                empty = grpc.aio.Metadata()
                return acks, error_from_rpc(grpc.aio.AioRpcError(code, empty, empty, details))
        return acks, None


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    loopback = Loopback(tmp_path / "authority")
    node = Node(tmp_path)
    await node.plan()
    _, port = await loopback.serve(node.service, HERE)
    yield Swarm(loopback, node, port)
    await loopback.close()
    assert not node.service._open_streams
    assert not node.service._donations


def payload_of(values: torch.Tensor) -> bytes:
    context = CodecContext(run_seed=0, step=STEP, microbatch=0, boundary=0, leg="forward")
    return bytes(BOUNDARY.forward.encode(values, context))


GOOD = payload_of(torch.ones(SHAPE))


def header(payload: bytes = GOOD, *, sequence: int = 1, **changes: Any) -> types_pb2.TensorHeader:
    made = types_pb2.TensorHeader(
        key=types_pb2.TensorKey(
            run_id=RUN_ID, step=STEP, microbatch=0, stage=1, incarnation=2,
            direction=types_pb2.DIRECTION_FORWARD,
        ),
        codec="bf16", dtype=types_pb2.DTYPE_FLOAT32, shape=changes.pop("shape", SHAPE),
        payload_bytes=len(payload), checksum=checksum(payload), sequence=sequence,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(made.key if hasattr(made.key, name) else made, name, value)
    return made


def boundary_tensor(payload: bytes = GOOD, **changes: Any) -> list[bytes]:
    return list(frames(header(payload, **changes), payload))


def slice_of(numel: int = 3, *, sequence: int = 1, **changes: Any) -> list[bytes]:
    """Incarnation 3's partial sums of slice 0."""
    key = {
        "incarnation": 3, "direction": types_pb2.DIRECTION_REDUCE_PARTIAL, "round": 1
    }  # fmt: skip
    payload = changes.pop("payload", bytes(8 * numel))
    made = header(
        payload, shape=[numel], dtype=types_pb2.DTYPE_INT64, sequence=sequence,
        **({"codec": "raw"} | key | changes),
    )  # fmt: skip
    return list(frames(made, payload))


def statuses(acks: list[peer_pb2.PushAck]) -> list[tuple[int, str]]:
    """(sequence, status or error) of every answer."""
    names = {peer_pb2.PUSH_STATUS_ACCEPTED: "accepted", peer_pb2.PUSH_STATUS_DUPLICATE: "duplicate"}
    return [(ack.sequence, names.get(ack.status, ack.error)) for ack in acks]


# ---- boundary tensors --------------------------------------------------------------------


async def test_good_tensor_is_delivered_and_its_duplicate_recognised(swarm: Swarm) -> None:
    acks, error = await swarm.send([*boundary_tensor(), *boundary_tensor(sequence=2)])
    assert error is None
    assert statuses(acks) == [(1, "accepted"), (2, "duplicate")]
    assert torch.equal(swarm.node.got[0].tensor, torch.ones(SHAPE))
    assert swarm.node.bad == []
    assert swarm.node.service.bytes_received == 2 * len(GOOD)


async def test_large_tensor_is_decoded_off_the_event_loop(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_service, "_DECODE_INLINE_BYTES", 0)
    acks, _ = await swarm.send([*boundary_tensor()])
    assert statuses(acks) == [(1, "accepted")]


NAN = b"\xc0\x7f" * NUMEL


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (boundary_tensor(NAN), NonFiniteError),
        (boundary_tensor(shape=(2, 3, 9)), WrongShapeError),
        (boundary_tensor(b"short"), OversizedStreamError),
        (boundary_tensor(run_id="other"), WrongRunError),
        (boundary_tensor(checksum=b"?" * 16), ChecksumError),
        (boundary_tensor(direction=0), MalformedFrameError),
        (boundary_tensor(incarnation=3), UnknownPeerError),  # its neighbour's
        (boundary_tensor(step=STEP + 2), ImpossibleStepError),
        (boundary_tensor(stage=0), ImpossibleLeaseError),
        (boundary_tensor(microbatch=10**6), ImpossibleLeaseError),
    ],
    ids=[
        "NaN",
        "shape",
        "length",
        "run",
        "checksum",
        "direction",
        "incarnation",
        "step",
        "stage",
        "microbatch",
    ],
)
async def test_faulty_tensor_is_refused_by_name_its_sender_blamed_and_the_stream_goes_on(
    swarm: Swarm, bad: list[bytes], error: type[ProtocolError]
) -> None:
    acks, ended = await swarm.send([*bad, *boundary_tensor(sequence=2)])
    assert ended is None
    assert statuses(acks) == [(1, error.__name__), (2, "accepted")]
    assert acks[0].detail
    assert swarm.node.bad == [(UP, error.__name__)]
    assert len(swarm.node.got) == 1


@pytest.mark.parametrize(
    ("stale", "error"),
    [
        (boundary_tensor(step=STEP - 1), WrongStepError),
        (boundary_tensor(incarnation=9), FencedError),
    ],
    ids=["old step", "fenced"],
)
async def test_stale_tensor_is_refused_but_nobody_is_blamed(
    swarm: Swarm, stale: list[bytes], error: type[ProtocolError]
) -> None:
    await swarm.node.plan(fenced=[9])
    acks, ended = await swarm.send([*stale, *boundary_tensor(sequence=2)])
    assert ended is None
    assert statuses(acks) == [(1, error.__name__), (2, "accepted")]
    assert swarm.node.bad == []


BIG = bytes(2**20 + 1)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([encode_frame(header(), GOOD[:10])], TruncatedStreamError),
        ([encode_frame(header(), GOOD[:10]), *boundary_tensor()], TruncatedStreamError),
        ([encode_frame(header(), GOOD + b"more")], OversizedStreamError),
        ([encode_frame(None, BIG)], OversizedStreamError),
        ([encode_frame(None, GOOD)], MalformedFrameError),
        ([b"\xff\xff"], MalformedFrameError),
    ],
    ids=["truncated", "header in mid-tensor", "oversized", "oversized chunk", "no header", "junk"],
)
async def test_unreadable_stream_ends_with_its_name_and_its_sender_is_blamed(
    swarm: Swarm, messages: list[bytes], error: type[ProtocolError]
) -> None:
    acks, ended = await swarm.send(messages)
    assert type(ended) is error
    assert acks == []
    assert swarm.node.bad == [(UP, error.__name__)]
    assert statuses((await swarm.send(boundary_tensor()))[0]) == [(1, "accepted")]


async def test_huge_announcement_is_skipped_without_memory(swarm: Swarm) -> None:
    _, ended = await swarm.send([encode_frame(header(payload_bytes=2**40), b"x" * 100)])
    assert isinstance(ended, TruncatedStreamError)


async def test_node_without_a_stage_refuses_without_blame(swarm: Swarm) -> None:
    swarm.node.boundary = swarm.node.reduction = None
    acks, _ = await swarm.send(boundary_tensor())
    assert statuses(acks) == [(1, "WrongLeaseError")]
    acks, _ = await swarm.send(slice_of(), peer=TWIN, method="Reduce", incarnation=3)
    assert statuses(acks) == [(1, "WrongLeaseError")]
    assert swarm.node.bad == []


async def test_tensor_admitted_for_one_assignment_is_not_delivered_to_the_next(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted = swarm.node.boundary
    assert admitted is not None
    decode = admitted.decode

    def decode_while_the_stage_changes(received: Any) -> BoundaryTensor:
        run = resolved_run()
        swarm.node.boundary = BoundaryInbox(
            run, run.stage(1), BOUNDARY, swarm.node.swarm, torch.device("cpu"), STEP - 1
        )
        return decode(received)

    monkeypatch.setattr(admitted, "decode", decode_while_the_stage_changes)
    acks, _ = await swarm.send(boundary_tensor())
    assert statuses(acks) == [(1, "WrongLeaseError")]
    assert swarm.node.got == []


# ---- who speaks --------------------------------------------------------------------------


async def test_stranger_to_the_run_does_not_get_in(swarm: Swarm, tmp_path: Path) -> None:
    stranger = Loopback(tmp_path / "another-authority")
    channel = stranger.credentials(UP).channel(f"127.0.0.1:{swarm.port}", HERE)
    async with channel:
        stub: peer_pb2_grpc.PeerAsyncStub = peer_pb2_grpc.PeerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Ping(peer_pb2.PingRequest(), timeout=20)
    assert isinstance(error_from_rpc(caught.value), UnreachableError)


async def test_admitted_peer_that_is_not_in_the_plan_speaks_for_nobody(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_service, "PLAN_LAG_S", 0.05)
    acks, _ = await swarm.send(boundary_tensor(), peer=OUTSIDER, incarnation=2)
    assert statuses(acks) == [(1, "UnknownPeerError")]
    assert swarm.node.bad == [(OUTSIDER, "UnknownPeerError")]
    acks, _ = await swarm.send(boundary_tensor(incarnation=8), peer=OUTSIDER, incarnation=8)
    assert statuses(acks) == [(1, "FencedError")]
    assert swarm.node.got == []


async def test_tensor_of_a_peer_waits_for_the_plan_that_names_it(swarm: Swarm) -> None:
    sending = asyncio.create_task(
        swarm.send(boundary_tensor(incarnation=4), peer=OUTSIDER, incarnation=4)
    )
    while not swarm.node.service._open_streams:  # noqa: ASYNC110  # the service has no event for it
        await asyncio.sleep(0.001)
    await swarm.node.plan(member(4, OUTSIDER))
    acks, _ = await sending
    assert statuses(acks) == [(1, "accepted")]


async def test_one_peer_may_not_hold_streams_without_end(swarm: Swarm) -> None:
    async with swarm.channel(UP) as channel:
        calls = []
        for sequence in range(1, peer_service._MAX_STREAMS + 1):
            calls.append(open_tensor_stream(channel, "Push", ((INCARNATION_METADATA, "2"),)))
            for message in boundary_tensor(sequence=sequence):
                await calls[-1].write(message)
            await calls[-1].read()
        _, ended = await swarm.send(boundary_tensor())
        assert isinstance(ended, CapacityError)
        acks, _ = await swarm.send(boundary_tensor(), peer=TWIN)
        assert statuses(acks) == [(1, "UnknownPeerError")]  # others still get an answer
        await calls[0].done_writing()
        assert await calls[0].read() is grpc.aio.EOF
        acks, ended = await swarm.send(boundary_tensor())
        assert ended is None
        for call in calls:
            call.cancel()
    while swarm.node.service._open_streams:  # noqa: ASYNC110  # as above
        await asyncio.sleep(0.001)


# ---- slices ------------------------------------------------------------------------------


def open_round(node: Node) -> ReduceInbox:
    inbox = node.reduction
    assert inbox is not None
    inbox.open_round((STEP, 0, 1), {(types_pb2.DIRECTION_REDUCE_PARTIAL, 0, Incarnation(3)): 3})
    return inbox


async def test_slice_of_the_manifest_is_taken_once(swarm: Swarm) -> None:
    inbox = open_round(swarm.node)
    acks, _ = await swarm.send(
        [*slice_of(), *slice_of(sequence=2)], peer=TWIN, method="Reduce", incarnation=3
    )
    assert statuses(acks) == [(1, "accepted"), (2, "duplicate")]
    got = await inbox.get((types_pb2.DIRECTION_REDUCE_PARTIAL, 0, Incarnation(3)))
    assert got.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("bad", "peer", "error", "blamed"),
    [
        (slice_of(2), TWIN, "WrongShapeError", True),
        (slice_of(microbatch=1), TWIN, "ReduceMismatchError", True),
        (slice_of(), UP, "UnknownPeerError", True),
        (slice_of(incarnation=2, stage=0), UP, "WrongLeaseError", False),
        (slice_of(incarnation=2), UP, "ImpossibleLeaseError", True),
        (slice_of(round=0), TWIN, "WrongStepError", False),
        (slice_of(direction=types_pb2.DIRECTION_FORWARD), TWIN, "MalformedFrameError", True),
        (slice_of(checksum=b"?" * 16), TWIN, "ChecksumError", True),
        (slice_of(codec="zip"), TWIN, "WrongCodecError", True),
        (slice_of(codec="pack64"), TWIN, "OversizedStreamError", True),
        (slice_of(codec="pack64", payload=b"\x01\x00"), TWIN, "CodecError", True),
    ],
)
async def test_bad_slice_is_refused_and_the_stream_goes_on(
    swarm: Swarm, bad: list[bytes], peer: PeerId, error: str, blamed: bool
) -> None:
    open_round(swarm.node)
    good = slice_of(sequence=2) if peer == TWIN else []
    acks, ended = await swarm.send([*bad, *good], peer=peer, method="Reduce", incarnation=3)
    assert ended is None
    assert statuses(acks) == [(1, error), *([(2, "accepted")] if good else [])]
    assert swarm.node.bad == ([(peer, error)] if blamed else [])


async def test_slices_pass_from_links_to_the_inbox(swarm: Swarm) -> None:
    inbox = open_round(swarm.node)
    links = PeerLinks(
        swarm.loopback.credentials(TWIN),
        incarnation=Incarnation(3),
        on_refused=lambda who, key, error: pytest.fail(str(error)),
        on_unreachable=lambda who, reason: pytest.fail(reason),
    )
    made = header(b"", shape=[3], codec="raw", dtype=types_pb2.DTYPE_INT64, incarnation=3,
                  direction=types_pb2.DIRECTION_REDUCE_PARTIAL, round=1)  # fmt: skip
    payload = torch.arange(3).numpy().tobytes()
    try:
        receiver = member(1, HERE, port=swarm.port, stage=1)
        await asyncio.wait_for(links.push(receiver, made, payload), 20)
    finally:
        await links.close()
    got = await inbox.get((types_pb2.DIRECTION_REDUCE_PARTIAL, 0, Incarnation(3)))
    assert got.tolist() == [0, 1, 2]
    while swarm.node.service._open_streams:  # noqa: ASYNC110  # as above
        await asyncio.sleep(0.001)


async def test_sender_that_hangs_up_while_its_slice_waits_leaves_nothing_behind(
    swarm: Swarm,
) -> None:
    async with swarm.channel(TWIN) as channel:
        call = open_tensor_stream(channel, "Reduce", ((INCARNATION_METADATA, "3"),))
        for message in slice_of():
            await call.write(message)
        while not swarm.node.service._open_streams:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.001)
        call.cancel()
    while swarm.node.service._open_streams:  # noqa: ASYNC110  # as above
        await asyncio.sleep(0.001)
    assert swarm.node.bad == []


@pytest.mark.parametrize("breaks_after", [0, 1])
async def test_nothing_comes_in_over_a_link_that_is_broken_on_order(
    swarm: Swarm, breaks_after: int
) -> None:
    class Breaking(Faults):
        asked = 0

        def check_link(self, peer: PeerId) -> None:
            self.asked += peer == UP
            if peer == UP and self.asked > breaks_after:
                raise UnreachableError("broken on order")

    swarm.node.service._faults = Breaking()
    acks, ended = await swarm.send(boundary_tensor())
    assert (acks, type(ended)) == ([], UnreachableError)
    assert swarm.node.got == []
    assert swarm.node.bad == []
    open_round(swarm.node)
    acks, ended = await swarm.send(slice_of(), peer=TWIN, method="Reduce", incarnation=3)
    assert (statuses(acks), ended) == ([(1, "accepted")], None)


# ---- state and liveness ------------------------------------------------------------------


def request(*chunks: int, stage: int = 1, run_id: str = RUN_ID) -> peer_pb2.StateRequest:
    return peer_pb2.StateRequest(run_id=run_id, stage=stage, step=4, chunks=chunks)


async def fetch(swarm: Swarm, asked: peer_pb2.StateRequest) -> list[peer_pb2.StateChunk]:
    async with swarm.channel(OUTSIDER) as channel:
        stub: peer_pb2_grpc.PeerAsyncStub = peer_pb2_grpc.PeerStub(channel)
        try:
            return [c async for c in stub.FetchState(asked, timeout=20)]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


async def test_the_chunks_asked_for_come_in_that_order(swarm: Swarm) -> None:
    async with swarm.channel(OUTSIDER) as channel:
        stub: peer_pb2_grpc.PeerAsyncStub = peer_pb2_grpc.PeerStub(channel)
        described = await stub.DescribeState(request(), timeout=20)
    size = described.chunk_bytes
    assert described.total_bytes == len(STATE)
    got = await fetch(swarm, request(2, 0))
    assert [c.offset for c in got] == [2 * size, 0]
    assert [c.data for c in got] == [STATE[2 * size : 3 * size], STATE[:size]]


async def test_state_of_another_run_or_stage_is_refused(swarm: Swarm) -> None:
    with pytest.raises(WrongRunError):
        await fetch(swarm, request(0, run_id="other"))
    with pytest.raises(WrongLeaseError):
        await fetch(swarm, request(0, stage=0))


@pytest.mark.parametrize("chunks", [[], [99], [0] * 65])
async def test_chunks_that_are_not_there_or_too_many_are_refused(
    swarm: Swarm, chunks: list[int]
) -> None:
    with pytest.raises(MalformedFrameError):
        await fetch(swarm, request(*chunks))


async def test_one_peer_has_few_requests_for_state_at_a_time(swarm: Swarm) -> None:
    limit = peer_service._MAX_DONATIONS
    swarm.node.state_ready.clear()
    first = [asyncio.create_task(fetch(swarm, request(0))) for _ in range(limit)]
    while sum(swarm.node.service._donations.values()) < limit:  # noqa: ASYNC110  # as above
        await asyncio.sleep(0.001)
    with pytest.raises(CapacityError, match=f"{limit} requests for state"):
        await fetch(swarm, request(0))
    swarm.node.state_ready.set()
    await asyncio.gather(*first)
    await fetch(swarm, request(0))


async def test_ping_echoes_a_bounded_nonce_and_the_step(swarm: Swarm) -> None:
    async with swarm.channel(OUTSIDER) as channel:
        stub: peer_pb2_grpc.PeerAsyncStub = peer_pb2_grpc.PeerStub(channel)
        reply = await stub.Ping(peer_pb2.PingRequest(nonce=b"n" * 100), timeout=20)
    assert reply == peer_pb2.PingReply(nonce=b"n" * 64, step=STEP - 1)
