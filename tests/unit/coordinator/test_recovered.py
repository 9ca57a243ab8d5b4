# SPDX-License-Identifier: Apache-2.0
"""What losses have cost a run, in all and one by one."""

from dataclasses import replace

from shoal.coordinator.recovered import MAX_RECENT, Recovered, Recovery
from shoal.protocol.ids import Stage


def rolled_back(before: Recovered, from_step: int, time_s: float) -> Recovered:
    return before.with_rollback(from_step=from_step, to_step=3, time_s=time_s, reason="lost")


def replay(at_s: float) -> Recovery:
    return Recovery(time_s=at_s, stage=Stage(1), from_step=4, to_step=9, seconds=2.5, log_bytes=100)


def test_a_rollback_lasts_until_the_run_is_at_its_old_step_again() -> None:
    recovered = rolled_back(Recovered(), 9, 100.0)
    recovered = recovered.with_step(8, 104.0)
    assert (recovered.rollbacks, recovered.rollback_seconds) == (1, 0.0)
    assert recovered.recent[0].seconds is None
    recovered = recovered.with_step(9, 105.0)
    assert (recovered.rollbacks, recovered.rollback_seconds) == (1, 5.0)
    assert recovered.recent[0].seconds == 5.0
    assert recovered.with_step(10, 200.0) == recovered


def test_a_rollback_within_another_counts_its_time_once() -> None:
    recovered = rolled_back(rolled_back(Recovered(), 9, 100.0), 7, 103.0).with_step(9, 110.0)
    assert (recovered.rollbacks, recovered.rollback_seconds) == (2, 10.0)
    assert [r.seconds for r in recovered.recent] == [10.0, 7.0]
    assert replace(recovered, rollbacks=0, rollback_seconds=0.0, recent=()) == Recovered()


def test_a_replay_is_counted_and_remembered() -> None:
    recovered = Recovered().with_replay(replay(10.0)).with_replay(replay(20.0))
    assert (recovered.replays, recovered.replay_seconds, recovered.replay_bytes) == (2, 5.0, 200)
    assert recovered.recent == (replay(10.0), replay(20.0))


def test_only_the_newest_are_remembered_one_by_one() -> None:
    recovered = Recovered()
    for number in range(3 * MAX_RECENT):
        recovered = recovered.with_replay(replay(float(number)))
    assert recovered.replays == 3 * MAX_RECENT
    assert [r.time_s for r in recovered.recent] == [2 * MAX_RECENT + i for i in range(MAX_RECENT)]


def test_a_long_reason_is_cut() -> None:
    recovered = Recovered().with_rollback(from_step=2, to_step=1, time_s=0.0, reason="x" * 5000)
    assert len(recovered.recent[0].reason) == 200
