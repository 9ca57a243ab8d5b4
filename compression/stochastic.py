# SPDX-License-Identifier: Apache-2.0
"""Random numbers for stochastic rounding: a function of which tensor and which element.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
figure 17) at a counter: word i of the stream with key k is mix(k + (i + 1) · γ) modulo 2^64. Any
element's number is known without those before it, so neither chunks nor threads nor the device
matter: only integer operations are used, all of which wrap alike. Four elements share a word, 16
bits each; the lowest bits are the first element's.
"""

import functools

import torch
from torch import Tensor

from shoal.compression.codec import CodecContext

GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
LANES = 4
LANE_BITS = 16


def mix(word: int) -> int:
    """SplitMix64's finalizer, on one 64-bit number."""
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)


def stream_key(context: CodecContext) -> int:
    """64 bits, another for every tensor of a run, and for the same tensor of another run."""
    key = 0
    leg = 0 if context.leg == "forward" else 1
    for field in (context.run_seed, context.step, context.microbatch, context.boundary, leg):
        key = mix((key + GAMMA) ^ (field & _MASK))
    return key


def words(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Words `start` … `start + count - 1` of the stream, as the int64 of the same bits."""
    out = _multiples(count, torch.device(device)) + _signed((key + (start + 1) * GAMMA) & _MASK)
    spare = torch.empty_like(out)
    _xor_shifted(out, 30, spare)
    out.mul_(_signed(_MIX_1))
    _xor_shifted(out, 27, spare)
    out.mul_(_signed(_MIX_2))
    _xor_shifted(out, 31, spare)
    return out


def uniform(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [count], for elements `start` … : odd multiples of 2^-17 in (0, 1), each as likely."""
    first, last = start // LANES, -(-(start + count) // LANES)
    lanes = words(key, first, last - first, device).view(torch.int16)
    skipped = start - first * LANES
    unit = lanes[skipped : skipped + count].to(torch.float32)
    # Exact: 17 significant bits at most.
    return unit.add_(2.0 ** (LANE_BITS - 1) + 0.5).mul_(2.0**-LANE_BITS)


def _xor_shifted(words: Tensor, bits: int, spare: Tensor) -> None:
    """words ^= words >> bits, the shift filling up with zeros."""
    torch.bitwise_right_shift(words, bits, out=spare)  # fills up with the sign
    spare.bitwise_and_((1 << (64 - bits)) - 1)
    words.bitwise_xor_(spare)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@functools.lru_cache(maxsize=4)
def _multiples(count: int, device: torch.device) -> Tensor:
    """i · γ for i < count. Chunks of a tensor share a few lengths; callers only read it."""
    return torch.arange(count, dtype=torch.int64, device=device) * _signed(GAMMA)
