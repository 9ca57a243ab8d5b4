# SPDX-License-Identifier: Apache-2.0
"""The step that is open: what was fixed when it opened, and the record that it ends with."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.coordinator.boundary_traffic import SYNCHRONIZATION, traffic
from shoal.coordinator.ledger import StepLedger, exact_sum, loss_of
from shoal.coordinator.state import StepCommitted
from shoal.protocol.ids import Incarnation, Stage
from shoal.protocol.learning_rate import learning_rate
from shoal.protocol.spec import RunSpec

_CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class OpenStep:
    step: int
    attempt: int
    ledger: StepLedger
    opened_s: float
    scale_exponent: int
    loss_scale: float


def num_validation(spec: RunSpec, step: int, *, has_data: bool) -> int:
    """Validation microbatches that go along with a step."""
    every = spec.validation.every
    validates = has_data and every and (step - 1) % every == 0
    return spec.validation.microbatches if validates else 0


def step_record(spec: RunSpec, opened: OpenStep, *, now_s: float) -> StepCommitted:
    """The record of a step whose ledger is committable. Pure.

    Its `grad_norm` is not finite when the step diverged; then it must not be committed.
    """
    ledger = opened.ledger
    stages = [Stage(s) for s in range(ledger.num_stages)]
    sums, contributions = ledger.sums(), ledger.contributions()
    # The norm does not depend on how tensors are spread over stages.
    grad_norm = math.sqrt(exact_sum(n for s in stages for n in sums[s].squared_norms))
    clip, tokens = spec.optimizer.clip_norm, spec.tokens_per_microbatch
    training = range(ledger.num_microbatches)
    validation = range(len(training), len(training) + ledger.num_validation)

    crossed = traffic(ledger.receipts.values(), ledger.prepares(), ledger.num_stages)

    def mean_loss(ids: range) -> float:
        return loss_of(ledger.receipts, ids, stages[-1]) / (tokens * len(ids))

    return StepCommitted(
        time_s=now_s,
        step=opened.step,
        attempt=opened.attempt,
        loss=mean_loss(training),
        validation_loss=mean_loss(validation) if validation else None,
        grad_norm=grad_norm,
        clip_scale=min(1.0, clip / (grad_norm + _CLIP_EPS)) if clip else 1.0,
        learning_rate=learning_rate(spec.optimizer, spec.steps, opened.step),
        scale_exponent=opened.scale_exponent,
        loss_scale=opened.loss_scale,
        num_tokens=spec.tokens_per_step,
        sums_digests=tuple(sums[s].sums_digest for s in stages),
        contributions=tuple(
            {who: tuple(ids) for who, ids in contributions[s].items()} for s in stages
        ),
        boundary_bytes=sum(r.boundary_bytes for r in ledger.receipts.values())
        + sum(crossed.get(SYNCHRONIZATION, ())),
        reduce_bytes=sum(p.reduce_bytes for p in ledger.prepares()),
        traffic=crossed,
        seconds=max(0.0, now_s - opened.opened_s),
    )


def outvoted(digests: Mapping[Incarnation, int]) -> tuple[int | None, list[Incarnation]]:
    """What most replicas of a stage hold, and who holds something else. A tie loses all."""
    votes = Counter(digests.values()).most_common(2)
    if not votes or (len(votes) == 2 and votes[0][1] == votes[1][1]):
        return None, list(digests)
    return votes[0][0], [who for who, digest in digests.items() if digest != votes[0][0]]


def stalled(opened: OpenStep, names: Mapping[Incarnation, str]) -> str:
    """Whose answer a step without progress waits for, in plain words."""
    missing = Counter(
        (stage, opened.ledger.holder(microbatch, stage))
        for microbatch, stage in opened.ledger.missing()
    )
    if missing:
        parts = [
            f"{count} microbatch{'es' * (count > 1)} of {names.get(who, 'a lost node')} "
            f"at stage {stage}"
            for (stage, who), count in sorted(missing.items())[:4]
        ]
        return f"step {opened.step} waits for " + ", ".join(parts)
    late = [names.get(who, "a lost node") for who in opened.ledger.unprepared()[:4]]
    return f"step {opened.step} waits for the sums of {', '.join(late)}" if late else ""
