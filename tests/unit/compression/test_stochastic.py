# SPDX-License-Identifier: Apache-2.0
"""The counter-based generator: known answers, chunks, and streams that differ."""

import dataclasses

import pytest
import torch

from shoal.compression.codec import CodecContext
from shoal.compression.stochastic import GAMMA, LANES, mix, stream_key, uniform, words

CONTEXT = CodecContext(run_seed=7, step=3, microbatch=1, boundary=0, leg="backward")


def test_words_are_splitmix64s() -> None:
    """The first outputs of SplitMix64 with state 1234567, as published with the reference code's
    ports (Rosetta Code, "Pseudo-random numbers/Splitmix64")."""
    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [word % 2**64 for word in words(1234567, 0, 5).tolist()] == known
    assert [mix((1234567 + (i + 1) * GAMMA) % 2**64) for i in range(5)] == known


@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 4096, 2**40 + 1])
def test_any_stretch_of_a_stream_is_known_without_the_rest(start: int) -> None:
    key, base = stream_key(CONTEXT), start - start % LANES
    whole = uniform(key, base, 64)
    assert torch.equal(uniform(key, start, 13), whole[start - base : start - base + 13])


def test_elements_are_the_words_lanes_lowest_first() -> None:
    word = words(99, 0, 1).item() % 2**64
    lanes = [(word >> (16 * i)) & 0xFFFF for i in range(4)]
    # As int16, so that the upper half of each lane's range comes first.
    signed = [lane - 65536 if lane >= 32768 else lane for lane in lanes]
    assert uniform(99, 0, 4).tolist() == [(lane + 32768.5) / 65536 for lane in signed]


def test_numbers_lie_strictly_between_zero_and_one_and_are_even() -> None:
    numbers = uniform(stream_key(CONTEXT), 0, 1 << 18)
    assert 0 < numbers.min() < 2.0**-12
    assert 1 - 2.0**-12 < numbers.max() < 1
    # 2^18 numbers: the mean's standard deviation is 0.29 / 2^9.
    assert abs(numbers.double().mean().item() - 0.5) < 5 * 0.2887 / 2**9
    counts = torch.histc(numbers, bins=16, min=0, max=1)
    assert ((counts - 2.0**14).abs() < 6 * 2.0**7).all()


@pytest.mark.parametrize(
    "change",
    [{"run_seed": 8}, {"run_seed": -7}, {"step": 4}, {"microbatch": 0}, {"boundary": 1},
     {"leg": "forward"}, {"step": 1, "microbatch": 3}],
)  # fmt: skip
def test_another_tensor_has_an_independent_stream(change: dict[str, object]) -> None:
    other = stream_key(dataclasses.replace(CONTEXT, **change))  # type: ignore[arg-type]
    ours, theirs = uniform(stream_key(CONTEXT), 0, 1 << 16), uniform(other, 0, 1 << 16)
    correlation = torch.corrcoef(torch.stack([ours, theirs]))[0, 1].item()
    assert abs(correlation) < 5 / 2**8
    shifted = torch.corrcoef(torch.stack([ours[LANES:], theirs[:-LANES]]))[0, 1].item()
    assert abs(shifted) < 5 / 2**8


def test_reading_a_stream_does_not_change_what_is_cached() -> None:
    first = words(5, 0, 100).clone()
    words(6, 0, 100)
    assert torch.equal(words(5, 0, 100), first)
