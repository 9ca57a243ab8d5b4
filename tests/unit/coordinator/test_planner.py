# SPDX-License-Identifier: Apache-2.0
"""Cut points and placement, against brute force on small cases."""

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.planner import (
    NodeFacts,
    Placement,
    StageNeed,
    cut_points,
    place,
    plan_cuts,
    stage_needs,
    stage_specs,
)
from shoal.protocol import costs
from shoal.protocol.errors import CapacityError, ConfigError
from shoal.protocol.ids import PeerId, Stage
from shoal.protocol.spec import BatchSpec, ModelSpec, PipelineSpec, RunSpec

# ---- cut points --------------------------------------------------------------------------


def brute_force(
    layer_costs: Sequence[int], stages: int, first: int, last: int, limits: Sequence[int]
) -> tuple[int, ...] | None:
    """`limits[s]` is the most layers that stage s holds."""
    layers = len(layer_costs)
    candidates = []
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        bounds = (0, *cuts, layers)
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
            continue
        loads = [sum(layer_costs[a:b]) for a, b in itertools.pairwise(bounds)]
        loads[0] += first
        loads[-1] += last
        candidates.append((max(loads), sum(load * load for load in loads), cuts))
    return min(candidates)[2] if candidates else None


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_cuts_equal_brute_force(data: st.DataObject) -> None:
    layer_costs = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    stages = data.draw(st.integers(1, len(layer_costs)))
    first, last = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    limits = data.draw(st.lists(st.integers(1, 8), min_size=stages, max_size=stages))
    expected = brute_force(layer_costs, stages, first, last, limits)

    def plan() -> tuple[int, ...]:
        return cut_points(
            layer_costs,
            stages=stages,
            first_extra=first,
            last_extra=last,
            fits=lambda stage: stage.end - stage.start <= limits[stage.stage],
        )

    if expected is None:
        with pytest.raises(CapacityError, match="more stages"):
            plan()
    else:
        assert plan() == expected


def test_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert cut_points([1] * 8, stages=2) == (4,)
    assert cut_points([1] * 8, stages=2, last_extra=4) == (6,)


def test_stages_that_do_not_set_the_pace_are_evened_out() -> None:
    """The last stage costs 100 anyway; the others still share their layers fairly."""
    assert cut_points([1] * 7, stages=3, last_extra=100) == (3, 6)


