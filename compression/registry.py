# SPDX-License-Identifier: Apache-2.0
"""Boundary specs: the strings in RUN.toml that name what crosses a boundary.

    boundary := chain | "fwd=" chain ";" "bwd=" chain
    chain    := codec ("|" codec)*
    codec    := name (":" parameter)*

"bf16" uses one chain on both legs; "fwd=bf16;bwd=int8:g64" one for each. Names: fp32, bf16, fp16,
int8 (parameter gN: N values share a scale, 64 unless given). Blanks between parts are ignored.

A chain will be at most one learned codec, then one quantizer, then a byte codec, in this order.
Only quantizers exist today, hence a chain is one codec.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.compression import cast, quantize
from shoal.compression.codec import WireCodec
from shoal.protocol.errors import ConfigError

_MAX_SPEC_CHARS = 200
_LEGS = ("fwd", "bwd")


@dataclass(frozen=True, slots=True)
class Boundary:
    """The codecs of a run's boundaries. Equal specs encode equally."""

    spec: str
    """Canonical: parse_boundary(spec).spec == spec."""
    forward: WireCodec
    backward: WireCodec


def parse_boundary(spec: str) -> Boundary:
    """Raises `ConfigError` for an unknown codec or bad parameter, with what would be right."""
    if len(spec) > _MAX_SPEC_CHARS:
        raise ConfigError(
            f"boundary spec of {len(spec)} characters; at most {_MAX_SPEC_CHARS} are allowed"
        )
    parts = [part.strip() for part in spec.split(";")]
    if len(parts) == 1 and "=" not in spec:
        forward = backward = _parse_chain(parts[0], spec)
    else:
        legs = _split_legs(parts, spec)
        forward, backward = (_parse_chain(legs[leg], spec) for leg in _LEGS)
    if forward.spec == backward.spec:
        return Boundary(spec=forward.spec, forward=forward, backward=forward)
    return Boundary(
        spec=f"fwd={forward.spec};bwd={backward.spec}", forward=forward, backward=backward
    )


def codec_names() -> tuple[str, ...]:
    return tuple(_FACTORIES)


def _split_legs(parts: Sequence[str], spec: str) -> Mapping[str, str]:
    legs: dict[str, str] = {}
    for part in parts:
        leg, equals, chain = part.partition("=")
        leg = leg.strip()
        if not equals or leg not in _LEGS or leg in legs:
            raise ConfigError(
                f"boundary {spec!r}: {part!r} is not a leg; write 'fwd=CODEC;bwd=CODEC', "
                "or one CODEC for both"
            )
        legs[leg] = chain.strip()
    missing = [leg for leg in _LEGS if leg not in legs]
    if missing:
        raise ConfigError(
            f"boundary {spec!r}: no codec for the {missing[0]} leg; add '{missing[0]}=CODEC'"
        )
    return legs


def _parse_chain(chain: str, spec: str) -> WireCodec:
    codecs = [_parse_codec(part.strip(), spec) for part in chain.split("|")]
    if len(codecs) > 1:
        raise ConfigError(
            f"boundary {spec!r}: {chain!r} chains {len(codecs)} quantizers; a chain holds one"
        )
    return codecs[0]


def _parse_codec(text: str, spec: str) -> WireCodec:
    name, *parameters = (part.strip() for part in text.split(":"))
    factory = _FACTORIES.get(name)
    if factory is None:
        close = difflib.get_close_matches(name.lower(), _FACTORIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(_FACTORIES)}"
        raise ConfigError(f"boundary {spec!r}: unknown codec {name!r}; {hint}")
    try:
        return factory(parameters)
    except ConfigError as error:
        raise ConfigError(f"boundary {spec!r}: {error}") from None


def _without_parameters(make: Callable[[], WireCodec]) -> Callable[[Sequence[str]], WireCodec]:
    def factory(parameters: Sequence[str]) -> WireCodec:
        codec = make()
        if parameters:
            raise ConfigError(f"{codec.spec} takes no parameters, got {parameters[0]!r}")
        return codec

    return factory


def _int8(parameters: Sequence[str]) -> WireCodec:
    if not parameters:
        return quantize.Int8Codec()
    low, high = quantize.MIN_BLOCK, quantize.MAX_BLOCK
    match = re.fullmatch(r"g0*([0-9]{1,9})", parameters[0], re.ASCII)
    if len(parameters) > 1 or match is None or not low <= int(match[1]) <= high:
        raise ConfigError(
            f"int8 takes one parameter, gN with N (values per scale) from {low} to {high}, "
            f"got {':'.join(parameters)!r}; 'int8:g{quantize.DEFAULT_BLOCK}' is a good choice"
        )
    return quantize.Int8Codec(int(match[1]))


_FACTORIES: Mapping[str, Callable[[Sequence[str]], WireCodec]] = {
    "fp32": _without_parameters(cast.fp32),
    "bf16": _without_parameters(cast.bf16),
    "fp16": _without_parameters(cast.fp16),
    "int8": _int8,
}
