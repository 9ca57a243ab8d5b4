# SPDX-License-Identifier: Apache-2.0
"""Golden values: a change here changes the samples of every run, and needs a new spec version."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.sampling import (
    num_sequences,
    permute,
    sample_indices,
    sequence_span,
    validation_indices,
)

SHAPE = {"seed": 7, "microbatches": 8, "microbatch_size": 4, "num_sequences": 78_125}


def test_samples_keep_their_golden_values() -> None:
    assert sample_indices(step=1, microbatch=0, **SHAPE) == (43938, 6696, 25298, 24117)
    assert sample_indices(step=1, microbatch=1, **SHAPE) == (41455, 20340, 24244, 26563)
    assert sample_indices(step=30_000, microbatch=3, **SHAPE) == (16772, 51816, 9451, 52679)
    assert sample_indices(
        seed=2**63 - 1,
        step=10**9,
        microbatch=0,
        microbatches=1,
        microbatch_size=2,
        num_sequences=10**11 + 3,
    ) == (85752648378, 19452943258)


def test_validation_samples_keep_their_golden_values() -> None:
    assert validation_indices(0, 4, 1000) == (219, 319, 786, 582)
    assert validation_indices(1, 4, 1000) == (381, 399, 61, 587)
    assert validation_indices(0, 4, 3) == (2, 0, 1, 2)


def test_samples_are_the_same_in_another_process() -> None:
    program = (
        "from shoal.protocol.sampling import sample_indices\n"
        f"print(sample_indices(step=5, microbatch=2, **{SHAPE!r}))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert printed.strip() == str(sample_indices(step=5, microbatch=2, **SHAPE))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 600), key=st.binary(min_size=1, max_size=32))
def test_permutation_is_a_bijection_of_every_small_domain(size: int, key: bytes) -> None:
    assert sorted(permute(index, size, key=key) for index in range(size)) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 2**62), data=st.data())
def test_permutation_stays_within_a_huge_domain_without_collisions(
    size: int, data: st.DataObject
) -> None:
    indices = data.draw(st.sets(st.integers(0, size - 1), max_size=8))
    images = [permute(index, size, key=b"key") for index in indices]
    assert all(0 <= image < size for image in images)
    assert len(set(images)) == len(indices)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    sequences=st.integers(1, 300),
    microbatches=st.integers(1, 5),
    microbatch_size=st.integers(1, 5),
)
def test_an_epoch_visits_every_sequence_exactly_once(
    seed: int, sequences: int, microbatches: int, microbatch_size: int
) -> None:
    drawn: list[int] = []
    step = 0
    while len(drawn) < 2 * sequences:
        step += 1
        for microbatch in range(microbatches):
            drawn += sample_indices(
                seed=seed,
                step=step,
                microbatch=microbatch,
                microbatches=microbatches,
                microbatch_size=microbatch_size,
                num_sequences=sequences,
            )
    everything = list(range(sequences))
    assert sorted(drawn[:sequences]) == everything
    assert sorted(drawn[sequences : 2 * sequences]) == everything


def test_epochs_and_seeds_differ_in_order() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return [
            index
            for step in range(number * 10 + 1, number * 10 + 11)
            for index in sample_indices(
                seed=seed,
                step=step,
                microbatch=0,
                microbatches=1,
                microbatch_size=10,
                num_sequences=100,
            )
        ]

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0), list(range(100))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_permutation_scatters_neighbours_over_the_whole_domain() -> None:
    size = 10_000
    images = [permute(index, size, key=b"key") for index in range(1_000)]
    per_tenth = [sum(1 for image in images if image // 1_000 == tenth) for tenth in range(10)]
    # 100 expected in each; five standard deviations either way.
    assert all(50 < count < 150 for count in per_tenth)


def test_validation_never_repeats_before_all_were_drawn() -> None:
    drawn = [index for m in range(25) for index in validation_indices(m, 4, 100)]
    assert sorted(drawn) == list(range(100))


@given(total_tokens=st.integers(0, 5_000), seq_len=st.integers(1, 300))
def test_windows_tile_the_tokens_and_the_last_one_fits(total_tokens: int, seq_len: int) -> None:
    count = num_sequences(total_tokens, seq_len)
    spans = [sequence_span(index, seq_len) for index in range(count + 1)]
    assert all(stop - start == seq_len + 1 for start, stop in spans)
    assert all(
        stop == start + 1 for (_, stop), (start, _) in pairwise(spans)
    )  # neighbours share a token: a target here, an input there
    assert all(stop <= total_tokens for _, stop in spans[:count])
    assert spans[count][1] > total_tokens


@pytest.mark.parametrize(("step", "microbatch"), [(0, 0), (1, 8), (1, -1)])
def test_a_microbatch_outside_the_step_is_refused(step: int, microbatch: int) -> None:
    with pytest.raises(ValueError, match="steps count from 1"):
        sample_indices(step=step, microbatch=microbatch, **SHAPE)