def test_cheapest_worst_stage_comes_before_evenness() -> None:
    """Stages of 2, 2, 5 and of 4, 4, 1 have equal sums of squares; the latter are faster."""
    assert cut_points([2, 2, 4, 1], stages=3) == (2, 3)


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_layers_or_none_are_refused(stages: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and 3"):
        cut_points([1, 1, 1], stages=stages)


MODEL = ModelSpec(num_layers=8, vocab_size=2048)


def test_planned_cuts_count_the_head_as_flops() -> None:
    spec = RunSpec(model=MODEL, pipeline=PipelineSpec(stages=4))
    (*_, last) = stage_specs(MODEL, plan_cuts(spec))
    big = MODEL.model_copy(update={"vocab_size": 50_000})
    (*_, last_of_big) = stage_specs(big, plan_cuts(spec.model_copy(update={"model": big})))
    assert last_of_big.end - last_of_big.start < last.end - last.start


def test_cuts_that_the_spec_fixes_are_taken() -> None:
    spec = RunSpec(model=MODEL, pipeline=PipelineSpec(stages=3, cuts=(1, 2)))
    assert plan_cuts(spec) == (1, 2)
    assert [(s.start, s.end) for s in stage_specs(MODEL, (1, 2))] == [(0, 1), (1, 2), (2, 8)]


def test_stage_needs_follow_the_cost_arithmetic() -> None:
    spec = RunSpec(model=MODEL, pipeline=PipelineSpec(stages=2), batch=BatchSpec(microbatches=3))
    first, last = stage_needs(spec, (4,), forward_bytes=100, backward_bytes=10)
    stage = stage_specs(MODEL, (4,))[1]
    assert (first.stage, last.stage) == (0, 1)
    assert last.cost == 3 * costs.stage_forward_flops(MODEL, stage) * spec.tokens_per_microbatch
    assert last.memory_bytes == (
        costs.stage_memory(
            spec, stage, window=3, graphs_kept=1, forward_bytes=100, backward_bytes=10
        ).total
    )
    never = spec.model_copy(update={"pipeline": PipelineSpec(stages=2, recompute="never")})
    kept = stage_needs(never, (4,), forward_bytes=100, backward_bytes=10)
    assert kept[1].memory_bytes > last.memory_bytes


# ---- placement ---------------------------------------------------------------------------


def node(name: str, flops: float = 1.0, memory: int = 100) -> NodeFacts:
    return NodeFacts(peer_id=PeerId(name), flops=flops, memory_bytes=memory)


def need(stage: int, cost: float = 1.0, memory: int = 10) -> StageNeed:
    return StageNeed(stage=Stage(stage), cost=cost, memory_bytes=memory)


def placed(
    nodes: Sequence[NodeFacts],
    stages: Sequence[StageNeed],
    current: Mapping[str, int] | None = None,
    *,
    wanted: int = 1,
) -> Placement:
    held = {PeerId(name): Stage(stage) for name, stage in (current or {}).items()}
    return place(nodes, stages, current=held, wanted_replicas=wanted)


def test_first_nodes_cover_every_stage_the_fastest_at_the_costliest() -> None:
    result = placed([node("a", 1), node("b", 3)], [need(0, cost=1), need(1, cost=5)])
    assert result.stage_of == {"a": 0, "b": 1}


def test_arriving_node_goes_to_the_weakest_stage() -> None:
    stages = [need(0, cost=1), need(1, cost=4)]
    nodes = [node("a", 2), node("b", 6), node("new")]
    assert placed(nodes, stages, {"a": 0, "b": 1}).stage_of["new"] == 1


def test_stage_below_the_wanted_replicas_comes_before_a_weaker_one() -> None:
    nodes = [node("a", 9), node("b", 1), node("c", 1), node("new")]
    current = {"a": 0, "b": 1, "c": 1}
    assert placed(nodes, [need(0), need(1)], current, wanted=2).stage_of["new"] == 0
    assert placed(nodes, [need(0), need(1)], current, wanted=1).stage_of["new"] == 1


def test_nobody_moves_while_every_stage_is_covered() -> None:
    nodes = [node("a", 100), node("b", 100), node("c", 100), node("d", 1)]
    current = {"a": 0, "b": 0, "c": 0, "d": 1}
    assert placed(nodes, [need(0), need(1)], current).stage_of == current


def test_spare_replica_moves_to_a_stage_left_empty() -> None:
    nodes = [node("a"), node("b"), node("c"), node("d"), node("e")]
    result = placed(nodes, [need(0), need(1), need(2)], {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1})
    moved = [n for n, s in result.stage_of.items() if s == 2]
    assert len(moved) == 1
    assert moved[0] in {"c", "d", "e"}, "the strongest stage gives one"
    assert "from stage 1 to 2" in result.reasons[PeerId(moved[0])]


def test_new_node_fills_the_empty_stage_so_that_nobody_moves() -> None:
    nodes = [node("a"), node("b"), node("new")]
    result = placed(nodes, [need(0), need(1)], {"a": 0, "b": 0})
    assert result.stage_of == {"a": 0, "b": 0, "new": 1}
    assert result.reasons == {}


def test_last_replica_of_a_stage_never_leaves_it_empty() -> None:
    result = placed([node("a"), node("b")], [need(0), need(1), need(2)], {"a": 0, "b": 1})
    assert result.stage_of == {"a": 0, "b": 1}


def test_big_node_makes_way_for_a_small_newcomer_when_only_so_all_stages_are_covered() -> None:
    stages = [need(0, memory=10), need(1, memory=80)]
    result = placed([node("big", memory=99), node("small", memory=20)], stages, {"big": 0})
    assert result.stage_of == {"big": 1, "small": 0}


def test_node_that_fits_no_stage_waits_and_hears_why() -> None:
    result = placed([node("a"), node("tiny", memory=5)], [need(0, memory=10)])
    assert result.stage_of == {"a": 0, "tiny": None}
    assert result.reasons == {"tiny": "allows 5 bytes; the smallest stage needs 10"}


def test_node_keeps_its_stage_when_its_limit_shrinks() -> None:
    assert placed([node("a", memory=5)], [need(0)], {"a": 0}).stage_of == {"a": 0}


def test_stage_held_under_another_plan_does_not_count() -> None:
    assert placed([node("a")], [need(0)], {"a": 7, "gone": 0}).stage_of == {"a": 0}


@st.composite
def swarms(draw: st.DrawFn) -> tuple[list[NodeFacts], list[StageNeed], dict[str, int]]:
    stages = [
        need(s, cost=draw(st.integers(1, 4)), memory=draw(st.integers(1, 4)))
        for s in range(draw(st.integers(1, 4)))
    ]
    nodes, current = [], {}
    for index in range(draw(st.integers(0, 5))):
        memory = draw(st.integers(0, 5))
        nodes.append(node(f"n{index}", flops=draw(st.integers(1, 4)), memory=memory))
        if draw(st.booleans()):
            fitting = [s.stage for s in stages if s.memory_bytes <= memory]
            if fitting:
                current[f"n{index}"] = draw(st.sampled_from(fitting))
    return nodes, stages, {name: int(stage) for name, stage in current.items()}


@settings(max_examples=150, deadline=None)
@given(swarm=swarms(), wanted=st.integers(1, 3), order=st.randoms(use_true_random=False))
def test_placement_covers_most_stages_with_fewest_moves(
    swarm: tuple[list[NodeFacts], list[StageNeed], dict[str, int]], wanted: int, order: object
) -> None:
    nodes, stages, current = swarm
    result = placed(nodes, stages, current, wanted=wanted).stage_of

    def score(stage_of: Mapping[PeerId, int | None]) -> tuple[int, int]:
        covered = {stage for stage in stage_of.values() if stage is not None}
        moves = sum(stage_of[PeerId(name)] != stage for name, stage in current.items())
        return (-len(covered), moves)

    choices = [
        [s.stage for s in stages if s.memory_bytes <= n.memory_bytes] or [None] for n in nodes
    ]
    best = min(
        score(dict(zip([n.peer_id for n in nodes], option, strict=True)))
        for option in itertools.product(*choices)
    )
    assert score(result) == best
    for facts, options in zip(nodes, choices, strict=True):
        assert result[facts.peer_id] in options, "every node that fits somewhere works"
    shuffled = list(nodes)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert placed(shuffled, stages, current, wanted=wanted).stage_of == result


@settings(max_examples=60, deadline=None)
@given(swarm=swarms(), flops=st.integers(1, 4))
def test_one_more_node_gives_the_best_bottleneck_that_it_can(
    swarm: tuple[list[NodeFacts], list[StageNeed], dict[str, int]], flops: int
) -> None:
    nodes, stages, current = swarm
    before = placed(nodes, stages, current).stage_of
    working = {str(name): int(stage) for name, stage in before.items() if stage is not None}
    arrived = [*(n for n in nodes if n.peer_id in working), node("new", flops=flops)]
    after = placed(arrived, stages, working).stage_of

    def bottleneck(stage_of: Mapping[str, int | None]) -> float:
        return min(
            sum(n.flops for n in arrived if stage_of[n.peer_id] == s.stage) / s.cost for s in stages
        )

    if len(set(working.values())) == len(stages):
        options = [{**working, "new": int(s.stage)} for s in stages]
        assert bottleneck({str(n): s for n, s in after.items()}) == max(map(bottleneck, options))
        assert all(after[PeerId(name)] == stage for name, stage in working.items())
