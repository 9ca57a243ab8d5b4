# SPDX-License-Identifier: Apache-2.0
"""Which sequences a microbatch holds: a pure function of (seed, step, microbatch).

A sequence is a window of seq_len + 1 tokens (inputs and the targets one further) with stride
seq_len over the concatenated tokens. Every epoch visits each sequence once, in an order given by
a keyed permutation of [0, N) that needs neither a table nor a state: a generalised Feistel
network (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) whose round function
is keyed BLAKE2b. Nothing here depends on a random generator of a library, so that two releases,
or a node and a reference run, draw the same samples. Changing a constant changes every run.
"""

from functools import lru_cache
from hashlib import blake2b
from math import isqrt
from struct import Struct

_ROUNDS = 6
_ROUND_INPUT = Struct("<BQ")
_KEY_INPUT = Struct("<QQ")
_TRAINING = b"shoal.train.v1"
_VALIDATION = b"shoal.valid.v1"


def num_sequences(total_tokens: int, seq_len: int) -> int:
    """How many windows fit: the last one needs a target for its last token."""
    return max(0, (total_tokens - 1) // seq_len)


def sequence_span(index: int, seq_len: int) -> tuple[int, int]:
    """Token offsets [start, stop) of a sequence, seq_len + 1 of them."""
    start = index * seq_len
    return start, start + seq_len + 1


def sample_indices(
    *,
    seed: int,
    step: int,
    microbatch: int,
    microbatches: int,
    microbatch_size: int,
    num_sequences: int,
) -> tuple[int, ...]:
    """The training sequences of one microbatch, one per row.

    Steps count from 1, microbatches from 0. No sequence repeats within an epoch of
    num_sequences samples; a microbatch may straddle two epochs.
    """
    if step < 1 or not 0 <= microbatch < microbatches:
        raise ValueError(
            f"step = {step}, microbatch = {microbatch}: steps count from 1, "
            f"microbatches from 0 to {microbatches - 1}"
        )
    first = ((step - 1) * microbatches + microbatch) * microbatch_size
    return tuple(
        permute(position % num_sequences, num_sequences, key=_key(seed, position // num_sequences))
        for position in range(first, first + microbatch_size)
    )


def validation_indices(
    microbatch: int, microbatch_size: int, num_sequences: int
) -> tuple[int, ...]:
    """The validation sequences of one microbatch: the same at every step and for every seed.

    Scattered, since the first few in order would all come from one document. They repeat only
    where fewer exist than are asked for.
    """
    key = _key(0, 0, _VALIDATION)
    first = microbatch * microbatch_size
    return tuple(
        permute(position % num_sequences, num_sequences, key=key)
        for position in range(first, first + microbatch_size)
    )


def permute(index: int, size: int, *, key: bytes) -> int:
    """A bijection of [0, size), chosen by `key` (at most 64 bytes)."""
    if not 0 <= index < size:
        raise ValueError(f"index = {index} is outside [0, {size})")
    # The smallest near-square grid: hardly any point lies outside, so cycles are walked rarely.
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        row, column = divmod(index, columns)
        for round_number in range(0, _ROUNDS, 2):
            row = (row + _round(key, round_number, column)) % rows
            column = (column + _round(key, round_number + 1, row)) % columns
        index = row * columns + column
        if index < size:
            return index


def _round(key: bytes, round_number: int, half: int) -> int:
    digest = blake2b(_ROUND_INPUT.pack(round_number, half), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")


@lru_cache(maxsize=64)
def _key(seed: int, epoch: int, purpose: bytes = _TRAINING) -> bytes:
    return blake2b(_KEY_INPUT.pack(seed, epoch), digest_size=32, person=purpose).digest()
