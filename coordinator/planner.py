# SPDX-License-Identifier: Apache-2.0
"""Which layers form which stage, and which node holds which stage. Pure functions.

Cuts are decided once, at launch, and hashed into the run. Placement is decided between steps,
whenever a node comes or goes; only it follows churn.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.protocol import costs
from shoal.protocol.errors import CapacityError, ConfigError
from shoal.protocol.ids import PeerId, Stage
from shoal.protocol.learned import learned_codec
from shoal.protocol.schedule import in_flight_window
from shoal.protocol.spec import ModelSpec, RunSpec, StageSpec

# ---- cut points --------------------------------------------------------------------------


def cut_points(
    layer_costs: Sequence[float],
    *,
    stages: int,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    fits: Callable[[StageSpec], bool] = lambda stage: True,
) -> tuple[int, ...]:
    """The first layer of every stage but the first, such that the costliest stage is as cheap as
    possible; among such cuts, those with the most even stages (least sum of squares), and among
    these the lexicographically smallest. Exact, by dynamic programming in O(stages · layers²).

    `first_extra` and `last_extra` are what embedding and head add to their stage. `fits` says
    whether some node can hold a stage. Give integers for exact ties. Raises `CapacityError` when
    no cuts fit.
    """
    layers = len(layer_costs)
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"pipeline.stages = {stages} for {layers} layers; choose between 1 and {layers}"
        )
    prefix: list[float] = [0]
    for cost in layer_costs:
        prefix.append(prefix[-1] + cost)

    def stage_cost(stage: int, start: int, end: int) -> float:
        spec = StageSpec(stage=Stage(stage), num_stages=stages, start=start, end=end)
        if not fits(spec):
            return math.inf
        extra = first_extra * spec.is_first + last_extra * spec.is_last
        return prefix[end] - prefix[start] + extra

    cost_of = {
        (stage, start, end): stage_cost(stage, start, end)
        for stage in range(stages)
        for start, end in _ranges(stage, stages, layers)
    }
    worst, _ = _cheapest(cost_of, stages, layers, combine=max, weigh=lambda cost: cost)
    if worst == math.inf:
        raise CapacityError(
            f"no way to cut {layers} layers into {stages} stages fits the memory of a node; "
            "use more stages, smaller microbatches, or pipeline.recompute = 'always'"
        )
    _, cuts = _cheapest(
        cost_of,
        stages,
        layers,
        combine=lambda one, rest: one + rest,
        weigh=lambda cost: cost * cost if cost <= worst else math.inf,
    )
    return cuts


def _ranges(stage: int, stages: int, layers: int) -> list[tuple[int, int]]:
    """Every (start, end) that leaves a layer for each stage before and after."""
    after = stages - 1 - stage
    starts = range(stage, layers - after) if stage else range(1)
    return [
        (start, end)
        for start in starts
        for end in (range(start + 1, layers - after + 1) if after else (layers,))
    ]


def _cheapest(
    cost_of: Mapping[tuple[int, int, int], float],
    stages: int,
    layers: int,
    *,
    combine: Callable[[float, float], float],
    weigh: Callable[[float], float],
) -> tuple[float, tuple[int, ...]]:
    """Combined weight and cuts of the best partition; the smallest cuts where several are best."""
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for stage in reversed(range(stages)):
        for start, end in _ranges(stage, stages, layers):
            value = weigh(cost_of[stage, start, end])
            if stage < stages - 1:
                value = combine(value, best[stage + 1, end][0])
            known = best.get((stage, start))
            if known is None or value < known[0]:
                best[stage, start] = (value, end)
    cuts: list[int] = []
    start = 0
    for stage in range(stages - 1):
        start = best[stage, start][1]
        cuts.append(start)
    return best[0, 0][0], tuple(cuts)


def plan_cuts(
    spec: RunSpec, fits: Callable[[StageSpec], bool] = lambda stage: True
) -> tuple[int, ...]:
    """The run's cuts: those that the spec fixes, or the ones that even out forward FLOPs."""
    if spec.pipeline.cuts is not None:
        return spec.pipeline.cuts
    model = spec.model
    return cut_points(
        [costs.layer_forward_flops(model)] * model.num_layers,
        stages=spec.pipeline.stages,
        last_extra=costs.head_forward_flops(model),
        fits=fits,
    )


