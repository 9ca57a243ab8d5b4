# SPDX-License-Identifier: Apache-2.0
"""Tensors on a gRPC stream: framing, chunking, checksums, and bounds before allocation.

Every message on the wire is a valid protobuf `TensorFrame`, yet its `chunk` is neither copied
into a protobuf object by the sender nor out of one by the receiver: `chunk` is the last field, so
a frame is a small prefix followed by the raw bytes. A receiver slices them out as a memoryview.
"""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import grpc
import xxhash
from google.protobuf.message import DecodeError, Message

from shoal.protocol.errors import (
    ChecksumError,
    MalformedFrameError,
    OversizedStreamError,
    ProtocolError,
    TruncatedStreamError,
)
from shoal.protocol.proto import peer_pb2, peer_pb2_grpc, types_pb2

MAX_CHUNK_BYTES = 1 << 20
"""1 MiB chunks carried most bytes per second over gRPC of 64 KiB to 16 MiB."""

MAX_HEADER_BYTES = 4096

_HEADER_TAG = 0x0A  # field 1, length-delimited
_CHUNK_TAG = 0x12  # field 2, length-delimited

Payload = bytes | bytearray | memoryview


def checksum(payload: Payload) -> bytes:
    """XXH3-128: guards against accidents; TLS guards against adversaries."""
    return xxhash.xxh3_128_digest(payload)


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded `TensorFrame`; `chunk` is a view into the message that was received."""

    header: types_pb2.TensorHeader | None
    chunk: memoryview


@dataclass(frozen=True, slots=True)
class ReceivedTensor:
    header: types_pb2.TensorHeader
    payload: Payload


@dataclass(frozen=True, slots=True)
class RefusedTensor:
    """A tensor whose header or bytes were refused; its remaining chunks were skipped."""

    header: types_pb2.TensorHeader
    error: ProtocolError


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        if position >= len(data):
            raise MalformedFrameError("frame ends within a length field")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise MalformedFrameError("length field of a frame exceeds five bytes")


def encode_frame(header: types_pb2.TensorHeader | None, chunk: Payload) -> bytes:
    """One serialized `TensorFrame`, byte for byte as protobuf writes it; copies `chunk` once."""
    parts: list[Payload] = []
    if header is not None:
        encoded = header.SerializeToString()
        parts += (bytes([_HEADER_TAG]), _varint(len(encoded)), encoded)
    if len(chunk):  # proto3 leaves out what is empty
        parts += (bytes([_CHUNK_TAG]), _varint(len(chunk)), chunk)
    return b"".join(parts)


def decode_frame(message: bytes) -> Frame:
    """Raises `MalformedFrameError`. Accepts exactly what `encode_frame` writes."""
    data = memoryview(message)
    position = 0
    header = None
    if data and data[0] == _HEADER_TAG:
        length, position = _read_varint(data, 1)
        if length > MAX_HEADER_BYTES or position + length > len(data):
            raise MalformedFrameError(
                f"tensor header of {length} bytes in a frame of {len(data)}; "
                f"at most {MAX_HEADER_BYTES} are allowed"
            )
        try:
            header = types_pb2.TensorHeader.FromString(bytes(data[position : position + length]))
        except DecodeError as error:
            raise MalformedFrameError(f"tensor header can't be parsed: {error}") from None
        position += length
    if position == len(data):  # an empty chunk is left out
        return Frame(header, data[position:])
    if data[position] != _CHUNK_TAG:
        raise MalformedFrameError(f"unexpected field tag {data[position]:#x} in a tensor frame")
    length, position = _read_varint(data, position + 1)
    if length > MAX_CHUNK_BYTES:
        raise OversizedStreamError(f"chunk of {length} bytes; at most {MAX_CHUNK_BYTES} a frame")
    if position + length != len(data):
        raise MalformedFrameError(
            f"chunk announces {length} bytes, the frame holds {len(data) - position}"
        )
    return Frame(header, data[position:])


def frames(header: types_pb2.TensorHeader, payload: Payload) -> Iterator[bytes]:
    """The serialized frames of one tensor."""
    view = memoryview(payload).cast("B")
    yield encode_frame(header, view[:MAX_CHUNK_BYTES])
    for start in range(MAX_CHUNK_BYTES, len(view), MAX_CHUNK_BYTES):
        yield encode_frame(None, view[start : start + MAX_CHUNK_BYTES])


class _Assembly:
    """One tensor in the making. Allocates only what the plan allows, and nothing when refused."""

    def __init__(
        self, header: types_pb2.TensorHeader, admit: Callable[[types_pb2.TensorHeader], int]
    ) -> None:
        self.header = header
        self.filled = 0
        self._refusal: ProtocolError | None = None
        self._whole: memoryview | None = None
        self._buffer: bytearray | None = None
        try:
            allowed = admit(header)
            if header.payload_bytes != allowed:
                raise OversizedStreamError(
                    f"payload of {header.payload_bytes} bytes announced; "
                    f"the plan allows exactly {allowed}"
                )
        except ProtocolError as error:
            self._refusal = error

    def add(self, chunk: memoryview) -> bool:
        """True once the tensor is complete."""
        total = self.header.payload_bytes
        start, end = self.filled, self.filled + len(chunk)
        if end > total:
            raise OversizedStreamError(f"{end} bytes arrived for a tensor of {total}")
        if end < total and not len(chunk):
            raise MalformedFrameError("an empty chunk within a tensor")
        self.filled = end
        if self._refusal is None:
            if len(chunk) == total:  # came in one frame: not copied
                self._whole = chunk
            else:
                if self._buffer is None:
                    self._buffer = bytearray(total)
                self._buffer[start:end] = chunk
        return end == total

    def finish(self) -> ReceivedTensor | RefusedTensor:
        if self._refusal is not None:
            return RefusedTensor(self.header, self._refusal)
        payload = self._buffer if self._buffer is not None else self._whole
        assert payload is not None, "complete"
        if checksum(payload) != self.header.checksum:
            return RefusedTensor(
                self.header,
                ChecksumError(
                    f"payload of {len(payload)} bytes does not match its checksum; "
                    "sending it again helps"
                ),
            )
        return ReceivedTensor(self.header, payload)


async def receive_tensors(
    messages: AsyncIterable[bytes],
    admit: Callable[[types_pb2.TensorHeader], int],
) -> AsyncIterator[ReceivedTensor | RefusedTensor]:
    """Assemble tensors from a stream of serialized frames.

    `admit` sees every header before anything is allocated and returns the exact payload length
    that the plan allows for it, or raises a `ProtocolError`. A refused tensor is skipped and
    yielded as `RefusedTensor`; what makes the rest of the stream unreadable (a malformed frame,
    a header in mid-tensor, more bytes than announced, the stream's end in mid-tensor) is raised.
    """
    assembly: _Assembly | None = None
    async for message in messages:
        frame = decode_frame(message)
        if frame.header is not None:
            if assembly is not None:
                raise TruncatedStreamError(
                    f"a new tensor begins after {assembly.filled} of "
                    f"{assembly.header.payload_bytes} bytes"
                )
            assembly = _Assembly(frame.header, admit)
        elif assembly is None:
            raise MalformedFrameError("a chunk arrived before any tensor header")
        if not assembly.add(frame.chunk):
            continue
        received, assembly = assembly.finish(), None
        del message, frame  # a stream may idle for hours: it must not hold on to its last tensor
        yield received
        del received
    if assembly is not None:
        raise TruncatedStreamError(
            f"the stream ended after {assembly.filled} of {assembly.header.payload_bytes} bytes"
        )


def _identity(message: bytes) -> bytes:
    return message


def add_peer_servicer(servicer: peer_pb2_grpc.PeerServicer, server: grpc.aio.Server) -> None:
    """Like the generated function, but `Push` and `Reduce` receive serialized frames, and
    `FetchBoundary` and `FetchShare` yield them."""
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(
            getattr(servicer, name),
            request_deserializer=_identity,
            response_serializer=peer_pb2.PushAck.SerializeToString,
        )
        for name in ("Push", "Reduce")
    }
    handlers["FetchState"] = grpc.unary_stream_rpc_method_handler(
        servicer.FetchState,
        request_deserializer=peer_pb2.StateRequest.FromString,
        response_serializer=peer_pb2.StateChunk.SerializeToString,
    )
    handlers["DescribeState"] = grpc.unary_unary_rpc_method_handler(
        servicer.DescribeState,
        request_deserializer=peer_pb2.StateRequest.FromString,
        response_serializer=peer_pb2.StateDescription.SerializeToString,
    )
    handlers["FetchBoundary"] = grpc.unary_stream_rpc_method_handler(
        servicer.FetchBoundary,
        request_deserializer=peer_pb2.BoundaryRequest.FromString,
        response_serializer=_identity,
    )
    handlers["FetchShare"] = grpc.unary_stream_rpc_method_handler(
        servicer.FetchShare,
        request_deserializer=peer_pb2.ShareRequest.FromString,
        response_serializer=_identity,
    )
    handlers["Ping"] = grpc.unary_unary_rpc_method_handler(
        servicer.Ping,
        request_deserializer=peer_pb2.PingRequest.FromString,
        response_serializer=peer_pb2.PingReply.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("shoal.v1.Peer", handlers),)
    )


def open_tensor_stream(
    channel: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...] = ()
) -> "grpc.aio.StreamStreamCall[bytes, peer_pb2.PushAck]":
    """Open `Push` or `Reduce`; the caller writes frames that are serialized already."""
    call = channel.stream_stream(
        f"/shoal.v1.Peer/{method}",
        request_serializer=_identity,
        response_deserializer=peer_pb2.PushAck.FromString,
    )
    return call(None, metadata=metadata)


def fetch_boundary(
    channel: grpc.aio.Channel, request: peer_pb2.BoundaryRequest, *, timeout_s: float
) -> AsyncIterable[bytes]:
    """Serialized frames out of a peer's boundary log, for `receive_tensors`."""
    return _fetch_tensors(channel, "FetchBoundary", request, timeout_s)


def fetch_share(
    channel: grpc.aio.Channel, request: peer_pb2.ShareRequest, *, timeout_s: float
) -> AsyncIterable[bytes]:
    """Serialized frames of a stage's share, for `receive_tensors`."""
    return _fetch_tensors(channel, "FetchShare", request, timeout_s)


def _fetch_tensors(
    channel: grpc.aio.Channel, method: str, request: Message, timeout_s: float
) -> AsyncIterable[bytes]:
    call = channel.unary_stream(
        f"/shoal.v1.Peer/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=_identity,
    )
    return call(request, timeout=timeout_s)
