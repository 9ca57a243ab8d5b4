# SPDX-License-Identifier: Apache-2.0
"""How a tensor is cut into blocks that share a scale: along its values, or along one channel.

A tensor is `lines` of `length` values each. Flat, it is one line, in row-major order; by channel,
every index of the last dimension is a line, over all others ("tokens"). Blocks of `block` values
follow each other within a line; what is left over is a shorter block of its own. The blocks of
full length are the *body*, [lines · full, block], the rest is the *tail*, [lines, rest]; payloads
hold the body first.

By channel pays off in narrow tensors, such as those of a learned codec: 64 consecutive values of
a tensor of width 8 belong to 8 channels, which may differ in size by orders of magnitude.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import element_count

_CPU_CHUNK = 1 << 17
"""Values worked on at once on a CPU, so that what lies between two passes stays in its cache."""
_DEVICE_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class Blocks:
    lines: int
    length: int
    block: int

    @staticmethod
    def of(shape: Sequence[int], block: int, *, by_channel: bool) -> "Blocks":
        count = element_count(shape)
        if not by_channel or count == 0:
            return Blocks(1, count, block)
        width = shape[-1] if shape else 1
        return Blocks(width, count // width, block)

    @property
    def count(self) -> int:
        """Values."""
        return self.lines * self.length

    @property
    def num_full(self) -> int:
        """Blocks of the body."""
        return self.lines * (self.length // self.block)

    @property
    def rest(self) -> int:
        """Values in each block of the tail; 0 without one."""
        return self.length % self.block

    @property
    def num_blocks(self) -> int:
        return self.num_full + (self.lines if self.rest else 0)

    def ordered(self, values: Tensor) -> Tensor:
        """A contiguous tensor -> [count]: the body's values, then the tail's. May be a view."""
        if self.lines == 1:
            return values.view(-1)
        lines, covered = values.view(self.length, self.lines).t(), self.length - self.rest
        out = torch.empty(self.count, dtype=values.dtype, device=values.device)
        body, tail = torch.split(out, [self.lines * covered, self.lines * self.rest])
        body.view(self.lines, covered).copy_(lines[:, :covered])
        tail.view(self.lines, self.rest).copy_(lines[:, covered:])
        return out

    def restored(self, ordered: Tensor) -> Tensor:
        """The inverse of `ordered`: [count] in row-major order. May be a view."""
        if self.lines == 1:
            return ordered
        covered = self.length - self.rest
        body, tail = torch.split(ordered, [self.lines * covered, self.lines * self.rest])
        out = torch.empty_like(ordered)
        tokens = out.view(self.length, self.lines)  # transposed this way round, copies are fast
        tokens[:covered].copy_(body.view(self.lines, covered).t())
        tokens[covered:].copy_(tail.view(self.lines, self.rest).t())
        return out

    def chunks(self, device: torch.device) -> Iterator["Chunk"]:
        """What to work on at once. All but the last begin and end at an even value where `block`
        is even."""
        whole = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
        yield from _chunks(self.num_full, self.block, whole, 0, 0)
        if self.rest:
            body_values = self.num_full * self.block
            yield from _chunks(self.lines, self.rest, whole, self.num_full, body_values)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some blocks of one length, and where they and their values stand among all."""

    block: int
    blocks: slice
    values: slice

    def rows(self, ordered: Tensor) -> Tensor:
        """[blocks, values of a block], a view."""
        return ordered[self.values].view(-1, self.block)


def _chunks(
    num_blocks: int, block: int, whole: int, first_block: int, first_value: int
) -> Iterator[Chunk]:
    step = max(2, whole // block // 2 * 2)
    for start in range(0, num_blocks, step):
        stop = min(start + step, num_blocks)
        yield Chunk(
            block,
            blocks=slice(first_block + start, first_block + stop),
            values=slice(first_value + start * block, first_value + stop * block),
        )
