# SPDX-License-Identifier: Apache-2.0
"""How quantizers and byte codecs are spelt in a boundary spec: a name and its parameters.

    fp32, bf16, fp16
    int8[:gN][:c][:rot][:rn|:sr]    N values share a scale (64); c: along a channel's tokens;
    int4[:gN][:c][:rot][:rn|:sr]      rot: Hadamard-rotated; rn, sr: round to nearest or
                                      stochastically on both legs (else nearest forward and
                                      stochastically backward)
    fp8[:gN][:e4m3|:e5m2]           one format on both legs (else e4m3 forward, e5m2 backward)
    topk:K%                         K % of each token's values
    shuffle, zstd[:N], lz4          N is the level (3)

Parameters may stand in any order; the canonical order is the one above.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Literal, TypeVar

from shoal.compression import cast, entropy, float8, quantize, sparsify
from shoal.compression.codec import Quantizer
from shoal.compression.entropy import ByteCodec
from shoal.protocol.errors import ConfigError

T = TypeVar("T")
Parser = Callable[[Sequence[str]], T]
"""The parameters after a name -> what it names. Raises `ConfigError` with what would be right."""

_DEFAULT_ZSTD_LEVEL = 3


def _bare(name: str, make: Callable[[], T]) -> Parser[T]:
    def parse(parameters: Sequence[str]) -> T:
        if parameters:
            raise ConfigError(f"{name} takes no parameters, got {parameters[0]!r}; leave it away")
        return make()

    return parse


def _integer(
    name: str, make: Callable[[quantize.Grid], quantize.IntegerCodec]
) -> Parser[Quantizer]:
    def parse(parameters: Sequence[str]) -> Quantizer:
        words = _Words(name, "gN, c, rot, and rn or sr", parameters)
        block = words.block(quantize.DEFAULT_BLOCK, quantize.MIN_BLOCK, quantize.MAX_BLOCK)
        by_channel, rotated = words.take("c"), words.take("rot")
        nearest, stochastic = words.take("rn"), words.take("sr")
        words.done()
        if nearest and stochastic:
            raise ConfigError(f"{name} rounds to nearest (rn) or stochastically (sr); keep one")
        if rotated and (block > quantize.MAX_ROTATED_BLOCK or block & (block - 1)):
            raise ConfigError(
                f"{name}:g{block}:rot rotates blocks of a power of two up to "
                f"{quantize.MAX_ROTATED_BLOCK}; '{name}:g64:rot' is a good choice"
            )
        if name == "int4" and block % 2:
            raise ConfigError(f"int4:g{block} puts two codes in a byte; make N even")
        rounding: Literal["by leg", "nearest", "stochastic"] = (
            "nearest" if nearest else "stochastic" if stochastic else "by leg"
        )
        return make(
            quantize.Grid(block=block, by_channel=by_channel, rotated=rotated, rounding=rounding)
        )

    return parse


def _fp8(parameters: Sequence[str]) -> Quantizer:
    words = _Words("fp8", "gN, and e4m3 or e5m2", parameters)
    block = words.block(float8.DEFAULT_BLOCK, float8.MIN_BLOCK, float8.MAX_BLOCK)
    e4m3, e5m2 = words.take("e4m3"), words.take("e5m2")
    words.done()
    if e4m3 and e5m2:
        raise ConfigError(
            "fp8 takes one format; without any it is e4m3 forward and e5m2 backward, and "
            "'fwd=…;bwd=…' gives each leg its own"
        )
    return float8.Float8Codec(block, "e4m3" if e4m3 else "e5m2" if e5m2 else None)


def _topk(parameters: Sequence[str]) -> Quantizer:
    text = parameters[0] if len(parameters) == 1 else ""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)%", text, re.ASCII)
    if match is None or not 0 < Fraction(match[1]) <= 100:
        raise ConfigError(
            f"topk takes the share of values to keep, above 0 % and up to 100 %, got "
            f"{':'.join(parameters)!r}; write 'topk:10%'"
        )
    return sparsify.TopKCodec(Fraction(match[1]))


def _zstd(parameters: Sequence[str]) -> ByteCodec:
    if not parameters:
        return entropy.Zstd(_DEFAULT_ZSTD_LEVEL)
    low, high = entropy.MIN_ZSTD_LEVEL, entropy.MAX_ZSTD_LEVEL
    match = re.fullmatch(r"0*([0-9]{1,3})", parameters[0], re.ASCII)
    if len(parameters) > 1 or match is None or not low <= int(match[1]) <= high:
        raise ConfigError(
            f"zstd takes one parameter, its level from {low} to {high}, got "
            f"{':'.join(parameters)!r}; 'zstd:{_DEFAULT_ZSTD_LEVEL}' is a good choice"
        )
    return entropy.Zstd(int(match[1]))


class _Words:
    """The parameters of one codec, taken one by one."""

    def __init__(self, name: str, known: str, parameters: Sequence[str]) -> None:
        self._name = name
        self._known = known
        self._left = list(parameters)
        for word in self._left:
            if self._left.count(word) > 1:
                raise ConfigError(f"{name}: {word!r} stands twice; write it once")

    def take(self, word: str) -> bool:
        if word not in self._left:
            return False
        self._left.remove(word)
        return True

    def block(self, default: int, low: int, high: int) -> int:
        """N of gN."""
        given = [word for word in self._left if re.match(r"g[0-9-]", word)]
        if not given:
            return default
        match = re.fullmatch(r"g0*([0-9]{1,9})", given[0], re.ASCII)
        if len(given) > 1 or match is None or not low <= int(match[1]) <= high:
            raise ConfigError(
                f"{self._name} takes one gN with N (values per scale) from {low} to {high}, "
                f"got {':'.join(given)!r}; '{self._name}:g{default}' is a good choice"
            )
        self._left.remove(given[0])
        return int(match[1])

    def done(self) -> None:
        if self._left:
            raise ConfigError(f"{self._name} takes {self._known}; got {self._left[0]!r}")


QUANTIZERS: Mapping[str, Parser[Quantizer]] = {
    "fp32": _bare("fp32", cast.fp32),
    "bf16": _bare("bf16", cast.bf16),
    "fp16": _bare("fp16", cast.fp16),
    "int8": _integer("int8", quantize.Int8Codec),
    "int4": _integer("int4", quantize.Int4Codec),
    "fp8": _fp8,
    "topk": _topk,
}

BYTE_CODECS: Mapping[str, Parser[ByteCodec]] = {
    "shuffle": _bare("shuffle", entropy.Shuffle),
    "zstd": _zstd,
    "lz4": _bare("lz4", entropy.Lz4),
}
