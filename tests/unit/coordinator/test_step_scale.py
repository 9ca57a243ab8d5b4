# SPDX-License-Identifier: Apache-2.0
"""Loss scale and exponent are functions of the log."""

import json

from shoal.coordinator.state import (
    EVENT_KINDS,
    Compacted,
    NumbersBackedOff,
    RolledBack,
    RunState,
    StepCommitted,
    apply,
    dump,
)
from shoal.coordinator.step_scale import (
    GROWTH_STEPS,
    INITIAL_LOSS_SCALE,
    MAX_COARSEN,
    MAX_LOSS_SCALE,
    StepScale,
    backed_off,
    coarser,
)
from shoal.protocol.scale import scale_exponent

TOKENS = 64


def committed(state: RunState, step: int, *, fp16: bool = True) -> RunState:
    """Commit `step` at the scale that it is to be computed with."""
    used = state.scales.of(
        step, tokens_per_step=TOKENS, recorded=step <= state.highest_step, fp16=fp16
    )
    record = StepCommitted(
        time_s=0.0, step=step, attempt=1, loss=1.0, validation_loss=None, grad_norm=1.0,
        clip_scale=1.0, learning_rate=0.1, scale_exponent=used.scale_exponent,
        loss_scale=used.loss_scale, num_tokens=TOKENS, sums_digests=(1,), contributions=({},),
        boundary_bytes=0, reduce_bytes=0, seconds=1.0,
    )  # fmt: skip
    return apply(record, state)


def run(state: RunState, steps: range, *, fp16: bool = True) -> RunState:
    for step in steps:
        state = committed(state, step, fp16=fp16)
    return state


def back_off(state: RunState, scale: StepScale, step: int) -> RunState:
    return apply(
        NumbersBackedOff(
            time_s=0.0, step=step, loss_scale=scale.loss_scale, coarsen=scale.coarsen, reason=""
        ),
        state,
    )


def test_only_fp16_scales_the_loss() -> None:
    state = run(RunState(), range(1, 3 * GROWTH_STEPS), fp16=False)
    assert {r.loss_scale for r in state.records.values()} == {1.0}
    assert state.scales.next == StepScale(INITIAL_LOSS_SCALE)


def test_the_loss_scale_doubles_after_good_steps_up_to_a_bound() -> None:
    state = run(RunState(), range(1, GROWTH_STEPS + 2))
    assert state.records[GROWTH_STEPS].loss_scale == INITIAL_LOSS_SCALE
    assert state.records[GROWTH_STEPS + 1].loss_scale == 2 * INITIAL_LOSS_SCALE
    state = run(state, range(GROWTH_STEPS + 2, 10 * GROWTH_STEPS))
    assert state.records[10 * GROWTH_STEPS - 1].loss_scale == MAX_LOSS_SCALE


def test_a_back_off_holds_for_the_step_and_counts_good_steps_anew() -> None:
    state = run(RunState(), range(1, 100))
    state = back_off(state, StepScale(256.0, 4), 100)
    state = run(state, range(100, 101 + GROWTH_STEPS))
    assert state.records[99].loss_scale == INITIAL_LOSS_SCALE
    assert state.records[100].loss_scale == 256.0
    assert state.records[100].scale_exponent == scale_exponent(TOKENS, 4)
    assert state.records[99 + GROWTH_STEPS].loss_scale == 256.0
    assert state.records[100 + GROWTH_STEPS].loss_scale == 512.0
    assert state.records[100 + GROWTH_STEPS].scale_exponent == scale_exponent(TOKENS, 4)


def test_a_recomputed_step_takes_what_its_record_says() -> None:
    state = run(RunState(), range(1, 11))
    state = back_off(state, StepScale(256.0, 8), 11)
    state = run(state, range(11, 21))
    back = apply(RolledBack(time_s=0.0, to_step=5, reason=""), state)
    for step in range(6, 21):
        used = back.scales.of(step, tokens_per_step=TOKENS, recorded=True, fp16=True)
        record = state.records[step]
        assert (used.loss_scale, used.scale_exponent) == (record.loss_scale, record.scale_exponent)
        back = committed(back, step)
    assert back.scales == state.scales


def test_recomputing_needs_no_records() -> None:
    state = back_off(run(RunState(), range(1, 11)), StepScale(256.0, 8), 11)
    state = run(state, range(11, 21))
    for scales in (state.scales, state.scales.since(8)):
        used = scales.of(10, tokens_per_step=TOKENS, recorded=True, fp16=False)
        assert (used.step, used.loss_scale) == (10, INITIAL_LOSS_SCALE)
        assert scales.of(11, tokens_per_step=TOKENS, recorded=True, fp16=False).loss_scale == 256.0
    assert len(state.scales.since(15).used) == 1


def test_compaction_keeps_the_scales_of_all_steps() -> None:
    state = back_off(run(RunState(), range(1, 11)), StepScale(256.0, 8), 11)
    state = run(state, range(11, 21))
    compacted = Compacted(time_s=0.0, state=json.loads(json.dumps(dump(state))))
    assert apply(compacted, RunState()).scales == state.scales


def test_backing_off_ends() -> None:
    scale: StepScale | None = StepScale(MAX_LOSS_SCALE)
    seen = []
    while scale is not None:
        seen.append(scale)
        scale = backed_off(scale)
    assert seen[-1].loss_scale == 1.0
    scale, seen = StepScale(), []
    while scale is not None:
        seen.append(scale)
        scale = coarser(scale)
    assert seen[-1].coarsen == MAX_COARSEN


def test_the_event_survives_the_log() -> None:
    event = NumbersBackedOff(time_s=1.0, step=2, loss_scale=0.5, coarsen=4, reason="x")
    assert EVENT_KINDS[event.kind].model_validate(event.model_dump(mode="json")) == event
