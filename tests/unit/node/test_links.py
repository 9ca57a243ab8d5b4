# SPDX-License-Identifier: Apache-2.0
"""Outgoing streams against real servers that answer, refuse, stall, die and come back."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from shoal.node import links as links_module
from shoal.node.links import INCARNATION_METADATA, PeerLinks
from shoal.protocol.errors import (
    ChecksumError,
    FencedError,
    MalformedFrameError,
    NonFiniteError,
    ProtocolError,
    TruncatedStreamError,
    WrongLeaseError,
    WrongStepError,
)
from shoal.protocol.fault_injector import NO_FAULTS, Faults, InjectedFaults
from shoal.protocol.faults import Action, Fault, Moment
from shoal.protocol.ids import Incarnation, PeerId
from shoal.protocol.proto import peer_pb2, peer_pb2_grpc, types_pb2
from shoal.protocol.rpc import MAX_MESSAGE_BYTES, Credentials
from shoal.protocol.wire import ReceivedTensor, receive_tensors

from .loopback import Loopback, member

ME, PEER = PeerId("m" * 26), PeerId("p" * 26)
INC = Incarnation(5)

Answer = Callable[[ReceivedTensor], peer_pb2.PushAck | Awaitable[peer_pb2.PushAck]]


def accept(received: ReceivedTensor) -> peer_pb2.PushAck:
    return peer_pb2.PushAck(sequence=received.header.sequence, status=peer_pb2.PUSH_STATUS_ACCEPTED)


def refuse_with(error: type[ProtocolError], detail: str = "because") -> Answer:
    return lambda received: peer_pb2.PushAck(
        sequence=received.header.sequence,
        status=peer_pb2.PUSH_STATUS_REFUSED,
        error=error.__name__,
        detail=detail,
    )


class Receiver(peer_pb2_grpc.PeerServicer):
    """Notes what arrives, and answers as it is told."""

    def __init__(self, answer: Answer = accept) -> None:
        self.answer = answer
        self.got: list[tuple[str, int]] = []
        """(method, microbatch)"""
        self.payloads: list[bytes] = []
        self.incarnations: list[str] = []
        self.arrival = asyncio.Event()
        self.open_streams = 0
        self.no_streams = asyncio.Event()

    async def _stream(self, method: str, messages: Any, context: Any) -> AsyncGenerator[Any, None]:
        self.open_streams += 1
        self.incarnations.append(dict(context.invocation_metadata())[INCARNATION_METADATA])
        try:
            async for tensor in receive_tensors(messages, lambda header: header.payload_bytes):
                assert isinstance(tensor, ReceivedTensor)
                self.got.append((method, tensor.header.key.microbatch))
                self.payloads.append(bytes(tensor.payload))
                self.arrival.set()
                ack = self.answer(tensor)
                yield ack if isinstance(ack, peer_pb2.PushAck) else await ack
        except TruncatedStreamError:
            pass
        finally:
            self.open_streams -= 1
            if not self.open_streams:
                self.no_streams.set()

    async def Push(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(self._stream("Push", request_iterator, context)) as acks:
            async for ack in acks:
                yield ack

    async def Reduce(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(self._stream("Reduce", request_iterator, context)) as acks:
            async for ack in acks:
                yield ack

    async def FetchState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield

    async def Ping(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def arrived(self, count: int) -> None:
        while len(self.got) < count:
            self.arrival.clear()
            await asyncio.wait_for(self.arrival.wait(), 20)


def stalled(received: ReceivedTensor) -> Awaitable[peer_pb2.PushAck]:
    return asyncio.get_running_loop().create_future()


class Watched(Credentials):
    """Remembers the channels that it made."""

    channels: list[grpc.aio.Channel]

    def channel(self, address: str, peer_id: PeerId) -> grpc.aio.Channel:
        self.channels.append(made := super().channel(address, peer_id))
        return made


class Sender:
    """`PeerLinks` and what they reported."""

    def __init__(self, loopback: Loopback, faults: Faults = NO_FAULTS) -> None:
        self.refused: list[ProtocolError] = []
        self.unreachable: list[str] = []
        self.complaint = asyncio.Event()
        made = loopback.credentials(ME)
        self.credentials = Watched.__new__(Watched)
        self.credentials.__dict__.update(made.__dict__)
        self.credentials.channels = []
        self.links = PeerLinks(
            self.credentials,
            incarnation=Incarnation(3),
            on_refused=lambda who, key, error: self.refused.append(error),
            on_unreachable=self._on_unreachable,
            faults=faults,
        )

    def _on_unreachable(self, who: types_pb2.Member, reason: str) -> None:
        self.unreachable.append(reason)
        self.complaint.set()

    def push(
        self,
        port: int,
        microbatch: int = 0,
        payload: bytes = b"payload",
        *,
        direction: types_pb2.Direction.ValueType = types_pb2.DIRECTION_FORWARD,
        peer: PeerId = PEER,
    ) -> "asyncio.Future[None]":
        header = types_pb2.TensorHeader(
            key=types_pb2.TensorKey(microbatch=microbatch, direction=direction)
        )
        return self.links.push(member(INC, peer, port=port), header, payload)

    def assert_nothing_is_left(self) -> None:
        assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("push to")]
        assert not [t for t in asyncio.all_tasks() if "_TensorStream" in repr(t)]
        assert all(
            channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
            for channel in self.credentials.channels
        )


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "backoff", lambda failures, rng, **limits: 0.02)


@pytest.fixture
async def loopback(tmp_path: Path) -> AsyncIterator[Loopback]:
    made = Loopback(tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def sender(loopback: Loopback) -> AsyncIterator[Sender]:
    made = Sender(loopback)
    yield made
    await asyncio.wait_for(made.links.close(), 20)
    made.assert_nothing_is_left()


async def done(*futures: "asyncio.Future[None]") -> None:
    await asyncio.wait_for(asyncio.gather(*futures), 20)


# ---- delivery ----------------------------------------------------------------------------


async def test_tensor_beyond_the_message_limit_passes(loopback: Loopback, sender: Sender) -> None:
    receiver = Receiver()
    _, port = await loopback.serve(receiver, PEER)
    payload = bytes(range(256)) * (20 * 2**20 // 256) + b"odd"
    assert len(payload) > 2 * MAX_MESSAGE_BYTES
    await done(sender.push(port, payload=payload), sender.push(port, 1, b""))
    assert receiver.payloads == [payload, b""]
    assert sender.links.bytes_sent == len(payload)


async def test_tensors_of_one_method_share_a_stream_and_keep_their_order(
    loopback: Loopback, sender: Sender
) -> None:
    receiver = Receiver()
    _, port = await loopback.serve(receiver, PEER)
    await done(*(sender.push(port, i) for i in range(20)))
    assert receiver.got == [("Push", i) for i in range(20)]
    assert receiver.incarnations == ["3"]


async def test_slices_do_not_wait_behind_boundary_tensors(
    loopback: Loopback, sender: Sender
) -> None:
    receiver = Receiver(lambda t: stalled(t) if t.header.key.direction == 1 else accept(t))
    _, port = await loopback.serve(receiver, PEER)
    boundary = sender.push(port)
    await receiver.arrived(1)
    await done(
        sender.push(port, 1, direction=types_pb2.DIRECTION_REDUCE_PARTIAL),
        sender.push(port, 2, direction=types_pb2.DIRECTION_REDUCE_TOTAL),
    )
    assert not boundary.done()
    assert receiver.got == [("Push", 0), ("Reduce", 1), ("Reduce", 2)]


# ---- broken connections ------------------------------------------------------------------


async def test_stream_resumes_after_the_server_died_and_resends_only_what_was_not_acknowledged(
    loopback: Loopback, sender: Sender
) -> None:
    first = Receiver(lambda t: accept(t) if t.header.key.microbatch == 0 else stalled(t))
    server, port = await loopback.serve(first, PEER)
    await done(sender.push(port, 0))
    rest = [sender.push(port, i) for i in (1, 2, 3)]
    await first.arrived(2)
    await server.stop(None)
    sender.complaint.clear()
    await asyncio.wait_for(sender.complaint.wait(), 20)  # it tries, and says so
    second = Receiver()
    await loopback.serve(second, PEER, port=port)
    await done(*rest)
    assert second.got == [("Push", 1), ("Push", 2), ("Push", 3)]
    assert second.payloads == [b"payload"] * 3


async def test_one_break_is_no_complaint_and_an_idle_stream_does_not_reconnect(
    loopback: Loopback, sender: Sender
) -> None:
    first = Receiver()
    server, port = await loopback.serve(first, PEER)
    await done(sender.push(port, 0))
    await server.stop(None)
    await asyncio.wait_for(first.no_streams.wait(), 20)
    second = Receiver()
    await loopback.serve(second, PEER, port=port)
    assert second.incarnations == []
    await done(sender.push(port, 1))
    assert second.got == [("Push", 1)]
    assert sender.unreachable == []


async def test_nobody_at_the_address_is_reported_until_somebody_is(
    loopback: Loopback, sender: Sender
) -> None:
    server, port = await loopback.serve(Receiver(), PEER)
    await server.stop(None)
    waiting = sender.push(port)
    await asyncio.wait_for(sender.complaint.wait(), 20)
    receiver = Receiver()
    await loopback.serve(receiver, PEER, port=port)
    await done(waiting)
    assert all(reason.isprintable() and len(reason) <= 500 for reason in sender.unreachable)


async def test_malformed_address_is_unreachable_not_a_dead_stream(sender: Sender) -> None:
    waiting = sender.links.push(
        types_pb2.Member(incarnation=INC, peer_id=PEER, address="unix:1:x"),
        types_pb2.TensorHeader(),
        b"",
    )
    await asyncio.wait_for(sender.complaint.wait(), 20)
    assert "can't call peer" in sender.unreachable[0]
    assert not waiting.done()


async def test_nothing_is_sent_to_whoever_is_not_the_pinned_peer(
    loopback: Loopback, sender: Sender
) -> None:
    receiver = Receiver()
    _, port = await loopback.serve(receiver, PeerId("q" * 26))
    waiting = sender.push(port)
    await asyncio.wait_for(sender.complaint.wait(), 30)
    assert not waiting.done()
    assert receiver.got == []


# ---- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [WrongStepError, WrongLeaseError, FencedError])
async def test_stale_tensor_is_settled_without_a_word(
    loopback: Loopback, sender: Sender, error: type[ProtocolError]
) -> None:
    receiver = Receiver(refuse_with(error))
    _, port = await loopback.serve(receiver, PEER)
    await done(sender.push(port))
    assert sender.refused == []
    assert len(receiver.got) == 1


@pytest.mark.parametrize("error", [ChecksumError, TruncatedStreamError, MalformedFrameError])
async def test_damaged_tensor_is_sent_again_three_times_at_most(
    loopback: Loopback, sender: Sender, error: type[ProtocolError]
) -> None:
    receiver = Receiver(refuse_with(error))
    _, port = await loopback.serve(receiver, PEER)
    with pytest.raises(error, match="because"):
        await done(sender.push(port))
    assert len(receiver.got) == 4
    assert [type(e) for e in sender.refused] == [error]


async def test_damaged_tensor_that_arrives_well_the_second_time_is_no_complaint(
    loopback: Loopback, sender: Sender
) -> None:
    answers = iter([refuse_with(ChecksumError), accept])
    receiver = Receiver(lambda tensor: next(answers)(tensor))
    _, port = await loopback.serve(receiver, PEER)
    await done(sender.push(port))
    assert sender.refused == []
    assert receiver.payloads == [b"payload"] * 2


async def test_other_refusals_are_reported_at_once_and_the_stream_goes_on(
    loopback: Loopback, sender: Sender
) -> None:
    answers = iter([refuse_with(NonFiniteError, "NaN\x1b[31m" + "x" * 5000), accept])
    receiver = Receiver(lambda tensor: next(answers)(tensor))
    _, port = await loopback.serve(receiver, PEER)
    bad, good = sender.push(port, 0), sender.push(port, 1)
    with pytest.raises(NonFiniteError):
        await done(bad)
    await done(good)
    [error] = sender.refused
    assert isinstance(error, NonFiniteError)
    assert str(error).isprintable()
    assert len(str(error)) <= 500
    assert len(receiver.got) == 2


@pytest.mark.parametrize("name", ["", "KeyError", "ConfigError"])
async def test_refusal_with_a_name_that_is_no_protocol_error_is_a_plain_one(
    loopback: Loopback, sender: Sender, name: str
) -> None:
    receiver = Receiver(
        lambda t: peer_pb2.PushAck(
            sequence=t.header.sequence, status=peer_pb2.PUSH_STATUS_REFUSED, error=name
        )
    )
    _, port = await loopback.serve(receiver, PEER)
    with pytest.raises(ProtocolError):
        await done(sender.push(port))


async def test_acknowledgement_of_something_never_sent_is_ignored(
    loopback: Loopback, sender: Sender
) -> None:
    answers = iter([lambda t: peer_pb2.PushAck(sequence=2**40), accept])
    receiver = Receiver(lambda tensor: next(answers)(tensor))
    _, port = await loopback.serve(receiver, PEER)
    first, second = sender.push(port, 0), sender.push(port, 1)
    await done(second)
    assert not first.done()


# ---- ends --------------------------------------------------------------------------------


async def test_dropping_a_peer_cancels_what_is_pending_and_ends_its_streams(
    loopback: Loopback, sender: Sender
) -> None:
    receiver = Receiver(stalled)
    _, port = await loopback.serve(receiver, PEER)
    pending = [
        sender.push(port, 0),
        sender.push(port, 1),
        sender.push(port, 2, direction=types_pb2.DIRECTION_REDUCE_TOTAL),
    ]
    await receiver.arrived(2)
    await asyncio.wait_for(sender.links.drop(INC), 20)
    assert all(future.cancelled() for future in pending)
    await asyncio.wait_for(receiver.no_streams.wait(), 20)
    sender.assert_nothing_is_left()
    await sender.links.drop(INC)


async def test_dropping_and_closing_at_once_do_not_disturb_each_other(
    loopback: Loopback, sender: Sender
) -> None:
    receiver = Receiver(stalled)
    _, port = await loopback.serve(receiver, PEER)
    pending = [
        sender.push(port, 0),
        sender.push(port, 1, direction=types_pb2.DIRECTION_REDUCE_TOTAL),
    ]
    await receiver.arrived(2)
    await asyncio.gather(sender.links.drop(INC), sender.links.close(), sender.links.drop(INC))
    assert all(future.cancelled() for future in pending)


async def test_other_peers_are_not_touched_by_a_drop(loopback: Loopback, sender: Sender) -> None:
    receiver = Receiver()
    _, port = await loopback.serve(receiver, PEER)
    await done(sender.push(port, 0))
    await sender.links.drop(Incarnation(99))
    await done(sender.push(port, 1))
    assert receiver.incarnations == ["3"]


async def test_closing_while_nobody_answers_is_quick(loopback: Loopback, sender: Sender) -> None:
    server, port = await loopback.serve(Receiver(), PEER)
    await server.stop(None)
    waiting = sender.push(port)
    await asyncio.wait_for(sender.complaint.wait(), 20)
    await asyncio.wait_for(sender.links.close(), 20)
    assert waiting.cancelled()


async def test_push_after_the_end_opens_nothing(loopback: Loopback, sender: Sender) -> None:
    await sender.links.close()
    assert sender.push(1).cancelled()
    assert sender.credentials.channels == []


async def test_tensor_that_was_given_up_is_not_sent_again(
    loopback: Loopback, sender: Sender
) -> None:
    server, port = await loopback.serve(Receiver(stalled), PEER)
    await server.stop(None)
    given_up, kept = sender.push(port, 0), sender.push(port, 1)
    given_up.cancel()
    receiver = Receiver()
    await loopback.serve(receiver, PEER, port=port)
    await done(kept)
    assert receiver.got == [("Push", 1)]


# ---- faults on order ---------------------------------------------------------------------


def order(path: Path, action: Action, **fields: object) -> None:
    values = {"id": action, "step": 1, "moment": "prepared", "action": action, **fields}
    with path.open("a", encoding="utf-8") as file:
        file.write(Fault.model_validate(values).model_dump_json() + "\n")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_tensors_wait_for_a_link_that_is_broken_on_order(
    loopback: Loopback, tmp_path: Path
) -> None:
    receiver, clock, file = Receiver(), Clock(), tmp_path / "faults"
    _, port = await loopback.serve(receiver, PEER)
    faults = InjectedFaults(file, clock=clock)
    sender = Sender(loopback, faults)
    try:
        await done(sender.push(port))
        order(file, Action.DROP_LINK, seconds=2)
        faults.reach(Moment.PREPARED, 1)
        await asyncio.wait_for(receiver.no_streams.wait(), 20)
        late = sender.push(port, 1)
        await asyncio.wait_for(sender.complaint.wait(), 20)
        assert "broken on order" in sender.unreachable[0]
        assert len(receiver.got) == 1
        clock.now_s = 2
        await done(late)
        assert receiver.got == [("Push", 0), ("Push", 1)]
    finally:
        await asyncio.wait_for(sender.links.close(), 20)
    sender.assert_nothing_is_left()


async def test_a_link_that_breaks_while_a_tensor_is_delayed_loses_nothing(
    loopback: Loopback, tmp_path: Path
) -> None:
    receiver, clock, file = Receiver(), Clock(), tmp_path / "faults"
    _, port = await loopback.serve(receiver, PEER)
    faults = InjectedFaults(file, clock=clock)
    sender = Sender(loopback, faults)
    try:
        await done(sender.push(port))
        order(file, Action.DELAY_LINK, seconds=3600, delay_s=3600)
        faults.reach(Moment.PREPARED, 1)
        late = sender.push(port, 1)
        order(file, Action.DROP_LINK, seconds=2)
        faults.reach(Moment.PREPARED, 1)
        await asyncio.wait_for(sender.complaint.wait(), 20)
        assert not late.done()
        clock.now_s = 3600  # both are over
        await done(late)
    finally:
        await asyncio.wait_for(sender.links.close(), 20)
