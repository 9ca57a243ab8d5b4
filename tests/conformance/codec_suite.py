# SPDX-License-Identifier: Apache-2.0
"""What every wire codec must do. A subclass names the codec and its error bound."""

import random
import struct
from abc import ABC, abstractmethod
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from shoal.compression.codec import CodecContext, WireCodec
from shoal.compression.registry import parse_boundary
from shoal.protocol.errors import (
    CodecError,
    NonFiniteError,
    OversizedStreamError,
    WrongShapeError,
)

FORWARD = CodecContext(run_seed=7, step=3, microbatch=1, boundary=0, leg="forward")
BACKWARD = CodecContext(run_seed=7, step=3, microbatch=1, boundary=0, leg="backward")

SHAPES = [(1,), (1, 1, 1), (7,), (3, 5, 7), (2, 64), (1, 65), (4, 16, 32), (511,)]


def sample(shape: tuple[int, ...], *, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values with a few outliers, as residual streams have them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * scale
    flat = values.view(-1)
    flat[:: max(1, flat.numel() // 5)] *= 20
    return values


class WireCodecSuite(ABC):
    spec: ClassVar[str]
    gradient_scale: ClassVar[float] = 1e-6
    """Output gradients of a mean-like loss are about so large."""

    @abstractmethod
    def error_bound(self, tensor: Tensor, context: CodecContext) -> Tensor:
        """The largest |x - x̂| allowed, per element."""

    @abstractmethod
    def expected_bytes(self, shape: tuple[int, ...]) -> int | range:
        """Written out again, apart from the codec's own arithmetic. A range where the length
        depends on the data."""

    @pytest.fixture
    def codec(self) -> WireCodec:
        return parse_boundary(self.spec).forward

    def assert_round_trip(self, codec: WireCodec, tensor: Tensor, context: CodecContext) -> None:
        decoded = codec.decode(codec.encode(tensor, context), tensor.shape, context)
        assert decoded.shape == tensor.shape
        assert decoded.dtype == torch.float32
        error = (decoded.double() - tensor.double()).abs()
        assert (error <= self.error_bound(tensor.contiguous(), context).double()).all()

    @pytest.mark.parametrize("shape", SHAPES)
    def test_round_trip_stays_within_the_error_bound(
        self, codec: WireCodec, shape: tuple[int, ...]
    ) -> None:
        self.assert_round_trip(codec, sample(shape), FORWARD)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_gradients_stay_within_the_error_bound(
        self, codec: WireCodec, shape: tuple[int, ...]
    ) -> None:
        self.assert_round_trip(codec, sample(shape, scale=self.gradient_scale), BACKWARD)

    @pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 1e-40, -1e-45, 6e4])
    def test_extreme_and_zero_blocks_round_trip(self, codec: WireCodec, value: float) -> None:
        self.assert_round_trip(codec, torch.full((100,), value), FORWARD)

    @pytest.mark.parametrize("shape", [*SHAPES, (0,), (3, 0, 2)])
    def test_payload_has_the_announced_length(
        self, codec: WireCodec, shape: tuple[int, ...]
    ) -> None:
        tensor = sample(shape) if 0 not in shape else torch.empty(shape)
        length, expected = len(codec.encode(tensor, FORWARD)), self.expected_bytes(shape)
        if isinstance(expected, range) and tensor.numel():
            assert length in expected
            assert codec.encoded_bytes(shape) is None
            assert codec.max_encoded_bytes(shape) == expected[-1]
        else:
            exact = expected if isinstance(expected, int) else 0
            assert length == codec.encoded_bytes(shape) == codec.max_encoded_bytes(shape) == exact

    @pytest.mark.parametrize("shape", SHAPES)
    def test_receiver_admits_what_the_sender_announces_within_the_bound(
        self, codec: WireCodec, shape: tuple[int, ...]
    ) -> None:
        """A wrong length is refused before anything is allocated: here, or by the stream, which
        takes no other length than the one returned."""
        length, most = len(codec.encode(sample(shape), FORWARD)), codec.max_encoded_bytes(shape)
        assert codec.admitted_bytes(shape, length) == length
        for wrong in (0, most + 1, 2**63):
            try:
                assert codec.admitted_bytes(shape, wrong) == codec.encoded_bytes(shape) != wrong
            except OversizedStreamError:
                assert codec.encoded_bytes(shape) is None

    def test_empty_tensor_round_trips(self, codec: WireCodec) -> None:
        assert codec.decode(codec.encode(torch.empty(2, 0), FORWARD), (2, 0), FORWARD).shape == (
            2,
            0,
        )

    @pytest.mark.parametrize("context", [FORWARD, BACKWARD], ids=lambda context: context.leg)
    def test_encoding_twice_gives_the_same_bytes(
        self, codec: WireCodec, context: CodecContext
    ) -> None:
        first, second = (bytes(codec.encode(sample((9, 33)), context)) for _ in range(2))
        assert first == second

    @pytest.mark.parametrize("shape", SHAPES)
    def test_encoding_leaves_the_tensor_alone(
        self, codec: WireCodec, shape: tuple[int, ...]
    ) -> None:
        tensor, untouched = sample(shape), sample(shape)
        codec.encode(tensor, FORWARD)
        codec.encode(tensor, BACKWARD)
        assert torch.equal(tensor, untouched)

    @pytest.mark.parametrize("context", [FORWARD, BACKWARD], ids=lambda context: context.leg)
    def test_number_of_threads_does_not_matter(
        self, codec: WireCodec, context: CodecContext
    ) -> None:
        before = torch.get_num_threads()
        payloads = []
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                payloads.append(bytes(codec.encode(sample((3, 400, 66)), context)))
        finally:
            torch.set_num_threads(before)
        assert payloads[0] == payloads[1]

    def test_decoding_twice_gives_the_same_bits(self, codec: WireCodec) -> None:
        payload = codec.encode(sample((9, 33)), FORWARD)
        first, second = (codec.decode(payload, (9, 33), FORWARD) for _ in range(2))
        assert torch.equal(first.view(torch.int32), second.view(torch.int32))

    def test_strides_do_not_matter(self, codec: WireCodec) -> None:
        tensor = sample((6, 10, 4)).permute(2, 0, 1)[:, ::2]
        assert not tensor.is_contiguous()
        strided = codec.encode(tensor, FORWARD)
        assert strided == codec.encode(tensor.contiguous(), FORWARD)
        self.assert_round_trip(codec, tensor, FORWARD)

    def test_narrower_input_and_autograd_leaves_are_taken(self, codec: WireCodec) -> None:
        tensor = sample((5, 13)).bfloat16()
        wide = tensor.float().requires_grad_()
        assert codec.encode(tensor, FORWARD) == codec.encode(wide, FORWARD)

    def test_payload_does_not_follow_later_changes_of_the_tensor(self, codec: WireCodec) -> None:
        tensor = sample((5, 13))
        payload = codec.encode(tensor, FORWARD)
        before = bytes(payload)
        tensor.zero_()
        assert bytes(payload) == before
        assert payload.readonly

    def test_decoded_tensor_owns_aligned_memory(self, codec: WireCodec) -> None:
        """Also from a payload in the middle of a message, at an odd address."""
        tensor = sample((3, 70))
        buffer = bytearray(b"x") + bytearray(codec.encode(tensor, FORWARD))
        decoded = codec.decode(memoryview(buffer)[1:], tensor.shape, FORWARD)
        before = decoded.clone()
        buffer[:] = bytes(len(buffer))
        assert torch.equal(decoded, before)
        assert decoded.is_contiguous()
        assert decoded.data_ptr() % 64 == 0
        assert not decoded.requires_grad
        decoded.add_(1)  # writable

    @pytest.mark.parametrize("change", [-1, +1])
    def test_payload_of_another_length_is_refused(self, codec: WireCodec, change: int) -> None:
        payload = bytes(codec.encode(sample((4, 33)), FORWARD))
        wrong = payload[:change] if change < 0 else payload + b"\0" * change
        exact = codec.encoded_bytes((4, 33)) is not None
        with pytest.raises(CodecError, match="exactly" if exact else None):
            codec.decode(wrong, (4, 33), FORWARD)
        with pytest.raises(CodecError):
            codec.decode(b"", (4, 33), FORWARD)
        with pytest.raises(CodecError):
            codec.decode(payload, (5, 33), FORWARD)

    def test_negative_extent_is_refused(self, codec: WireCodec) -> None:
        with pytest.raises(WrongShapeError):
            codec.decode(b"", (-1, 4), FORWARD)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("position", [0, 70, 99])
    def test_encoding_refuses_non_finite_values(
        self, codec: WireCodec, bad: float, position: int
    ) -> None:
        tensor = sample((100,))
        tensor[position] = bad
        with pytest.raises(NonFiniteError):
            codec.encode(tensor, FORWARD)

    def test_encoding_refuses_integers(self, codec: WireCodec) -> None:
        with pytest.raises(CodecError, match="floating"):
            codec.encode(torch.zeros(3, dtype=torch.int64), FORWARD)

    @pytest.mark.parametrize("filler", [b"\xff", b"\x7f", b"\x80"])
    def test_corrupted_payload_is_refused(self, codec: WireCodec, filler: bytes) -> None:
        """All ones is NaN in every floating type, or a code that no encoder writes; the others
        decode to finite numbers or are refused, and never crash or give NaN."""
        payload = filler * codec.max_encoded_bytes((100,))
        if filler == b"\xff":
            with pytest.raises((NonFiniteError, CodecError)):
                codec.decode(payload, (100,), FORWARD)
            return
        try:
            decoded = codec.decode(payload, (100,), FORWARD)
        except (NonFiniteError, CodecError):
            return
        assert torch.isfinite(decoded).all()

    @pytest.mark.parametrize("context", [FORWARD, BACKWARD], ids=lambda context: context.leg)
    def test_damaged_payload_gives_finite_numbers_or_an_error(
        self, codec: WireCodec, context: CodecContext
    ) -> None:
        payload = bytes(codec.encode(sample((5, 26)), context))
        chance = random.Random(5)
        for _ in range(200):
            damaged = bytearray(payload)
            for _ in range(chance.choice([1, 1, 2, 8])):
                damaged[chance.randrange(len(damaged))] = chance.choice([0, 255, 127, 128, 1, 0x40])
            if codec.encoded_bytes((5, 26)) is None and chance.random() < 0.3:
                del damaged[chance.randrange(len(damaged)) :]
            try:
                decoded = codec.decode(damaged, (5, 26), context)
            except (NonFiniteError, CodecError):
                continue
            assert decoded.shape == (5, 26)
            assert torch.isfinite(decoded).all()

    def test_decoding_refuses_non_finite_payload(self, codec: WireCodec) -> None:
        for number in self.non_finite_encodings():
            payload = self.with_number(codec, number)
            with pytest.raises(NonFiniteError):
                codec.decode(payload, (100,), FORWARD)

    def non_finite_encodings(self) -> list[bytes]:
        """Numbers as they stand in a payload."""
        return [struct.pack("<f", value) for value in (float("nan"), float("inf"), float("-inf"))]

    def with_number(self, codec: WireCodec, number: bytes) -> bytes:
        """A payload of shape (100,) with this in place of its first number."""
        return number + bytes(codec.encode(sample((100,)), FORWARD))[len(number) :]

    def test_largest_finite_values_survive_or_are_refused(self, codec: WireCodec) -> None:
        """Never infinity at the receiver: it would blame the sender."""
        huge = torch.full((70,), torch.finfo(torch.float32).max)
        try:
            payload = codec.encode(huge, FORWARD)
        except NonFiniteError:
            return
        assert torch.isfinite(codec.decode(payload, (70,), FORWARD)).all()

    def test_canonical_spec_names_the_same_codec(self, codec: WireCodec) -> None:
        again = parse_boundary(codec.spec).forward
        assert again.spec == codec.spec == parse_boundary(codec.spec).spec
        assert again.version == codec.version == 0
        assert again.encode(sample((77,)), FORWARD) == codec.encode(sample((77,)), FORWARD)
