# SPDX-License-Identifier: Apache-2.0
"""Where state comes from, when to wait and when to roll back, and what people are told."""

from dataclasses import replace

import pytest

from shoal.coordinator.recovery import (
    RECLAIM_S,
    RESTART_RECLAIM_S,
    LostStage,
    Readiness,
    keepable,
    lost_stages,
    may_return,
    obstacle,
    rollback_target,
    source,
)
from shoal.coordinator.state import RunState
from shoal.protocol.ids import PeerId, Stage
from shoal.protocol.proto import coordinator_pb2 as pb

from .test_state import committed

STATE = RunState(
    step=3, highest_step=3, records={3: committed(3, sums_digests=(30, 31))},
    weights_digests={3: (300, 301)},
)  # fmt: skip


@pytest.mark.parametrize(
    ("held", "stage"),
    [
        (pb.HeldState(stage=1, step=3, weights_digest=301), 1),
        (pb.HeldState(stage=1, step=3, weights_digest=300), None),
        (pb.HeldState(stage=2, step=3, weights_digest=301), None),
        (pb.HeldState(stage=1, step=2, weights_digest=1), None),
        (pb.HeldState(stage=1, step=4, weights_digest=1), None),
        (pb.HeldState(stage=1, step=2, has_prepared=True, prepared_digest=31), 1),
        (pb.HeldState(stage=1, step=2, has_prepared=True, prepared_digest=30), None),
        (pb.HeldState(stage=1, step=1, has_prepared=True, prepared_digest=31), None),
        (None, None),
    ],
)
def test_a_returning_node_keeps_only_the_runs_state(
    held: pb.HeldState | None, stage: int | None
) -> None:
    assert keepable(held, STATE, 2) == stage


def test_weights_that_were_not_recorded_are_kept_until_replicas_have_agreed() -> None:
    held = pb.HeldState(stage=0, step=3, weights_digest=1)
    assert keepable(held, replace(STATE, weights_digests={}), 2) == 0


def test_the_nearest_source_is_taken() -> None:
    assert source(has_donor=True, step=4, complete_steps=[4]) == pb.STATE_SOURCE_PEER
    assert source(has_donor=False, step=4, complete_steps=[4]) == pb.STATE_SOURCE_SNAPSHOT
    assert source(has_donor=False, step=0, complete_steps=[]) == pb.STATE_SOURCE_INIT
    assert source(has_donor=False, step=4, complete_steps=[2]) is None


def test_a_rollback_goes_to_the_newest_snapshot_before_the_step() -> None:
    assert rollback_target([2, 4, 9], 7) == 4
    assert rollback_target([4], 4) == 0
    assert rollback_target([], 7) == 0


LOST = LostStage(Stage(1), has_source=False, is_kept=False, is_taken=True)


@pytest.mark.parametrize(
    ("lost", "lost_for_s", "decision"),
    [
        (LOST, RECLAIM_S - 0.1, "wait"),
        (LOST, RECLAIM_S, "roll back"),
        (replace(LOST, may_return=False), 0.0, "roll back"),
        (replace(LOST, may_return=False, can_replay=True), 0.0, "replay"),
        (replace(LOST, can_replay=True), RECLAIM_S - 0.1, "wait"),
        (replace(LOST, can_replay=True), RECLAIM_S, "replay"),
        (replace(LOST, can_replay=True, is_taken=False), 60.0, "go on"),
        (replace(LOST, is_taken=False), 60.0, "go on"),
        (replace(LOST, is_kept=True), 60.0, "go on"),
        (replace(LOST, has_source=True), 60.0, "go on"),
    ],
)
def test_a_lost_stage_waits_for_its_holders_before_the_run_rolls_back(
    lost: LostStage, lost_for_s: float, decision: str
) -> None:
    assert lost_stages([lost], step=3, lost_for_s=lost_for_s) == decision


def test_one_stage_that_can_not_be_replayed_rolls_all_back() -> None:
    other = replace(LOST, stage=Stage(0), can_replay=True)
    assert lost_stages([other, LOST], step=3, lost_for_s=60.0) == "roll back"
    nobody_for_it = replace(LOST, is_taken=False)
    assert lost_stages([other, nobody_for_it], step=3, lost_for_s=60.0) == "replay"


def test_after_a_restart_of_the_coordinator_holders_have_more_time() -> None:
    lost_for_s = RECLAIM_S + 1
    decision = lost_stages([LOST], step=3, lost_for_s=lost_for_s, reclaim_s=RESTART_RECLAIM_S)
    assert decision == "wait"


def test_only_who_is_neither_here_nor_gone_for_good_may_return() -> None:
    fox, owl = PeerId("fox"), PeerId("owl")
    assert may_return([fox, owl], here=[fox], gone_for_good=[])
    assert not may_return([fox, owl], here=[fox], gone_for_good=[owl])
    assert not may_return([], here=[], gone_for_good=[])


def test_at_the_beginning_nothing_can_be_lost() -> None:
    assert lost_stages([LOST], step=0, lost_for_s=60.0) == "go on"


READY = Readiness(
    state=RunState(step=3, highest_step=3, snapshot_step=2),
    holders={Stage(0): 1, Stage(1): 1}, wanted=4, copying={}, awaited=[], pulling=[],
    last_leaving=[], lost_for_s=None,
)  # fmt: skip
NEW = RunState()
NOBODY = {Stage(0): 0, Stage(1): 0}
NO_1 = {Stage(0): 1, Stage(1): 0}


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        (replace(READY, state=replace(READY.state, paused="because")), "because; resume it with"),
        (replace(READY, holders=NO_1), "stage 1 needs a node; give the join link"),
        (replace(READY, holders=NO_1, copying={"fox": Stage(1)}), "fox is getting its state"),
        (
            replace(READY, holders=NOBODY, copying={"fox": Stage(1), "owl": Stage(0)}),
            "stages 0 and 1 need a node each: fox and owl are getting their state",
        ),
        (replace(READY, holders=NO_1, copying={"fox": Stage(0)}), "give the join link"),
        (replace(READY, holders=NO_1, lost_for_s=2.0, reclaim_s=3.0), "have 3 s to come back"),
        (replace(READY, holders=NO_1, lost_for_s=2.0), "the run goes back to snapshot 2"),
        (replace(READY, holders=NO_1, replays={Stage(1): "1 is replayed"}), "1 is replayed"),
        (
            replace(READY, holders=NOBODY, lost_for_s=9.0, replays={Stage(1): "1 is replayed"}),
            "1 is replayed; stage 0 has no node that holds step 3",
        ),
        (replace(READY, last_leaving=[("fox", Stage(1))]), "fox, the last node of stage 1, leaves"),
        (replace(READY, pulling=["fox", "owl"]), "fox and owl are getting the weights of step 3"),
        (replace(READY, awaited=["fox"]), "fox is getting the state of its stage"),
        (replace(READY, state=NEW), "2 of 4 nodes are ready for the first step"),
    ],
)
def test_what_keeps_the_next_step_from_opening_is_said(facts: Readiness, part: str) -> None:
    assert part in obstacle(facts)


def test_nothing_keeps_a_covered_run_from_going_on() -> None:
    assert obstacle(READY) == ""
    assert obstacle(replace(READY, state=replace(NEW, attempt=1))) == ""
