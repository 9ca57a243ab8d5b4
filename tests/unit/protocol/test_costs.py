# SPDX-License-Identifier: Apache-2.0
"""Cost arithmetic, against numbers worked out by hand and against a built model's tensors."""

import pytest
from torch import nn

from shoal.protocol import costs
from shoal.protocol.errors import ConfigError
from shoal.protocol.ids import Stage
from shoal.protocol.learned import learned_codec
from shoal.protocol.spec import (
    BatchSpec,
    ModelSpec,
    OptimizerSpec,
    PipelineSpec,
    RunSpec,
    StageSpec,
)

# d = 8, k = 4, f = 20, V = 50, T = 16
MODEL = ModelSpec(
    dim=8, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=20, seq_len=16, vocab_size=50
)
SPEC = RunSpec(
    model=MODEL,
    batch=BatchSpec(microbatches=6, microbatch_size=3),
    pipeline=PipelineSpec(stages=3),
)


def stage(index: int, start: int, end: int, num_stages: int = 3) -> StageSpec:
    return StageSpec(stage=Stage(index), num_stages=num_stages, start=start, end=end)


FIRST, MIDDLE, LAST = stage(0, 0, 1), stage(1, 1, 2), stage(2, 2, 4)


def test_layer_parameters_are_those_of_the_matrices_and_norms() -> None:
    layer = nn.ModuleList(
        [
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 4, bias=False),
            nn.Linear(8, 4, bias=False),
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 20, bias=False),
            nn.Linear(8, 20, bias=False),
            nn.Linear(20, 8, bias=False),
            nn.RMSNorm(8),
            nn.RMSNorm(8),
        ]
    )
    assert costs.layer_parameters(MODEL) == sum(p.numel() for p in layer.parameters()) == 688


def test_stage_parameters_add_up_to_the_model() -> None:
    parts = [costs.stage_parameters(MODEL, part) for part in (FIRST, MIDDLE, LAST)]
    assert parts == [688 + 400, 688, 2 * 688 + 408]
    assert sum(parts) == costs.model_parameters(MODEL) == 4 * 688 + 400 + 408


def test_forward_flops_are_two_per_matrix_weight_plus_attention() -> None:
    matrix_weights = 688 - 2 * 8
    assert costs.layer_forward_flops(MODEL) == 2 * matrix_weights + 4 * 16 * 8
    assert costs.stage_forward_flops(MODEL, FIRST) == costs.layer_forward_flops(MODEL)
    assert costs.stage_forward_flops(MODEL, LAST) == 2 * costs.layer_forward_flops(MODEL) + 800


def test_recomputation_costs_one_more_forward() -> None:
    forward = costs.stage_forward_flops(MODEL, MIDDLE)
    assert costs.stage_backward_flops(MODEL, MIDDLE) == 2 * forward
    assert costs.stage_backward_flops(MODEL, MIDDLE, recompute=True) == 3 * forward


def test_unresolved_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size = 0"):
        costs.model_parameters(ModelSpec())


def test_state_takes_32_bytes_per_parameter_whatever_the_window() -> None:
    for window in (1, 9):
        memory = costs.stage_memory(SPEC, MIDDLE, window=window, graphs_kept=1)
        assert memory.state == 32 * 688


def test_inputs_grow_with_the_window_and_graphs_with_those_kept() -> None:
    tokens = 3 * 16
    graph = tokens * 4 * (8 * 8 + 2 * 4 + 4 * 20 + 3 * 4)
    memory = costs.stage_memory(SPEC, MIDDLE, window=5, graphs_kept=2)
    assert memory.inputs == 5 * tokens * 4 * 8
    assert memory.graphs == 2 * graph
    assert costs.stage_memory(SPEC, MIDDLE, window=5, graphs_kept=0).graphs == graph
    assert costs.stage_memory(SPEC, MIDDLE, window=5, graphs_kept=99).graphs == 5 * graph
    assert costs.stage_memory(SPEC, LAST, window=5, graphs_kept=1).graphs == 2 * graph


def test_first_stage_keeps_token_ids_and_last_stage_needs_room_for_logits() -> None:
    tokens = 3 * 16
    first = costs.stage_memory(SPEC, FIRST, window=2, graphs_kept=1)
    last = costs.stage_memory(SPEC, LAST, window=2, graphs_kept=1)
    assert first.inputs == 2 * tokens * 8
    assert first.head == 0
    assert last.head == tokens * 4 * (3 * 50 + 2 * 8)


def test_retained_bytes_are_what_the_stage_sends_in_a_step() -> None:
    def retained(part: StageSpec) -> int:
        memory = costs.stage_memory(
            SPEC, part, window=1, graphs_kept=1, forward_bytes=100, backward_bytes=7
        )
        assert memory.total == (
            memory.state + memory.inputs + memory.graphs + memory.head + memory.retained
        )
        return memory.retained

    assert [retained(part) for part in (FIRST, MIDDLE, LAST)] == [600, 642, 42]


def test_every_byte_sent_is_received_and_counted_once() -> None:
    parts = (FIRST, MIDDLE, LAST)
    sent = sum(costs.sent_bytes(part, 100, 7) for part in parts)
    assert sent == sum(costs.received_bytes(part, 100, 7) for part in parts)
    assert costs.boundary_bytes_per_step(SPEC, 100, 7) == 6 * sent == 6 * 2 * 107


