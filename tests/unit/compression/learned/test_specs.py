# SPDX-License-Identifier: Apache-2.0
"""Learned codecs in chains, and what they leave of a run's bytes."""

import pytest

from shoal.compression.registry import parse_boundary
from shoal.coordinator.check import CheckReport, check_run
from shoal.protocol.errors import ConfigError
from shoal.protocol.learned import learned_codec
from shoal.protocol.spec import RunSpec, parse_spec


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("mapl:r=64 | int8:g64 | zstd:3", "mapl:r=64|int8:g64|zstd:3"),
        ("resbm:b=16:form=iota", "resbm:b=16:form=iota|bf16"),
        ("fwd=ssn:k=8|int8;bwd=ssn:k=8|int4", "fwd=ssn:k=8|int8:g64;bwd=ssn:k=8|int4:g64"),
        ("linear: b=8 |fp32", "linear:b=8|fp32"),
    ],
)
def test_both_readers_of_a_chain_find_the_same_codec(written: str, canonical: str) -> None:
    boundary = parse_boundary(written)
    assert boundary.spec == canonical
    assert boundary.learned is not None
    assert boundary.learned == learned_codec(written) == learned_codec(canonical)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mapl", "mapl needs r=N"),
        ("int8|mapl:r=4", "after a quantizer"),
        ("mapl:r=4|ssn:k=4", "at most once"),
        ("fwd=mapl:r=4;bwd=mapl:r=8", "narrows both legs"),
        ("mapl:r=4:proj=best", "one of spel, fixed, unaware"),
    ],
)
def test_a_bad_chain_is_refused_with_its_reason(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_boundary(spec)


def report(boundary: str, **optimizer: object) -> CheckReport:
    raw = {
        "model": {"dim": 256, "vocab_size": 2048},
        "pipeline": {"stages": 4, "boundary": boundary},
        "optimizer": optimizer,
    }
    return check_run(parse_spec(RunSpec, raw, "run.toml"))


def test_check_counts_the_bytes_that_cross_against_the_dense_tensor() -> None:
    dense, narrow = report("bf16"), report("mapl:r=16")
    assert dense.ratio_bf16 == 1
    assert narrow.ratio_bf16 == 16
    assert narrow.boundary == "mapl:r=16|bf16"
    assert dense.boundary_bytes_per_step == 16 * narrow.boundary_bytes_per_step
    anchors, projections = 4 * 2048 * 64, 3 * 256 * 16
    assert narrow.parameters == dense.parameters + anchors + projections


def test_check_counts_muons_memory() -> None:
    adamw, muon = report("bf16"), report("bf16", name="muon")
    assert muon.parameters == adamw.parameters
    for a, b in zip(adamw.stages, muon.stages, strict=True):
        assert b.memory_bytes < a.memory_bytes