def stage_specs(model: ModelSpec, cuts: Sequence[int]) -> tuple[StageSpec, ...]:
    bounds = (0, *cuts, model.num_layers)
    num_stages = len(cuts) + 1
    return tuple(
        StageSpec(stage=Stage(s), num_stages=num_stages, start=bounds[s], end=bounds[s + 1])
        for s in range(num_stages)
    )


# ---- placement ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeFacts:
    peer_id: PeerId
    flops: float
    """Measured, in FLOP/s."""
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class StageNeed:
    stage: Stage
    cost: float
    """FLOP per microbatch, forward and backward."""
    memory_bytes: int
    """The least that a replica must hold."""


def stage_needs(
    spec: RunSpec, cuts: Sequence[int], *, forward_bytes: int, backward_bytes: int
) -> tuple[StageNeed, ...]:
    """What a replica of each stage needs at the plain window, given a boundary tensor's encoded
    sizes. With `recompute = "never"` every graph in flight counts as held, else just one."""
    model, keep = spec.model, spec.pipeline.recompute == "never"
    learned = learned_codec(spec.pipeline.boundary)
    needs = []
    for stage in stage_specs(model, cuts):
        window = min(in_flight_window(stage.stage, stage.num_stages), spec.batch.microbatches)
        memory = costs.stage_memory(
            spec,
            stage,
            window=window,
            graphs_kept=window if keep else 1,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
        )
        flops = costs.stage_forward_flops(model, stage, learned)
        flops += costs.stage_backward_flops(model, stage, learned=learned)
        needs.append(
            StageNeed(
                stage=stage.stage,
                cost=flops * spec.tokens_per_microbatch,
                memory_bytes=memory.total,
            )
        )
    return tuple(needs)


@dataclass(frozen=True, slots=True)
class Placement:
    stage_of: Mapping[PeerId, Stage | None]
    """Every node given; None: it waits."""
    reasons: Mapping[PeerId, str]
    """Why a node waits, or why it moves from the stage that it held."""


def place(
    nodes: Sequence[NodeFacts],
    stages: Sequence[StageNeed],
    *,
    current: Mapping[PeerId, Stage],
    wanted_replicas: int,
) -> Placement:
    """Assign nodes to stages. Independent of the order in which nodes are given.

    First, as many stages as possible get a node, with as few nodes moved away from the stage they
    hold as possible: new nodes go first, then spare replicas of other stages. Otherwise nobody
    moves. Then every remaining new node, fastest first, goes to the stage that needs it most among
    those that fit its memory: stages below `wanted_replicas`, then the weakest throughput (members'
    FLOP/s over the stage's cost). A node keeps fitting the stage that it holds.

    Call it between steps: a move costs the mover its state.
    """
    ordered = sorted(nodes, key=lambda node: (-node.flops, node.peer_id))
    needs = {need.stage: need for need in stages}
    held = {n.peer_id: current[n.peer_id] for n in nodes if current.get(n.peer_id) in needs}
    stage_of: dict[PeerId, Stage | None] = {n.peer_id: held.get(n.peer_id) for n in ordered}
    reasons: dict[PeerId, str] = {}

    for stage, peer_id in _cover(_spare_first(ordered, needs, held), stages, held).items():
        if stage_of[peer_id] != stage:
            if peer_id in held:
                reasons[peer_id] = (
                    f"moves from stage {held[peer_id]} to {stage}, so that every stage has a node"
                )
            stage_of[peer_id] = stage

    flops: dict[Stage, float] = dict.fromkeys(needs, 0.0)
    members: dict[Stage, int] = dict.fromkeys(needs, 0)

    def add(node: NodeFacts, stage: Stage) -> None:
        flops[stage] += node.flops
        members[stage] += 1

    def urgency(need: StageNeed) -> tuple[bool, bool, float, Stage]:
        count = members[need.stage]
        throughput = flops[need.stage] / need.cost
        return (count > 0, count >= wanted_replicas, throughput, need.stage)

    for node in ordered:
        if (taken := stage_of[node.peer_id]) is not None:
            add(node, taken)
    for node in ordered:
        if stage_of[node.peer_id] is not None:
            continue
        fitting = [need for need in stages if need.memory_bytes <= node.memory_bytes]
        if fitting:
            chosen = min(fitting, key=urgency).stage
            stage_of[node.peer_id] = chosen
            add(node, chosen)
        else:
            least = min((need.memory_bytes for need in stages), default=0)
            reasons[node.peer_id] = (
                f"allows {node.memory_bytes:,} bytes; the smallest stage needs {least:,}"
            )
    return Placement(stage_of=stage_of, reasons=reasons)


