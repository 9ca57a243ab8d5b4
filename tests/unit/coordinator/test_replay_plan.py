# SPDX-License-Identifier: Apache-2.0
"""A replay is planned exactly when every input of every step is in a log within reach."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.boundary_sources import MAX_REPLAY_STEPS, BoundarySources, Rebuilt
from shoal.coordinator.replay_plan import Missing, NoReplay, ReplayPlan, plan_replay
from shoal.protocol.ids import Incarnation, PeerId, Stage

STAGES, MICROBATCHES = 4, 3
PEERS = [PeerId(f"peer-{i}") for i in range(3)]
NAMES = {Incarnation(i + 1): peer for i, peer in enumerate(PEERS)}

split = st.lists(st.integers(1, len(PEERS)), min_size=MICROBATCHES, max_size=MICROBATCHES)
steps = st.lists(st.lists(split, min_size=STAGES, max_size=STAGES), min_size=1, max_size=4)
rebuilds = st.lists(
    st.tuples(
        st.integers(0, STAGES - 1), st.sampled_from(PEERS), st.integers(1, 4), st.integers(1, 4)
    ),
    max_size=3,
)
reaches = st.fixed_dictionaries(
    {}, optional={peer: st.sampled_from([0, 0, 0, 1, 2, 3]) for peer in PEERS}
)


def sources_of(all_steps: list[list[list[int]]]) -> BoundarySources:
    sources = BoundarySources()
    for number, stages in enumerate(all_steps, 1):
        contributions = [
            {Incarnation(who): [m for m, w in enumerate(parts) if w == who] for who in parts}
            for parts in stages
        ]
        sources = sources.with_step(number, contributions, NAMES)
    return sources


@given(
    all_steps=steps, rebuilt=rebuilds, logs=reaches, stage=st.integers(0, STAGES - 1),
    base=st.integers(0, 3),
)  # fmt: skip
def test_a_plan_exists_exactly_when_every_input_is_covered(
    all_steps: list[list[list[int]]],
    rebuilt: list[tuple[int, PeerId, int, int]],
    logs: dict[PeerId, int],
    stage: int,
    base: int,
) -> None:
    base, to_step = min(base, len(all_steps)), len(all_steps)
    sources = sources_of(all_steps)
    for of_stage, peer_id, first, last in rebuilt:
        sources = sources.with_rebuilt(Rebuilt(Stage(of_stage), peer_id, first, last))
    plan = plan_replay(
        Stage(stage), num_stages=STAGES, num_microbatches=MICROBATCHES, base_step=base,
        to_step=to_step, sources=sources, logs=logs,
    )  # fmt: skip

    def holds(peer_id: PeerId, step: int, neighbour: int, microbatch: int) -> bool:
        computed = PEERS[all_steps[step - 1][neighbour][microbatch] - 1] == peer_id
        again = any(
            (r.stage, r.peer_id) == (neighbour, peer_id) and r.from_step <= step <= r.to_step
            for r in sources.rebuilt
        )
        return peer_id in logs and logs[peer_id] <= step and (computed or again)

    wanted = [
        (step, neighbour, m)
        for step in range(base + 1, to_step + 1)
        for neighbour in (stage - 1, stage + 1)
        if 0 <= neighbour < STAGES
        for m in range(MICROBATCHES)
    ]
    covered = all(any(holds(peer_id, *what) for peer_id in PEERS) for what in wanted)
    assert isinstance(plan, ReplayPlan) == covered
    if not isinstance(plan, ReplayPlan):
        assert isinstance(plan, Missing)
        return
    assert [s.step for s in plan.steps] == list(range(base + 1, to_step + 1))
    got = [
        (s.step, neighbour, m)
        for s in plan.steps
        for neighbour, parts in ((stage - 1, s.inputs), (stage + 1, s.gradients))
        for peer_id, ids in parts.items()
        for m in ids
        if holds(peer_id, s.step, neighbour, m)
    ]
    assert sorted(got) == sorted(wanted), "each input once, from somebody who has it"


def test_a_log_that_begins_later_does_not_reach() -> None:
    sources = sources_of([[[1, 1, 1], [2, 2, 2]], [[1, 1, 1], [2, 2, 2]]])

    def plan(reach: int) -> object:
        return plan_replay(
            Stage(1), num_stages=2, num_microbatches=3, base_step=0, to_step=2, sources=sources,
            logs={PEERS[0]: reach},
        )  # fmt: skip

    assert isinstance(plan(1), ReplayPlan)
    assert plan(2) == Missing(1, Stage(0), 0, (PEERS[0],))


def test_a_replay_that_is_too_long_is_not_planned() -> None:
    plan = plan_replay(
        Stage(0), num_stages=1, num_microbatches=1, base_step=0, to_step=MAX_REPLAY_STEPS + 1,
        sources=BoundarySources(), logs={},
    )  # fmt: skip
    assert isinstance(plan, NoReplay)
    assert f"at most {MAX_REPLAY_STEPS}" in plan.reason


def test_only_steps_after_the_snapshot_and_not_too_many_are_remembered() -> None:
    sources = BoundarySources()
    for step in range(1, MAX_REPLAY_STEPS + 100):
        sources = sources.with_step(step, [{Incarnation(1): [0]}], NAMES)
    assert len(sources.computed) == MAX_REPLAY_STEPS
    sources = sources.with_rebuilt(Rebuilt(Stage(0), PEERS[0], 1, 600))
    after = sources.after_snapshot(609)
    assert min(after.computed) == 610
    assert not after.rebuilt


def test_a_step_that_is_computed_again_is_looked_for_where_it_was_computed_last() -> None:
    sources = sources_of([[[1, 1, 1]], [[1, 1, 1]]]).with_rebuilt(Rebuilt(Stage(0), PEERS[0], 1, 2))
    sources = sources.with_step(1, [{Incarnation(2): [0], Incarnation(3): [1, 2]}], NAMES)
    assert list(sources.candidates(1, Stage(0), 2)) == [PEERS[2]]
    assert list(sources.candidates(2, Stage(0), 2)) == [PEERS[0]]
