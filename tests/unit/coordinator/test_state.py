# SPDX-License-Identifier: Apache-2.0
"""The reducer: what a log adds up to."""

from dataclasses import asdict

import pytest

from shoal.coordinator.quorum import Council
from shoal.coordinator.state import (
    EVENT_KINDS,
    AnyEvent,
    Event,
    NodeFenced,
    Paused,
    Resumed,
    RolledBack,
    RunCreated,
    RunState,
    SnapshotStored,
    StageAssigned,
    StepApplied,
    StepCommitted,
    StepOpened,
    TermOpened,
    apply,
    parse,
    replay,
)
from shoal.protocol.errors import StorageError
from shoal.protocol.ids import Incarnation, PeerId


def committed(step: int, **fields: object) -> StepCommitted:
    record = {
        "time_s": 1.0, "step": step, "attempt": 1, "loss": 2.0, "validation_loss": None,
        "grad_norm": 1.0, "clip_scale": 1.0, "learning_rate": 0.1, "scale_exponent": 40,
        "loss_scale": 1.0, "num_tokens": 32, "sums_digests": (1, 2),
        "contributions": ({1: (0, 1)}, {2: (0, 1)}), "boundary_bytes": 10, "reduce_bytes": 5,
        "seconds": 2.0,
    }  # fmt: skip
    return StepCommitted.model_validate({**record, **fields})


def after(*events: AnyEvent) -> RunState:
    state = RunState()
    for event in events:
        state = apply(event, state)
    return state


def test_a_committed_step_moves_the_run_on_and_starts_attempts_afresh() -> None:
    state = after(StepOpened(time_s=0, step=1, attempt=3), committed(1))
    assert (state.step, state.highest_step, state.attempt) == (1, 1, 0)


def test_the_first_record_of_a_step_stands_through_rollback_and_recomputation() -> None:
    state = after(
        committed(1), committed(2, loss=5.0), RolledBack(time_s=0, to_step=1, reason="lost")
    )
    assert (state.step, state.highest_step) == (1, 2)
    assert set(state.records) == {1, 2}
    state = apply(committed(2, loss=7.0), state)
    assert state.records[2].loss == 5.0
    assert (state.step, state.highest_step) == (2, 2)


def test_incarnations_are_never_used_again() -> None:
    assigned = StageAssigned(
        time_s=0, incarnation=Incarnation(4), peer_id=PeerId("p"), name="n", stage=0
    )
    state = after(assigned, NodeFenced(time_s=0, incarnation=Incarnation(4), reason="x"))
    assert state.last_incarnation == 4
    assert state.peers == {4: "p"}


def test_apply_leaves_its_argument_as_it_was() -> None:
    before = after(committed(1))
    copy = asdict(before)
    for event in (committed(2), StepApplied(time_s=0, step=1, weights_digests=(1, 2))):
        apply(event, before)
    assert asdict(before) == copy


def test_a_pause_ends_with_resume_and_is_kept_over_a_restart() -> None:
    assert after(Paused(time_s=0, reason="why")).paused == "why"
    assert after(Paused(time_s=0, reason="why"), Resumed(time_s=0)).paused is None


def test_replay_gives_back_what_was_logged() -> None:
    events: list[AnyEvent] = [
        RunCreated(time_s=0, run_digest="d"),
        committed(1),
        StepApplied(time_s=0, step=1, weights_digests=(7, 8)),
        SnapshotStored(time_s=0, step=1),
    ]
    logged = [(event.kind, event.model_dump(mode="json")) for event in events]
    state = replay(logged)
    assert state == after(*events)
    assert state.records[1].contributions == ({1: (0, 1)}, {2: (0, 1)})
    assert state.weights_digests == {1: (7, 8)}


def test_a_log_with_a_hole_is_read_as_it_is() -> None:
    state = after(committed(1), committed(3))
    assert (state.step, set(state.records)) == (3, {1, 3})


def test_every_kind_of_event_can_be_read_back() -> None:
    assert all(issubclass(cls, Event) for cls in EVENT_KINDS.values())
    assert EVENT_KINDS["step_committed"] is StepCommitted


def test_who_decides_before_the_first_commit_is_settled_by_the_first_opening() -> None:
    began = TermOpened(time_s=0, term=1, log_id="home")
    first = StepOpened(time_s=0, step=1, attempt=1, voters=(PeerId("p"), PeerId("q")))
    again = StepOpened(time_s=0, step=1, attempt=2, voters=(PeerId("r"),))
    state = after(began, first, again)
    assert state.council == Council(frozenset({PeerId("p"), PeerId("q")}), "home")
    assert state.council_before == state.council
    assert apply(committed(1, voters=("r",), log_id="home"), state).council.voters == {"r"}


@pytest.mark.parametrize(("kind", "payload"), [("of the future", {}), ("step_opened", {"step": 1})])
def test_an_event_of_another_release_is_named(kind: str, payload: dict[str, int]) -> None:
    with pytest.raises(StorageError, match=kind):
        parse(kind, payload)
