# SPDX-License-Identifier: Apache-2.0
"""Boundary specs: canonical spelling, legs, chains, and what is refused."""

import re
from collections.abc import Sequence

import pytest
import torch

from shoal.compression.codec import CodecContext
from shoal.compression.learned.specs import LearnedSpec
from shoal.compression.registry import codec_names, parse_boundary
from shoal.protocol.errors import ConfigError

CONTEXT = CodecContext(run_seed=0, step=1, microbatch=0, boundary=0, leg="forward")


def fake_mapl(parameters: Sequence[str]) -> LearnedSpec:
    match = re.fullmatch("r=([0-9]+)", ":".join(parameters))
    if match is None:
        raise ConfigError("mapl takes r=R, the width; 'mapl:r=16' is a good choice")
    return LearnedSpec(f"mapl:r={int(match[1])}", width=int(match[1]))


def fake_resbm(parameters: Sequence[str]) -> LearnedSpec:
    return LearnedSpec("resbm:b=16", width=16)


FAKES = {"mapl": fake_mapl, "resbm": fake_resbm}


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("bf16", "bf16"),
        ("int8", "int8:g64"),
        ("int8:g064", "int8:g64"),
        (" int8 : g128 ", "int8:g128"),
        ("int8:c", "int8:g64:c"),
        ("int4:rn:rot:g32", "int4:g32:rot:rn"),
        ("int4:sr:c:g0128", "int4:g128:c:sr"),
        ("fp8", "fp8:g64"),
        ("fp8:e5m2:g32", "fp8:g32:e5m2"),
        ("topk:010.50%", "topk:10.5%"),
        ("fwd=bf16;bwd=int8", "fwd=bf16;bwd=int8:g64"),
        ("bwd=int8 ; fwd = bf16", "fwd=bf16;bwd=int8:g64"),
        ("fwd=int8;bwd=int8:g64", "int8:g64"),
        ("int8 | zstd", "int8:g64|zstd:3"),
        ("bf16|shuffle|zstd:019", "bf16|shuffle|zstd:19"),
        ("shuffle|lz4", "bf16|shuffle|lz4"),
        ("zstd:1", "bf16|zstd:1"),
        ("fwd=int4|lz4;bwd=shuffle", "fwd=int4:g64|lz4;bwd=bf16|shuffle"),
    ],
)
def test_spec_has_one_canonical_spelling(written: str, canonical: str) -> None:
    boundary = parse_boundary(written)
    assert boundary.spec == canonical
    assert parse_boundary(canonical).spec == canonical
    assert boundary.learned is None


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("mapl:r=016", "mapl:r=16|bf16"),
        ("mapl:r=64 | int8 | zstd:3", "mapl:r=64|int8:g64|zstd:3"),
        ("mapl:r=4|shuffle", "mapl:r=4|bf16|shuffle"),
        ("fwd=mapl:r=8|int8;bwd=mapl:r=08", "fwd=mapl:r=8|int8:g64;bwd=mapl:r=8|bf16"),
        ("fwd=mapl:r=8;bwd=mapl:r=8|bf16", "mapl:r=8|bf16"),
    ],
)
def test_learned_codec_stands_first_and_narrows_both_legs(written: str, canonical: str) -> None:
    boundary = parse_boundary(written, learned=FAKES)
    assert boundary.spec == canonical
    assert parse_boundary(canonical, learned=FAKES).spec == canonical
    assert boundary.learned is not None
    assert boundary.learned.spec == canonical.removeprefix("fwd=").partition("|")[0]
    assert "mapl" not in boundary.forward.spec


def test_legs_get_their_own_codecs() -> None:
    boundary = parse_boundary("fwd=bf16;bwd=int8:g32")
    assert boundary.forward.spec == "bf16"
    assert boundary.backward.spec == "int8:g32"


def test_one_codec_serves_both_legs() -> None:
    boundary = parse_boundary("int8")
    assert boundary.forward.spec == boundary.backward.spec == "int8:g64"


