# SPDX-License-Identifier: Apache-2.0
"""Boundary specs: canonical spelling, legs, and what is refused."""

import pytest

from shoal.compression.registry import codec_names, parse_boundary
from shoal.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("bf16", "bf16"),
        ("int8", "int8:g64"),
        ("int8:g064", "int8:g64"),
        (" int8 : g128 ", "int8:g128"),
        ("fwd=bf16;bwd=int8", "fwd=bf16;bwd=int8:g64"),
        ("bwd=int8 ; fwd = bf16", "fwd=bf16;bwd=int8:g64"),
        ("fwd=int8;bwd=int8:g64", "int8:g64"),
    ],
)
def test_spec_has_one_canonical_spelling(written: str, canonical: str) -> None:
    boundary = parse_boundary(written)
    assert boundary.spec == canonical
    assert parse_boundary(canonical).spec == canonical


def test_legs_get_their_own_codecs() -> None:
    boundary = parse_boundary("fwd=bf16;bwd=int8:g32")
    assert boundary.forward.spec == "bf16"
    assert boundary.backward.spec == "int8:g32"


def test_one_codec_serves_both_legs() -> None:
    boundary = parse_boundary("int8")
    assert boundary.forward.spec == boundary.backward.spec == "int8:g64"


@pytest.mark.parametrize("name", codec_names())
def test_every_registered_name_parses_without_parameters(name: str) -> None:
    assert parse_boundary(name).spec.startswith(name)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("int9", "did you mean 'int8'"),
        ("BF16", "did you mean 'bf16'"),
        ("zzz", "known: fp32, bf16, fp16, int8"),
        ("", "unknown codec ''"),
        ("bf16:g64", "bf16 takes no parameters"),
        ("int8:g4", "from 8 to 65536"),
        ("int8:g65537", "from 8 to 65536"),
        ("int8:g-64", "from 8 to 65536"),
        ("int8:64", "got '64'"),
        ("int8:g64:g64", "takes one parameter"),
        ("int8:g" + "9" * 30, "from 8 to 65536"),
        ("bf16|int8", "chains 2 quantizers"),
        ("int8|", "unknown codec ''"),
        ("fwd=bf16", "no codec for the bwd leg"),
        ("bwd=bf16", "no codec for the fwd leg"),
        ("fwd=bf16;fwd=bf16", "not a leg"),
        ("fwd=bf16;bwd=bf16;", "not a leg"),
        ("forward=bf16;bwd=bf16", "not a leg"),
        ("bf16;bf16", "not a leg"),
        ("x" * 300, "300 characters"),
    ],
)
def test_bad_spec_is_refused_with_the_remedy(spec: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_boundary(spec)
    assert says in str(caught.value)
