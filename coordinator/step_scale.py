# SPDX-License-Identifier: Apache-2.0
"""With which loss scale and which fixed-point exponent a step is computed. Pure.

Both are functions of what is in the event log, so that a restarted coordinator goes on with them,
a step that is computed again uses what its record says, and a run that was disturbed uses the same
sequence as one that wasn't.
"""

from bisect import bisect_right
from dataclasses import dataclass, field, replace

from shoal.protocol.scale import coarsened, scale_exponent

INITIAL_LOSS_SCALE = 1024.0
MAX_LOSS_SCALE = 2.0**16
GROWTH_STEPS = 200
"""Committed steps at one loss scale before it is doubled."""

COARSEN_BITS = 4
MAX_COARSEN = 24
"""Room for gradients 2^24 times larger than any sane one. Beyond that the run has diverged."""

_MAX_CHANGES = 4096
_MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class StepScale:
    loss_scale: float = INITIAL_LOSS_SCALE
    """A power of two, at least 1: what a step with fp16 nodes multiplies its loss with."""
    coarsen: int = 0
    """Low bits of the fixed point given up for range."""


@dataclass(frozen=True, slots=True)
class UsedScale:
    """Committed steps from `step` on were computed so, up to the next entry."""

    step: int
    loss_scale: float
    scale_exponent: int


@dataclass(frozen=True, slots=True)
class BackOffNote:
    """For people."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class ScaleHistory:
    """Part of the run's state."""

    next: StepScale = field(default_factory=StepScale)
    """For the first step that was never committed."""
    good_steps: int = 0
    """Committed with the loss scale of `next` since it last changed."""
    used: tuple[UsedScale, ...] = ()
    """Ascending; an entry per change, the newest few thousand."""
    back_offs: int = 0
    """How often bad numbers made the run go on with a smaller or coarser scale."""
    last_back_off: BackOffNote | None = None

    def after_commit(
        self, step: int, *, loss_scale: float, exponent: int, tokens_per_step: int
    ) -> "ScaleHistory":
        """A step was committed for the first time."""
        used = self.used
        if not used or (used[-1].loss_scale, used[-1].scale_exponent) != (loss_scale, exponent):
            used = (*used, UsedScale(step, loss_scale, exponent))[-_MAX_CHANGES:]
        scale = replace(self.next, coarsen=coarsened(tokens_per_step, exponent))
        good_steps = self.good_steps
        if loss_scale == scale.loss_scale:  # else nobody computed in fp16: it was not tried
            good_steps += 1
        if good_steps >= GROWTH_STEPS and scale.loss_scale < MAX_LOSS_SCALE:
            scale, good_steps = replace(scale, loss_scale=2 * scale.loss_scale), 0
        return replace(self, next=scale, good_steps=good_steps, used=used)

    def after_back_off(self, scale: StepScale, back_off: BackOffNote) -> "ScaleHistory":
        last = replace(back_off, reason=back_off.reason[:_MAX_REASON_CHARS])
        return replace(
            self, next=scale, good_steps=0, back_offs=self.back_offs + 1, last_back_off=last
        )

    def since(self, step: int) -> "ScaleHistory":
        """Without what concerns only steps before `step`."""
        first = max(0, bisect_right(self.used, step, key=lambda entry: entry.step) - 1)
        return replace(self, used=self.used[first:])

    def of(self, step: int, *, tokens_per_step: int, recorded: bool, fp16: bool) -> UsedScale:
        """What to compute `step` with. `recorded`: it was committed before. `fp16`: somebody
        computes in it; nobody else needs a loss scale."""
        if recorded:
            index = bisect_right(self.used, step, key=lambda entry: entry.step) - 1
            if index >= 0:
                return replace(self.used[index], step=step)
        # A power of two: undone exactly, so that fp32 nodes compute the same without it.
        loss_scale = self.next.loss_scale if fp16 else 1.0
        return UsedScale(step, loss_scale, scale_exponent(tokens_per_step, self.next.coarsen))


def backed_off(scale: StepScale) -> StepScale | None:
    """Half the loss scale; None at 1."""
    if scale.loss_scale <= 1.0:
        return None
    return replace(scale, loss_scale=scale.loss_scale / 2)


def coarser(scale: StepScale) -> StepScale | None:
    """A coarser fixed point; None at the bound."""
    if scale.coarsen + COARSEN_BITS > MAX_COARSEN:
        return None
    return replace(scale, coarsen=scale.coarsen + COARSEN_BITS)
