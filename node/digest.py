# SPDX-License-Identifier: Apache-2.0
"""A cheap hash of tensors on their device: against accidents, not against adversaries.

A tensor's bytes (little-endian, padded with zeros to whole words) are 32-bit words w_i; a leaf of
65,536 words hashes to sum(w_i * c_i) mod 2^64 with fixed odd 64-bit coefficients c_i, so a change
of one word always shows and the order matters. Leaves are chained on the host through a
bijective mix. Everything is integer arithmetic: the same on every device, in any batching.
"""

import functools
import hashlib
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_LEAF_WORDS = 1 << 16
_LEAVES_AT_ONCE = 16  # bounds the scratch to 8 MiB
_MASK = (1 << 64) - 1


def tensor_digest(tensor: Tensor) -> int:
    """Unsigned 64-bit hash of dtype, shape and bits. Any dtype of one or more whole bytes."""
    state = _hash_text(f"{tensor.dtype}{list(tensor.shape)}")
    words = _as_words(tensor)
    for part in torch.split(words, _LEAF_WORDS * _LEAVES_AT_ONCE):
        for leaf in _hash_leaves(part):
            state = _mix(state ^ (leaf & _MASK))
    return state


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Unsigned 64-bit hash of named tensors; sensitive to names and order."""
    state = 0
    for name, tensor in tensors:
        state = _mix(state ^ _hash_text(name))
        state = _mix(state ^ tensor_digest(tensor))
    return state


def _as_words(tensor: Tensor) -> Tensor:
    """The bytes as int32; copies only where length or alignment asks for it."""
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if octets.numel() % 4:
        octets = F.pad(octets, (0, -octets.numel() % 4))
    elif octets.storage_offset() % 4:
        octets = octets.clone()
    return octets.view(torch.int32)


def _hash_leaves(words: Tensor) -> list[int]:
    coefficients = _coefficients(words.device)
    whole = words.numel() // _LEAF_WORDS * _LEAF_WORDS
    hashes: list[int] = []
    if whole:
        leaves = words[:whole].view(-1, _LEAF_WORDS) * coefficients
        hashes += leaves.sum(dim=1).tolist()
    if whole < words.numel():
        rest = words[whole:]
        hashes.append(int((rest * coefficients[: rest.numel()]).sum().item()))
    return hashes


@functools.lru_cache(maxsize=16)
def _coefficients(device: torch.device) -> Tensor:
    """Odd pseudo-random int64, from SplitMix64 (Steele et al., OOPSLA 2014)."""
    z = np.arange(1, _LEAF_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)


def _mix(state: int) -> int:
    """A bijection of 64-bit integers: SplitMix64's next output."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
