# SPDX-License-Identifier: Apache-2.0
"""What the fault tests try, counted."""

from shoal.protocol.faults import Action, Moment

from .fault_cases import DEFAULT_PAIRS, NUM_PAIRS, PAIR_KINDS, one_a_moment, pair, singles

TRIED = set(Action) - {Action.POISON}  # test_numbers.py


def test_few_cases_try_every_moment_action_and_kind_of_pair() -> None:
    strikes = [case.strikes[0] for case in one_a_moment(singles())]
    assert sorted(strike.moment for strike in strikes) == sorted(Moment)
    assert {strike.action for strike in strikes} == TRIED
    assert {pair(seed).kind for seed in DEFAULT_PAIRS} == set(PAIR_KINDS)


def test_all_cases_try_every_action_at_every_moment_and_each_kind_of_pair_several_times() -> None:
    singles_ = singles()
    assert len({case.id for case in singles_}) == len(singles_) == 64
    for moment in Moment:
        assert len([c for c in singles_ if c.strikes[0].moment is moment]) >= len(TRIED) - 2
    pairs = [pair(seed) for seed in range(NUM_PAIRS)]
    assert all(sum(p.kind == kind for p in pairs) == 7 for kind in PAIR_KINDS)
    assert all(p.strikes[0].target != p.strikes[1].target for p in pairs)


def test_a_seed_draws_the_same_pair_again() -> None:
    assert [pair(seed) for seed in range(NUM_PAIRS)] == [pair(seed) for seed in range(NUM_PAIRS)]