def _spare_first(
    ordered: Sequence[NodeFacts], needs: Mapping[Stage, StageNeed], held: Mapping[PeerId, Stage]
) -> list[NodeFacts]:
    """New nodes, then the members of the strongest stage, and so on; else the given order."""
    throughput: dict[Stage, float] = dict.fromkeys(needs, 0.0)
    for node in ordered:
        if (stage := held.get(node.peer_id)) is not None:
            throughput[stage] += node.flops / needs[stage].cost

    def strength(node: NodeFacts) -> float:
        stage = held.get(node.peer_id)
        return math.inf if stage is None else throughput[stage]

    return sorted(ordered, key=strength, reverse=True)


def _cover(
    nodes: Sequence[NodeFacts], stages: Sequence[StageNeed], held: Mapping[PeerId, Stage]
) -> Mapping[Stage, PeerId]:
    """One node per stage for as many stages as possible, with the fewest nodes taken from the
    stage that they hold: minimum-cost bipartite matching by successive shortest augmenting paths
    (Bellman-Ford over stages). Ties go to the costliest stage and the node given first.
    """
    chosen: dict[Stage, PeerId] = {}
    for node in nodes:
        if (stage := held.get(node.peer_id)) is not None:
            chosen.setdefault(stage, node.peer_id)
    by_cost = sorted(stages, key=lambda need: (-need.cost, need.stage))
    while changes := _augment(chosen, nodes, by_cost, held):
        chosen |= changes
    return chosen


def _augment(
    chosen: Mapping[Stage, PeerId],
    nodes: Sequence[NodeFacts],
    stages: Sequence[StageNeed],
    held: Mapping[PeerId, Stage],
) -> Mapping[Stage, PeerId]:
    """Changes to `chosen` that cover one more stage with the fewest moves, then the shortest chain
    of stages that pass a node on; empty when no further stage can be covered."""
    stage_with = {peer_id: stage for stage, peer_id in chosen.items()}
    # (moves, chain length) of the cheapest way to leave this stage without its chosen node.
    distance: dict[Stage, tuple[int, int]] = {
        need.stage: (0, 0) for need in stages if need.stage not in chosen
    }
    taker: dict[Stage, tuple[Stage, PeerId]] = {}  # who takes this stage's node, and the node
    end: tuple[tuple[int, int], Stage, PeerId] | None = None

    def moves(node: NodeFacts, stage: Stage) -> int:
        return int(held.get(node.peer_id, stage) != stage)

    changed = True
    while changed:
        changed, end = False, None
        for need in stages:
            if need.stage not in distance:
                continue
            for node in nodes:
                holds = held.get(node.peer_id) == need.stage
                if chosen.get(need.stage) == node.peer_id or not (
                    holds or need.memory_bytes <= node.memory_bytes
                ):
                    continue
                num_moves, length = distance[need.stage]
                num_moves += moves(node, need.stage)
                donor = stage_with.get(node.peer_id)
                if donor is None:
                    if end is None or (num_moves, length) < end[0]:
                        end = ((num_moves, length), need.stage, node.peer_id)
                    continue
                through = (num_moves - moves(node, donor), length + 1)
                if donor not in distance or through < distance[donor]:
                    distance[donor] = through
                    taker[donor] = (need.stage, node.peer_id)
                    changed = True
    if end is None:
        return {}
    _, stage, peer_id = end
    changes = {stage: peer_id}
    while stage in taker:
        stage, peer_id = taker[stage]
        changes[stage] = peer_id
    return changes
