# SPDX-License-Identifier: Apache-2.0
"""The view cleans what peers wrote and stays within its bounds."""

import json

import pytest
from pydantic import ValidationError

from shoal.coordinator.dashboard.views import (
    MAX_EVENTS,
    MAX_HISTORY,
    MAX_TEXT,
    UPDATE_TAIL,
    EventLine,
    RunView,
    bounded,
    public,
    seconds_left,
    thin_history,
    update_after,
)

from .fake_view import node, point, training_view


def test_view_survives_json_unchanged() -> None:
    view = training_view()
    assert RunView.model_validate_json(view.model_dump_json()) == view


def test_unknown_fields_of_a_newer_coordinator_are_ignored() -> None:
    raw = json.loads(training_view().model_dump_json())
    raw["from_the_future"] = 1
    assert RunView.model_validate(raw) == training_view()


def test_peer_text_loses_escapes_overrides_and_excess() -> None:
    shown = node(0, device_name="\x1b[31mred\x07\u202egnp\ttab\nline " + "x" * 5000).device_name
    assert shown.startswith("[31mredgnp tab line x")
    assert len(shown) == MAX_TEXT
    assert shown.isprintable()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_never_reach_the_json(bad: float) -> None:
    view = training_view(loss=bad, nodes=[node(0, microbatches_per_s=bad)])
    assert view.loss is None
    assert view.nodes[0].microbatches_per_s == 0.0
    json.loads(view.model_dump_json(), parse_constant=pytest.fail)


def test_event_kind_must_be_a_plain_word() -> None:
    with pytest.raises(ValidationError):
        EventLine(time_s=1.0, kind="Not a word", text="")


def test_thinned_history_keeps_ends_order_and_validated_steps() -> None:
    points = [point(step) for step in range(1, 10_001)]
    thin = thin_history(points, limit=500)
    steps = [p.step for p in thin]
    assert len(thin) == 500
    assert (steps[0], steps[-1]) == (1, 10_000)
    assert steps == sorted(set(steps))
    assert all(p.validation_loss is not None for p in thin[1:-1])


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_thinning_to_almost_nothing_keeps_the_newest(limit: int) -> None:
    steps = [p.step for p in thin_history([point(s) for s in range(1, 8)], limit=limit)]
    assert len(steps) == limit
    assert steps[-1:] == ([7] if limit else [])


def test_bounded_view_thins_history_and_drops_old_events() -> None:
    events = [EventLine(time_s=float(i), kind="tick", text=str(i)) for i in range(MAX_EVENTS + 5)]
    view = training_view(history=[point(s) for s in range(1, MAX_HISTORY + 50)], events=events)
    result = bounded(view)
    assert len(result.history) == MAX_HISTORY
    assert [e.text for e in result.events][-1] == str(MAX_EVENTS + 4)
    assert len(result.events) == MAX_EVENTS


def test_public_view_has_no_join_link() -> None:
    assert training_view().join_link
    assert public(training_view()).join_link is None


def test_update_repeats_only_a_short_tail() -> None:
    update = update_after(training_view(132), 130)
    assert [p.step for p in update.history] == list(range(131 - UPDATE_TAIL, 133))


def test_time_left_follows_recent_steps_and_only_while_training() -> None:
    view = training_view(100)
    left = seconds_left(view)
    assert left is not None
    assert left == pytest.approx(100 * view.history[-1].seconds, rel=0.1)
    assert seconds_left(training_view(100, state="paused")) is None