def test_one_stage_has_no_boundary() -> None:
    alone = RunSpec(model=MODEL, pipeline=PipelineSpec(stages=1))
    assert costs.boundary_bytes_per_step(alone, 100, 7) == 0
    assert costs.sent_bytes(stage(0, 0, 4, num_stages=1), 100, 7) == 0


def test_reduction_sends_both_phases_of_all_slices_but_ones_own() -> None:
    assert costs.reduce_bytes_per_replica(1000, 1) == 0
    assert costs.reduce_bytes_per_replica(1000, 2) == 5 * 1000
    assert costs.reduce_bytes_per_replica(1000, 4) == 7.5 * 1000


def test_step_is_paced_by_the_slowest_stage_after_the_first_microbatch() -> None:
    stages = [costs.StageTime(compute_s=1, wire_s=0.5), costs.StageTime(compute_s=2, wire_s=3)]
    assert stages[1].period_s == 3
    seconds = costs.step_seconds(
        stages, microbatches=9, replicas=2, hop_s=0.25, latency_s=0.5, reduce_s=10
    )
    assert seconds == 4 * 3 + (1 + 2) + 2 * 1 * 0.75 + 10


def test_graphs_are_kept_as_memory_allows() -> None:
    def need(graphs: int) -> int:
        return costs.stage_memory(SPEC, MIDDLE, window=5, graphs_kept=graphs).total

    fit = [costs.graphs_that_fit(SPEC, MIDDLE, need(g), window=5) for g in (1, 2, 3, 5)]
    assert fit == [0, 2, 3, 5]
    assert costs.graphs_that_fit(SPEC, MIDDLE, need(3) - 1, window=5) == 2
    assert costs.graphs_that_fit(SPEC, MIDDLE, 100 * need(5), window=5) == 5
    assert costs.graphs_that_fit(SPEC, MIDDLE, 0, window=5) == 0


# ---- learned codecs ----------------------------------------------------------------------


def with_codec(boundary: str, optimizer: str = "adamw") -> RunSpec:
    pipeline = PipelineSpec(stages=3, boundary=boundary)
    spec = SPEC.model_copy(update={"pipeline": pipeline})
    return spec.model_copy(update={"optimizer": OptimizerSpec.model_validate({"name": optimizer})})


def test_a_learned_codec_narrows_what_crosses() -> None:
    assert costs.boundary_shape(SPEC) == costs.dense_boundary_shape(SPEC) == (3, 16, 8)
    spec = with_codec("resbm:b=2|int8")
    assert costs.boundary_shape(spec) == (3, 16, 2)
    assert costs.dense_boundary_shape(spec) == (3, 16, 8)


def test_halves_are_parameters_of_their_stages_and_a_mirrored_one_counts_once_in_the_run() -> None:
    spec = with_codec("mapl:r=2:ra=3")
    learned = learned_codec(spec.pipeline.boundary)
    parts = [costs.stage_parameters(MODEL, part, learned) for part in (FIRST, MIDDLE, LAST)]
    anchors, projection = 50 * 3, 8 * 2
    assert parts == [
        688 + 400 + anchors + projection,
        688 + anchors + 2 * projection,
        2 * 688 + 408 + anchors + projection,
    ]
    assert costs.run_parameters(spec, (FIRST, MIDDLE, LAST)) == sum(parts) - 2 * projection
    assert costs.run_parameters(SPEC, (FIRST, MIDDLE, LAST)) == costs.model_parameters(MODEL)


def test_a_subspace_network_saves_parameters_where_boundaries_follow() -> None:
    learned = learned_codec("ssn:k=2")
    layer = 688 - (8 + 20) * (8 - 2)
    assert costs.stage_parameters(MODEL, FIRST, learned) == layer + 50 * 2
    assert costs.stage_parameters(MODEL, LAST, learned) == costs.stage_parameters(MODEL, LAST)
    dense = costs.layer_forward_flops(MODEL)
    saved = 2 * (8 + 20) * (8 - 2) - 2 * 2 * 8 * 2  # narrower matrices, and U after each
    halves = 2 * 2 * 8 * 2
    assert costs.stage_forward_flops(MODEL, MIDDLE, learned) == dense - saved + halves


def test_halves_cost_two_flops_per_weight() -> None:
    dense = costs.layer_forward_flops(MODEL)
    linear = costs.stage_forward_flops(MODEL, MIDDLE, learned_codec("linear:b=2"))
    assert linear == dense + 2 * (8 * 2 + 2 * 8)
    mapl = costs.stage_forward_flops(MODEL, MIDDLE, learned_codec("mapl:r=2:ra=3"))
    assert mapl == dense + 2 * (8 * 2 + 2 * 8 + 3 * 8)


def test_muons_matrices_take_four_bytes_less_and_frozen_tables_four_each() -> None:
    norms = 2 * 8
    muon = costs.state_bytes(with_codec("bf16", "muon"), MIDDLE)
    assert muon == 28 * (688 - norms) + 32 * norms
    frozen = costs.state_bytes(with_codec("mapl:r=2:anchors=static:proj=fixed"), MIDDLE)
    assert frozen == 32 * 688 + 4 * (50 * 8 + 2 * 8 * 2)


def test_inputs_in_flight_are_narrow_and_have_their_ids() -> None:
    tokens = 3 * 16
    for boundary, per_token in (("resbm:b=2", 4 * 2), ("mapl:r=2", 4 * 2 + 8), ("bf16", 4 * 8)):
        memory = costs.stage_memory(with_codec(boundary), MIDDLE, window=5, graphs_kept=1)
        assert memory.inputs == 5 * tokens * per_token