@pytest.mark.parametrize("name", sorted({*codec_names()} - {"topk"}))
def test_every_registered_name_parses_without_parameters(name: str) -> None:
    assert name in parse_boundary(name).spec


def test_chain_encodes_as_its_parts_do() -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    shuffled = bytes(parse_boundary("bf16|shuffle").forward.encode(tensor, CONTEXT))
    plain = bytes(parse_boundary("bf16").forward.encode(tensor, CONTEXT))
    assert shuffled == plain[::2] + plain[1::2]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("int9", "did you mean 'int8'"),
        ("BF16", "did you mean 'bf16'"),
        ("zzz", "known: mapl, resbm, fp32, bf16, fp16, int8, int4, fp8, topk, shuffle, zstd, lz4"),
        ("", "unknown codec ''"),
        ("bf16:g64", "bf16 takes no parameters"),
        ("lz4:1", "lz4 takes no parameters"),
        ("shuffle:2", "shuffle takes no parameters"),
        ("int8:g4", "from 8 to 65536"),
        ("int8:g65537", "from 8 to 65536"),
        ("int8:g-64", "from 8 to 65536"),
        ("int8:64", "int8 takes gN, c, rot, and rn or sr; got '64'"),
        ("int8:g64:g64", "'g64' stands twice"),
        ("int8:g64:g32", "takes one gN"),
        ("int8:g" + "9" * 30, "from 8 to 65536"),
        ("int8:c:c", "'c' stands twice"),
        ("int8:rn:sr", "keep one"),
        ("int8:g48:rot", "a power of two up to 1024"),
        ("int4:g2048:rot", "a power of two up to 1024"),
        ("int4:g9", "make N even"),
        ("fp8:e4m3:e5m2", "one format"),
        ("fp8:rot", "got 'rot'"),
        ("topk", "write 'topk:10%'"),
        ("topk:0%", "above 0 %"),
        ("topk:101%", "up to 100 %"),
        ("topk:10", "write 'topk:10%'"),
        ("topk:1e1%", "write 'topk:10%'"),
        ("zstd:0", "level from 1 to 19"),
        ("zstd:20", "level from 1 to 19"),
        ("zstd:-1", "level from 1 to 19"),
        ("zstd:3:3", "level from 1 to 19"),
        ("bf16|int8", "'bf16' and 'int8' in one chain; a chain holds a quantizer at most once"),
        ("int8|bf16|zstd", "keep one"),
        ("int8|", "unknown codec ''"),
        ("zstd|int8", "a quantizer ('int8') after a byte codec ('zstd'); the order is"),
        ("zstd:3|shuffle", "write 'shuffle|zstd:3'"),
        ("shuffle|shuffle", "'shuffle' stands twice"),
        ("zstd|lz4", "compressed bytes don't compress again"),
        ("int8|mapl:r=4", "a learned codec ('mapl') after a quantizer ('int8'); the order is"),
        ("mapl:r=4|resbm", "'mapl' and 'resbm' in one chain; a chain holds a learned codec"),
        ("mapl", "'mapl:r=16' is a good choice"),
        ("fwd=mapl:r=4;bwd=mapl:r=8", "'mapl:r=4' forward, 'mapl:r=8' backward"),
        ("fwd=mapl:r=4;bwd=int8", "no learned codec backward; a learned codec narrows both legs"),
        ("fwd=bf16", "no codec for the bwd leg"),
        ("bwd=bf16", "no codec for the fwd leg"),
        ("fwd=bf16;fwd=bf16", "not a leg"),
        ("fwd=bf16;bwd=bf16;", "not a leg"),
        ("forward=bf16;bwd=bf16", "not a leg"),
        ("forward=bf16", "not a leg"),
        ("bf16;bf16", "not a leg"),
        ("mapl:r=4;mapl:r=4", "not a leg"),
        ("x" * 300, "300 characters"),
    ],
)
def test_bad_spec_is_refused_with_the_remedy(spec: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_boundary(spec, learned=FAKES)
    assert says in str(caught.value)
