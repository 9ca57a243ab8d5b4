# SPDX-License-Identifier: Apache-2.0
"""Boundary specs: the strings in RUN.toml that name what crosses a boundary.

    boundary := chain | "fwd=" chain ";" "bwd=" chain
    chain    := [learned "|"] [quantizer] ("|" byte codec)*
    codec    := name (":" parameter)*

"bf16" uses one chain on both legs; "fwd=bf16;bwd=int8:g64" one for each. A chain is at most one
learned codec (learned/specs.py), then at most one quantizer (bf16 unless given), then "shuffle",
then one of "zstd" and "lz4" (spellings.py): "mapl:r=64|int8:g64|zstd:3". Blanks are ignored.
"""

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.compression.chain import ChainCodec
from shoal.compression.codec import Quantizer, WireCodec
from shoal.compression.entropy import ByteCodec
from shoal.compression.learned.specs import LEARNED, LearnedSpec
from shoal.compression.spellings import BYTE_CODECS, QUANTIZERS, Parser, T
from shoal.protocol.errors import ConfigError

DEFAULT_QUANTIZER = "bf16"

_MAX_SPEC_CHARS = 200
_LEGS = ("fwd", "bwd")
_KINDS = ("a learned codec", "a quantizer", "a byte codec")


@dataclass(frozen=True, slots=True)
class Boundary:
    """The codecs of a run's boundaries. Equal specs encode equally."""

    spec: str
    """Canonical: parse_boundary(spec).spec == spec."""
    forward: WireCodec
    backward: WireCodec
    learned: LearnedSpec | None = None
    """What narrows the tensor before `forward` and `backward` see it."""


@dataclass(frozen=True, slots=True)
class _Chain:
    learned: LearnedSpec | None
    wire: WireCodec

    @property
    def spec(self) -> str:
        return f"{self.learned.spec}|{self.wire.spec}" if self.learned else self.wire.spec


def parse_boundary(spec: str, *, learned: Mapping[str, Parser[LearnedSpec]] = LEARNED) -> Boundary:
    """Raises `ConfigError` for an unknown codec, a bad parameter or a bad order, with what would be
    right. `learned` holds the learned codecs by name."""
    if len(spec) > _MAX_SPEC_CHARS:
        raise ConfigError(
            f"boundary spec of {len(spec)} characters; at most {_MAX_SPEC_CHARS} are allowed"
        )
    try:
        forward, backward = (_parse_chain(chain, learned) for chain in _split_legs(spec))
        if forward.learned != backward.learned:
            raise ConfigError(
                f"{_name(forward)} forward, {_name(backward)} backward; a learned codec narrows "
                "both legs: name the same one in both, the chains after it may differ"
            )
    except ConfigError as error:
        raise ConfigError(f"boundary {spec!r}: {error}") from None
    if forward.spec == backward.spec:
        backward = forward
        canonical = forward.spec
    else:
        canonical = f"fwd={forward.spec};bwd={backward.spec}"
    return Boundary(canonical, forward.wire, backward.wire, forward.learned)


def codec_names() -> tuple[str, ...]:
    """Quantizers and byte codecs."""
    return (*QUANTIZERS, *BYTE_CODECS)


def _name(chain: _Chain) -> str:
    return repr(chain.learned.spec) if chain.learned else "no learned codec"


def _split_legs(spec: str) -> tuple[str, str]:
    """(forward chain, backward chain)"""
    parts = [part.strip() for part in spec.split(";")]
    if len(parts) == 1 and not _is_leg(spec):
        return spec, spec
    legs: dict[str, str] = {}
    for part in parts:
        leg, equals, chain = part.partition("=")
        leg = leg.strip()
        if not equals or leg not in _LEGS or leg in legs:
            raise ConfigError(
                f"{part!r} is not a leg; write 'fwd=CHAIN;bwd=CHAIN', or one CHAIN for both"
            )
        legs[leg] = chain
    missing = [leg for leg in _LEGS if leg not in legs]
    if missing:
        raise ConfigError(f"no codec for the {missing[0]} leg; add '{missing[0]}=CHAIN'")
    return legs["fwd"], legs["bwd"]


def _is_leg(part: str) -> bool:
    """Parameters may hold "=", too: "mapl:r=16"."""
    return re.match(r"[^:|]*=", part) is not None


def _parse_chain(chain: str, learned: Mapping[str, Parser[LearnedSpec]]) -> _Chain:
    parts = [tuple(word.strip() for word in part.split(":")) for part in chain.split("|")]
    kinds = [_kind_of(name, learned) for name, *_ in parts]
    _check_order([name for name, *_ in parts], kinds)
    placed = list(zip(parts, kinds, strict=True))
    chosen = [_parse(part, learned) for part, kind in placed if kind == 0]
    quantizers = [_parse(part, QUANTIZERS) for part, kind in placed if kind == 1]
    byte_codecs = [_parse(part, BYTE_CODECS) for part, kind in placed if kind == 2]
    _check_byte_codecs(byte_codecs)
    quantizer: Quantizer = quantizers[0] if quantizers else QUANTIZERS[DEFAULT_QUANTIZER](())
    wire = ChainCodec(quantizer, byte_codecs) if byte_codecs else quantizer
    return _Chain(chosen[0] if chosen else None, wire)


def _kind_of(name: str, learned: Iterable[str]) -> int:
    """The index in `_KINDS`."""
    for kind, names in enumerate((learned, QUANTIZERS, BYTE_CODECS)):
        if name in names:
            return kind
    known = (*learned, *QUANTIZERS, *BYTE_CODECS)
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    raise ConfigError(f"unknown codec {name!r}; {hint}")


def _check_order(names: Sequence[str], kinds: Sequence[int]) -> None:
    for kind in (0, 1):
        same = [name for name, its in zip(names, kinds, strict=True) if its == kind]
        if len(same) > 1:
            raise ConfigError(
                f"{' and '.join(repr(name) for name in same)} in one chain; a chain holds "
                f"{_KINDS[kind]} at most once, so keep one"
            )
    placed = list(zip(names, kinds, strict=True))
    for (before, its), (after, next_kind) in itertools.pairwise(placed):
        if its > next_kind:
            raise ConfigError(
                f"{_KINDS[next_kind]} ({after!r}) after {_KINDS[its]} ({before!r}); the order is "
                "learned codec | quantizer | shuffle | zstd or lz4"
            )


def _check_byte_codecs(codecs: Sequence[ByteCodec]) -> None:
    for before, after in itertools.pairwise(codecs):
        if not before.compresses and not after.compresses:
            raise ConfigError("'shuffle' stands twice; write it once")
        if before.compresses and after.compresses:
            raise ConfigError(
                f"{after.spec!r} after {before.spec!r}: compressed bytes don't compress again; "
                "keep one"
            )
        if before.compresses:
            raise ConfigError(
                f"{after.spec!r} after {before.spec!r}: it orders a quantizer's bytes for the "
                f"compressor, so write '{after.spec}|{before.spec}'"
            )


def _parse(part: Sequence[str], parsers: Mapping[str, Parser[T]]) -> T:
    name, *parameters = part
    return parsers[name](parameters)
