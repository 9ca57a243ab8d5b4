# SPDX-License-Identifier: Apache-2.0
"""1F1B: backward first, forwards within the window; and how large the window is."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.ids import MicrobatchId
from shoal.protocol.schedule import Task, credits_per_sender, in_flight_window, next_task

ids = st.sets(st.integers(0, 20).map(MicrobatchId))


def ids_of(*numbers: int) -> list[MicrobatchId]:
    return [MicrobatchId(n) for n in numbers]


def test_oldest_backward_goes_before_any_forward() -> None:
    task = next_task(forwards=ids_of(0), backwards=ids_of(5, 3), in_flight=ids_of(3, 5), window=8)
    assert task == Task("backward", MicrobatchId(3))


def test_oldest_forward_goes_while_the_window_has_room() -> None:
    forwards, in_flight = ids_of(7, 4), ids_of(1, 2)
    task = next_task(forwards=forwards, backwards=[], in_flight=in_flight, window=3)
    assert task == Task("forward", MicrobatchId(4))
    assert next_task(forwards=forwards, backwards=[], in_flight=in_flight, window=2) is None


def test_full_window_does_not_hold_up_backwards() -> None:
    assert next_task(
        forwards=ids_of(9), backwards=ids_of(1), in_flight=ids_of(1, 2), window=2
    ) == Task("backward", MicrobatchId(1))


@given(forwards=ids, backwards=ids, in_flight=ids, window=st.integers(0, 25))
def test_only_what_is_ready_is_chosen(
    forwards: set[MicrobatchId],
    backwards: set[MicrobatchId],
    in_flight: set[MicrobatchId],
    window: int,
) -> None:
    task = next_task(forwards=forwards, backwards=backwards, in_flight=in_flight, window=window)
    if task is None:
        assert not backwards
        assert not forwards or len(in_flight) >= window
    elif task.kind == "backward":
        assert task.microbatch == min(backwards)
    else:
        assert not backwards
        assert task.microbatch == min(forwards)
        assert len(in_flight) < window


def test_window_without_latency_is_plain_1f1b_and_four() -> None:
    assert [in_flight_window(s, 4) for s in range(4)] == [8, 7, 6, 5]


def test_window_covers_the_round_trip_to_the_last_stage() -> None:
    # (4 - 1) + ceil(2 * 2 * (0.3 + 0.05) / 0.4) + 4 = 3 + ceil(3.5) + 4
    assert in_flight_window(1, 4, hop_s=0.3, latency_s=0.05, period_s=0.4) == 11
    # The last stage waits for nobody.
    assert in_flight_window(3, 4, hop_s=9.0, latency_s=9.0, period_s=0.1) == 5


def test_a_replica_grants_credits_for_its_window_and_at_least_one() -> None:
    # The last of two stages has a window of 5.
    assert [credits_per_sender(1, 2, senders) for senders in (1, 2, 4, 9)] == [5, 3, 2, 1]
