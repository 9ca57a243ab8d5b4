# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a step. The coordinator computes it and records it at commit."""

import math

from shoal.protocol.spec import OptimizerSpec


def learning_rate(spec: OptimizerSpec, steps: int, step: int) -> float:
    """Linear warm-up, then a cosine down to `lr * min_lr_ratio`, reached in the last step.

    `step` counts from 1 to `steps`; past the end the rate stays at its minimum. Without
    `warmup_steps` a tenth of the steps warms up.
    """
    warmup = spec.warmup_steps or max(1, steps // 10)
    if step <= warmup:
        return spec.lr * step / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * cosine)
