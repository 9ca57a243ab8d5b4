# SPDX-License-Identifier: Apache-2.0
"""Framing of tensors: held against protobuf itself, and against whatever a stranger may send."""

import gc
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol import wire
from shoal.protocol.errors import (
    ChecksumError,
    MalformedFrameError,
    OversizedStreamError,
    ProtocolError,
    TruncatedStreamError,
    WrongShapeError,
)
from shoal.protocol.proto import types_pb2
from shoal.protocol.wire import (
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    ReceivedTensor,
    RefusedTensor,
    checksum,
    decode_frame,
    encode_frame,
    frames,
    receive_tensors,
)

Admit = Callable[[types_pb2.TensorHeader], int]


def header_of(payload: bytes, *, sequence: int = 1) -> types_pb2.TensorHeader:
    return types_pb2.TensorHeader(
        key=types_pb2.TensorKey(run_id="tiny-0a1b2c3d", step=3, direction=1, incarnation=7),
        codec="bf16",
        dtype=types_pb2.DTYPE_FLOAT32,
        shape=[2, 3],
        payload_bytes=len(payload),
        checksum=checksum(payload),
        sequence=sequence,
    )


async def stream(messages: Iterable[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def receive(
    messages: Iterable[bytes], admit: Admit | None = None
) -> list[ReceivedTensor | RefusedTensor]:
    """Without `admit`, everything is admitted."""
    allow = admit or (lambda header: header.payload_bytes)
    return [received async for received in receive_tensors(stream(messages), allow)]


def payload_of(received: ReceivedTensor | RefusedTensor) -> bytes:
    assert isinstance(received, ReceivedTensor), received
    return bytes(received.payload)


# ---- frames against protobuf -------------------------------------------------------------

headers = st.none() | st.builds(
    types_pb2.TensorHeader,
    key=st.builds(
        types_pb2.TensorKey,
        run_id=st.text(max_size=20),
        step=st.integers(0, 2**64 - 1),
        microbatch=st.integers(0, 2**32 - 1),
        incarnation=st.integers(0, 2**64 - 1),
    ),
    codec=st.text(max_size=20),
    shape=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    payload_bytes=st.integers(0, 2**64 - 1),
    checksum=st.binary(max_size=16),
)


@given(header=headers, chunk=st.binary(max_size=300))
def test_frame_is_what_protobuf_writes_and_reads(
    header: types_pb2.TensorHeader | None, chunk: bytes
) -> None:
    theirs = types_pb2.TensorFrame(header=header, chunk=chunk).SerializeToString()
    assert encode_frame(header, chunk) == theirs
    ours = decode_frame(theirs)
    assert ours.header == header
    assert bytes(ours.chunk) == chunk


@pytest.mark.parametrize("num_bytes", [127, 128, 16_383, 16_384, MAX_CHUNK_BYTES])
def test_lengths_of_every_varint_size_agree_with_protobuf(num_bytes: int) -> None:
    chunk = bytes(num_bytes)
    frame = types_pb2.TensorFrame(header=header_of(chunk), chunk=chunk).SerializeToString()
    assert encode_frame(header_of(chunk), chunk) == frame
    assert len(decode_frame(frame).chunk) == num_bytes


def test_decoded_chunk_is_a_view_not_a_copy() -> None:
    message = encode_frame(None, bytes(1000))
    assert decode_frame(message).chunk.obj is message


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_garbage_frame_raises_nothing_but_protocol_errors(message: bytes) -> None:
    try:
        decode_frame(message)
    except ProtocolError:
        return


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_frame_raises_nothing_but_protocol_errors(data: st.DataObject) -> None:
    message = bytearray(encode_frame(header_of(b"abc"), b"abc"))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_frame(bytes(message[: data.draw(st.integers(0, len(message)))]))
    except ProtocolError:
        return


@settings(max_examples=200)
@given(messages=st.lists(st.binary(max_size=60) | st.just(encode_frame(header_of(b"x"), b"x"))))
async def test_garbage_stream_raises_nothing_but_protocol_errors(messages: list[bytes]) -> None:
    try:
        await receive(messages, lambda header: 1)
    except ProtocolError:
        return


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (b"\x0a\xff\xff\xff\xff\xff\x01", MalformedFrameError),  # a length of six bytes
        (b"\x0a\x80", MalformedFrameError),  # ends within the length
        (b"\x0a\x05ab", MalformedFrameError),  # the header is cut off
        (b"\x0a\x01\xff", MalformedFrameError),  # not a header
        (b"\x12\x05abc", MalformedFrameError),  # the chunk is cut off
        (b"\x12\x01ab", MalformedFrameError),  # something after the chunk
        (b"\x1a\x01a", MalformedFrameError),  # an unknown field
        (b"\x12" + wire._varint(MAX_CHUNK_BYTES + 1), OversizedStreamError),
        (b"\x0a" + wire._varint(MAX_HEADER_BYTES + 1) + bytes(8000), MalformedFrameError),
    ],
    ids=range(9),
)
def test_malformed_frame_is_refused(message: bytes, error: type[ProtocolError]) -> None:
    with pytest.raises(error):
        decode_frame(message)


