# SPDX-License-Identifier: Apache-2.0
"""The fixed-point scale of a step's gradient sums. Coordinator and nodes agree on it."""

TOTAL_EXPONENT = 62
"""Sums stay below 2^62: int64 with a bit to spare."""

MAX_TOKEN_GRADIENT_EXPONENT = 6
"""A per-token gradient element of up to 2^6 never overflows."""


def scale_exponent(tokens_per_step: int, coarsen: int = 0) -> int:
    """The exponent e with which a gradient g of the summed loss is added as round(g * 2^e).

    `coarsen` gives up that many low bits for range, after an overflow that was confirmed.
    """
    return (
        TOTAL_EXPONENT
        - MAX_TOKEN_GRADIENT_EXPONENT
        - (tokens_per_step - 1).bit_length()  # ceil(log2)
        - coarsen
    )


def coarsened(tokens_per_step: int, exponent: int) -> int:
    """The `coarsen` with which `scale_exponent` gives this exponent."""
    return scale_exponent(tokens_per_step) - exponent
