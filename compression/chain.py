# SPDX-License-Identifier: Apache-2.0
"""A quantizer and the byte codecs behind it, as one wire codec."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec import CodecContext, Quantizer, WireCodec
from shoal.compression.entropy import ByteCodec
from shoal.protocol.errors import CodecError


class ChainCodec(WireCodec):
    """Of the byte codecs at most the last one compresses, so that the length before each of them
    follows from the shape."""

    def __init__(self, quantizer: Quantizer, byte_codecs: Sequence[ByteCodec]) -> None:
        assert byte_codecs, "else the quantizer itself is the codec"
        assert not any(codec.compresses for codec in byte_codecs[:-1])
        self.spec = "|".join([quantizer.spec, *(codec.spec for codec in byte_codecs)])
        self._quantizer = quantizer
        self._byte_codecs = tuple(byte_codecs)

    def encoded_bytes(self, shape: Sequence[int]) -> int | None:
        plain = self._quantizer.encoded_bytes(shape)
        return None if plain and self._byte_codecs[-1].compresses else plain

    def max_encoded_bytes(self, shape: Sequence[int]) -> int:
        plain = self._quantizer.encoded_bytes(shape)
        return self._byte_codecs[-1].max_bytes(plain) if plain else 0

    def _encode(self, values: Tensor, context: CodecContext) -> memoryview:
        layout = self._quantizer.layout(values.shape)
        payload = self._quantizer.quantize(values, context).numpy()
        for codec in self._byte_codecs:
            payload = codec.pack(payload, layout)
        return payload.data.toreadonly()

    def _decode(
        self,
        payload: memoryview,
        shape: tuple[int, ...],
        context: CodecContext,
        device: torch.device,
    ) -> Tensor:
        layout = self._quantizer.layout(shape)
        num_bytes = self._quantizer.encoded_bytes(shape)
        unpacked = np.frombuffer(payload, dtype=np.uint8)
        try:
            for codec in reversed(self._byte_codecs):
                unpacked = codec.unpack(unpacked, layout, num_bytes)
        except CodecError as error:
            raise CodecError(f"{self.spec} payload of {context}: {error}") from None
        staging = torch.empty(num_bytes, dtype=torch.uint8)
        np.copyto(staging.numpy(), unpacked)
        return self._quantizer.dequantize(staging.to(device), shape, context)