# ---- tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_bytes",
    [0, 1, MAX_CHUNK_BYTES - 1, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1, 3 * MAX_CHUNK_BYTES],
)
async def test_tensor_of_any_length_survives_framing(num_bytes: int) -> None:
    payload = bytes(i * 31 % 251 for i in range(min(num_bytes, 5000))) * (num_bytes // 5000 + 1)
    payload = payload[:num_bytes]
    messages = list(frames(header_of(payload), payload))
    assert len(messages) == max(1, -(-num_bytes // MAX_CHUNK_BYTES))
    assert max(map(len, messages)) <= MAX_CHUNK_BYTES + MAX_HEADER_BYTES
    assert [payload_of(r) for r in await receive(messages)] == [payload]


async def test_several_tensors_follow_each_other_on_one_stream() -> None:
    payloads = [b"", b"one", bytes(MAX_CHUNK_BYTES + 5), b"", b"two"]
    messages = [m for p in payloads for m in frames(header_of(p), p)]
    assert [payload_of(r) for r in await receive(messages)] == payloads


async def test_huge_announcement_allocates_nothing() -> None:
    header = types_pb2.TensorHeader(payload_bytes=2**40)
    tracemalloc.start()
    try:
        with pytest.raises(TruncatedStreamError):  # what is refused is skipped: a terabyte
            await receive([encode_frame(header, b"x" * 100)], lambda header: 24)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


async def test_admission_sees_a_header_before_memory_is_taken_for_it() -> None:
    payload = bytes(MAX_CHUNK_BYTES + 1)
    peaks = []

    def admit(header: types_pb2.TensorHeader) -> int:
        peaks.append(tracemalloc.get_traced_memory()[0])
        return header.payload_bytes

    messages = list(frames(header_of(payload), payload))
    tracemalloc.start()
    try:
        await receive(messages, admit)
    finally:
        tracemalloc.stop()
    assert peaks[0] < MAX_CHUNK_BYTES / 2


async def test_refused_tensor_is_skipped_and_the_stream_goes_on() -> None:
    big, good = bytes(2 * MAX_CHUNK_BYTES + 1), b"good"

    def admit(header: types_pb2.TensorHeader) -> int:
        if header.sequence == 1:
            raise WrongShapeError("not in the plan")
        return header.payload_bytes

    messages = [*frames(header_of(big), big), *frames(header_of(good, sequence=2), good)]
    refused, received = await receive(messages, admit)
    assert isinstance(refused, RefusedTensor)
    assert isinstance(refused.error, WrongShapeError)
    assert payload_of(received) == good


@pytest.mark.parametrize("allowed", [3, 5, 0, 2**63])
async def test_length_other_than_the_plans_is_refused(allowed: int) -> None:
    [refused] = await receive(frames(header_of(b"four"), b"four"), lambda header: allowed)
    assert isinstance(refused, RefusedTensor)
    assert isinstance(refused.error, OversizedStreamError)


@pytest.mark.parametrize("num_bytes", [0, 9, MAX_CHUNK_BYTES + 9])
async def test_wrong_checksum_is_refused_and_the_stream_goes_on(num_bytes: int) -> None:
    payload = bytes(num_bytes)
    header = header_of(payload)
    header.checksum = checksum(payload + b"x")
    refused, received = await receive([*frames(header, payload), *frames(header_of(b"ok"), b"ok")])
    assert isinstance(refused, RefusedTensor)
    assert isinstance(refused.error, ChecksumError)
    assert payload_of(received) == b"ok"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (list(frames(header_of(bytes(MAX_CHUNK_BYTES + 1)), bytes(MAX_CHUNK_BYTES + 1)))[:1],
         TruncatedStreamError),
        ([encode_frame(header_of(b"four"), b"tw"), encode_frame(header_of(b"x"), b"x")],
         TruncatedStreamError),
        ([encode_frame(header_of(b"four"), b"fours")], OversizedStreamError),
        ([encode_frame(header_of(b"four"), b"fo"), encode_frame(None, b"urs")],
         OversizedStreamError),
        ([encode_frame(None, b"four")], MalformedFrameError),
        ([encode_frame(header_of(b"four"), b"fo"), encode_frame(None, b"")], MalformedFrameError),
        ([encode_frame(header_of(b"four"), b"")], MalformedFrameError),
    ],
    ids=["end in mid-tensor", "header in mid-tensor", "oversized frame", "oversized tensor",
         "chunk before header", "empty chunk", "empty first chunk"],
)  # fmt: skip
async def test_unreadable_stream_ends_with_its_error(
    messages: list[bytes], error: type[ProtocolError]
) -> None:
    with pytest.raises(error):
        await receive(messages)


async def test_idle_stream_keeps_no_tensor_in_memory() -> None:
    class Chunk(bytearray):
        """Unlike bytes, can be watched."""

    alive: list[weakref.ref[Any]] = []

    async def two() -> AsyncIterator[Any]:
        message = Chunk(encode_frame(header_of(b"four"), b"four"))
        alive.append(weakref.ref(message))
        yield message
        del message
        gc.collect()
        assert alive[0]() is None
        yield encode_frame(header_of(b"last"), b"last")

    got = 0
    async for received in receive_tensors(two(), lambda header: header.payload_bytes):
        got += len(payload_of(received))
        del received
    assert got == 8
