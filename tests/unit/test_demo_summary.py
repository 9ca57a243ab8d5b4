# SPDX-License-Identifier: Apache-2.0
"""What a demo tells at its end."""

import json
from typing import Any

import pytest

from shoal.demo import parse_trouble
from shoal.demo_summary import Churn, FaultRecord, Summary, summarize
from shoal.protocol.errors import ConfigError

from .fake_demo_swarm import load_fake_view

fake_view = load_fake_view()


def fault(**fields: Any) -> FaultRecord:
    values: dict[str, Any] = {
        "step": 5, "moment": "prepared", "action": "kill", "node": "fern-mink", "stage": 1,
        "seconds": 0.0, "at_s": 9.5, "recovered_after_s": 2.0, **fields,
    }  # fmt: skip
    return FaultRecord(**values)


def summary(churn: Churn, **fields: Any) -> Summary:
    view = fake_view.training_view(
        10, total_steps=10, state="finished", weights_digest="ab" * 32,
        history=[fake_view.point(step) for step in range(1, 11)], **fields,
    )  # fmt: skip
    return summarize(view, churn, wanted_steps=10, seconds=33.0)


def test_faults_are_listed_and_counted_by_kind() -> None:
    faults = [fault(), fault(action="stop", recovered_after_s=7.5), fault(recovered_after_s=None)]
    told = summary(Churn(first_step=5, settled_step=7, nodes_killed=2, faults=faults))
    lines = told.lines()
    assert any(line.endswith("3 (2 kill, 1 stop)") for line in lines)
    assert any(line.endswith("4.8 s / 7.5 s") for line in lines)
    listed = json.loads(told.to_json())["faults"]
    assert [f["action"] for f in listed] == ["kill", "stop", "kill"]
    assert listed[2]["recovered_after_s"] is None
    assert (told.nodes_killed, told.killed_in_step, told.seconds) == (2, 5, 33.0)


def test_without_chaos_there_is_no_list_of_faults() -> None:
    told = summary(Churn(first_step=5, settled_step=8, nodes_killed=1, nodes_joined_late=1))
    assert "faults" not in json.loads(told.to_json())
    assert not any("faults" in line for line in told.lines())


def test_speed_is_told_before_during_and_after() -> None:
    speed = summary(Churn(first_step=5, settled_step=8)).tokens_per_s
    assert None not in (speed.before, speed.during, speed.after)
    speed = summary(Churn()).tokens_per_s
    assert (speed.during, speed.after) == (None, None)


def test_a_run_that_lost_something_has_failed() -> None:
    assert summary(Churn()).failure == ""
    assert "1 lost" in summary(Churn(), steps_lost=1).failure
    assert "2 were counted twice" in summary(Churn(), microbatches_double=2).failure


def test_a_node_is_killed_a_third_of_the_way_unless_told_otherwise() -> None:
    assert parse_trouble(None, None, 20) == 6
    assert parse_trouble("never", None, 20) is None
    assert parse_trouble("4", None, 20) == 4
    assert parse_trouble(None, 7, 20) is None


def test_kill_and_chaos_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--kill never and --chaos 7 exclude each other"):
        parse_trouble("never", 7, 20)
