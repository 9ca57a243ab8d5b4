# SPDX-License-Identifier: Apache-2.0
"""How learned codecs are spelt, and what doesn't fit a model."""

import pytest

from shoal.protocol.errors import ConfigError
from shoal.protocol.learned import LEARNED, MaplSpec, ResbmSpec, SubspaceSpec, learned_codec
from shoal.protocol.spec import RunSpec, parse_spec


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("mapl:r=16", "mapl:r=16"),
        ("mapl: r = 016 : anchors=factorized", "mapl:r=16"),
        ("mapl:proj=fixed:ra=8:r=4", "mapl:r=4:ra=8:proj=fixed"),
        ("mapl:r=4:grad=encoder_only:anchors=none", "mapl:r=4:anchors=none:grad=encoder_only"),
        ("resbm:b=16:form=boundary:identity=on", "resbm:b=16"),
        ("resbm:b=16:form=iota", "resbm:b=16:form=iota"),
        ("ssn:k=16:variant=reparam", "ssn:k=16"),
        ("linear:b=3", "linear:b=3"),
    ],
)
def test_spelling_is_canonical_and_parses_to_itself(written: str, canonical: str) -> None:
    learned = learned_codec(written)
    assert learned is not None
    assert learned.spec == canonical
    assert learned_codec(canonical) == learned


@pytest.mark.parametrize(
    "boundary",
    [
        "mapl:r=16",
        " mapl:r=16 | int8:g64 | zstd:3",
        "fwd=mapl:r=16|int8;bwd=mapl:r=16|int4",
        "fwd = mapl:r=16 ; bwd = mapl:r=16",
    ],
)
def test_it_is_found_within_a_boundary_spec(boundary: str) -> None:
    assert learned_codec(boundary) == MaplSpec("mapl:r=16", 16)


def test_a_boundary_without_one_has_none() -> None:
    for boundary in ("bf16", "fwd=bf16;bwd=int8:g64", "nonsense", ""):
        assert learned_codec(boundary) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mapl", "mapl needs r=N"),
        ("mapl:r", "mapl takes r=N, ra=N, anchors=factorized|full"),
        ("mapl:r=0", "whole number from 1"),
        ("mapl:r=9999999", "whole number"),
        ("mapl:r=x", "whole number"),
        ("mapl:r=²", "whole number"),
        ("mapl:r=4:r=4", "each once"),
        ("mapl:k=4", "mapl takes"),
        ("mapl:r=4:proj=muon", "one of spel, fixed, unaware"),
        ("mapl:r=4:anchors=full:ra=2", "ra is the rank"),
        ("mapl:r=4:proj=fixed:grad=full", "with proj=fixed it doesn't"),
        ("mapl:r=4:vq=2", "mapl takes"),
        ("resbm:b=4:form=hone", "one of boundary, iota"),
        ("ssn:r=4", "ssn takes k=N"),
        ("linear:b=4:form=iota", "linear takes b=N, each once"),
    ],
)
def test_what_is_misspelt_is_refused_with_what_would_be_right(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        learned_codec(spec)


@pytest.mark.parametrize(
    ("boundary", "message"),
    [
        ("mapl:r=65", "model.dim = 64; choose at most 64"),
        ("resbm:b=65|bf16", "model.dim = 64"),
        ("ssn:k=65", "model.dim = 64"),
        ("mapl:r=4:ra=65", "ra of at most 64"),
        ("mapl:r=none", "whole number"),
    ],
)
def test_a_run_whose_model_is_too_narrow_is_refused(boundary: str, message: str) -> None:
    raw = {"model": {"dim": 64}, "pipeline": {"boundary": boundary}}
    with pytest.raises(ConfigError, match=message) as caught:
        parse_spec(RunSpec, raw, "run.toml")
    assert "pipeline.boundary" in str(caught.value)
    assert "run.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("optimizer", "field"), [({"lr": 6.0}, "lr"), ({"name": "muon", "muon_lr": 6.0}, "muon_lr")]
)
def test_a_rate_beyond_the_retraction_is_refused(optimizer: dict[str, object], field: str) -> None:
    raw = {"optimizer": optimizer, "pipeline": {"boundary": "mapl:r=4"}}
    with pytest.raises(ConfigError, match=rf"optimizer\.{field} = 6\.0 .* at most 5"):
        parse_spec(RunSpec, raw, "run.toml")
    parse_spec(RunSpec, raw | {"pipeline": {"boundary": "mapl:r=4:proj=fixed"}}, "run.toml")


def test_anchors_keep_their_rank_where_the_wire_gets_narrow() -> None:
    assert MaplSpec("", 4).anchor_rank(128) == 32
    assert MaplSpec("", 4).anchor_rank(4096) == 256
    assert MaplSpec("", 256).anchor_rank(1024) == 256
    assert MaplSpec("", 512).anchor_rank(1024) == 512
    assert MaplSpec("", 4, rank=7).anchor_rank(128) == 7


def test_only_codecs_that_know_tokens_need_their_ids() -> None:
    assert MaplSpec("", 4).needs_token_ids
    assert not MaplSpec("", 4, anchors="none").needs_token_ids
    assert SubspaceSpec("", 4).needs_token_ids
    assert not ResbmSpec("", 4).needs_token_ids
    assert set(LEARNED) == {"mapl", "resbm", "ssn", "linear"}
