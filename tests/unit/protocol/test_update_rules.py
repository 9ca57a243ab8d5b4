# SPDX-License-Identifier: Apache-2.0
"""Which parameter is updated how."""

import pytest

from shoal.protocol.spec import OptimizerSpec, PipelineSpec, RunSpec
from shoal.protocol.tensors import TensorSpec
from shoal.protocol.update_rules import absent_state, state_kinds, update_rule

QUERY = TensorSpec("model.layers.0.self_attn.q_proj.weight", (8, 8))
NORM = TensorSpec("model.layers.0.input_layernorm.weight", (8,))
EMBEDDING = TensorSpec("model.embed_tokens.weight", (50, 8))
HEAD = TensorSpec("lm_head.weight", (50, 8))
ENCODER = TensorSpec("boundary.0.encoder.1.weight", (4, 8))
PROJECTION = TensorSpec("boundary.0.projection", (8, 4))
ANCHORS = TensorSpec("anchors.1.weight", (50, 4))
ALL = (QUERY, NORM, EMBEDDING, HEAD, ENCODER, PROJECTION, ANCHORS)


def make_run(optimizer: str, boundary: str = "mapl:r=4") -> RunSpec:
    return RunSpec(
        optimizer=OptimizerSpec.model_validate({"name": optimizer, "lr": 0.004, "muon_lr": 0.02}),
        pipeline=PipelineSpec(boundary=boundary),
    )


def methods(run: RunSpec) -> list[str]:
    return [update_rule(run, tensor).method for tensor in ALL]


def test_adamw_updates_everything_but_projections() -> None:
    assert methods(make_run("adamw")) == ["adamw"] * 5 + ["spel", "adamw"]


def test_muon_updates_the_matrices_of_layers_and_boundaries() -> None:
    expected = ["muon", "adamw", "adamw", "adamw", "muon", "spel", "adamw"]
    assert methods(make_run("muon")) == expected


def test_an_unaware_projection_is_a_matrix_like_others() -> None:
    for name, rate in (("adamw", 0.1), ("muon", 0.5)):
        rule = update_rule(make_run(name, "mapl:r=4:proj=unaware"), PROJECTION)
        assert rule.method == name
        assert rule.lr_ratio == pytest.approx(rate)
        assert not rule.decays


def test_rates_follow_the_steps_learning_rate() -> None:
    run = make_run("muon")
    assert update_rule(run, QUERY).lr_ratio == 5.0
    assert update_rule(run, HEAD).lr_ratio == 1.0
    assert update_rule(run, PROJECTION).lr_ratio == 0.5
    assert update_rule(make_run("adamw"), PROJECTION).lr_ratio == 0.1


def test_matrices_decay_but_norms_tables_of_tokens_and_projections_do_not() -> None:
    decaying = [tensor for tensor in ALL if update_rule(make_run("muon"), tensor).decays]
    assert decaying == [QUERY, HEAD, ENCODER]


def test_only_adamw_keeps_a_second_moment() -> None:
    assert state_kinds(make_run("adamw"), QUERY) == ("weights", "exp_avg", "exp_avg_sq")
    assert state_kinds(make_run("muon"), QUERY) == ("weights", "exp_avg")
    assert absent_state(make_run("muon"), ALL) == {
        "exp_avg_sq/model.layers.0.self_attn.q_proj.weight",
        "exp_avg_sq/boundary.0.encoder.1.weight",
        "exp_avg_sq/boundary.0.projection",
    }
