# SPDX-License-Identifier: Apache-2.0
"""Microbatches go where they are finished first."""

from collections import Counter

import pytest

from shoal.coordinator.router import spread
from shoal.protocol.ids import Incarnation, MicrobatchId

A, B, C = Incarnation(1), Incarnation(2), Incarnation(3)
IDS = [MicrobatchId(m) for m in range(12)]


def test_equal_replicas_share_equally() -> None:
    assert Counter(spread(IDS, {A: 2.0, B: 2.0, C: 2.0}).values()) == {A: 4, B: 4, C: 4}


def test_a_replica_twice_as_fast_gets_twice_as_much() -> None:
    assert Counter(spread(IDS, {A: 2.0, B: 1.0}).values()) == {A: 8, B: 4}


def test_a_replica_not_measured_yet_counts_as_the_mean_of_the_others() -> None:
    assert Counter(spread(IDS, {A: 1.0, B: 1.0, C: 0.0}).values()) == {A: 4, B: 4, C: 4}


def test_work_already_held_counts() -> None:
    assert Counter(spread(IDS[:4], {A: 1.0, B: 1.0}, {A: 4}).values()) == {B: 4}


def test_ties_go_to_the_lower_incarnation_whatever_the_order_given() -> None:
    assert spread(IDS, {A: 1.0, B: 1.0}) == spread(IDS, {B: 1.0, A: 1.0})
    assert spread(IDS[:1], {B: 1.0, A: 1.0}) == {MicrobatchId(0): A}


def test_nobody_can_hold_anything_of_an_empty_stage() -> None:
    with pytest.raises(ValueError, match="without replicas"):
        spread(IDS, {})
