# SPDX-License-Identifier: Apache-2.0
"""NaN, infinity and overflows: whose they are, and what follows. Pure.

A task that gives bad numbers is executed again, on another replica where there is one, else on the
same node. Bad again, they belong to the run: the step is redone with a smaller loss scale or a
coarser fixed point where that can help, or the run pauses as diverged; nobody is to blame. Good
the second time, the first node is marked once the step is committed.

Nothing goes round in circles. At one scale a microbatch is executed `MAX_EXECUTIONS` times at most
and a step opened anew for numbers `MAX_REDOS` times; every back-off leaves less room for another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.coordinator.ledger_facts import Slot
from shoal.coordinator.step_scale import StepScale, backed_off, coarser
from shoal.protocol.ids import MicrobatchId, PeerId

MAX_EXECUTIONS = 3
MAX_REDOS = 8

SUMS = MicrobatchId(-1)
"""In a slot: not one microbatch, but a node's sums of the whole stage."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An execution that gave bad numbers."""

    slot: Slot
    peer_id: PeerId
    """Who executed it."""
    name: str
    dtype: str
    """What it computes in."""
    what: str
    """In words."""
    overflows: bool = False
    """Finite, but beyond the fixed point."""
    forward: bool = False
    """Activations or a loss, which no loss scale changes."""
    in_sums: bool = False
    """Its gradient may be in the node's sums: nobody else may add it in this attempt."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    step: int
    scale: StepScale
    """Of the attempt that is open."""
    replicas: Mapping[PeerId, str]
    """The stage's live participants and their dtypes."""
    recomputes: bool = False
    """The step was committed before: its record says with which scale."""


@dataclass(frozen=True, slots=True)
class Suspicions:
    """Findings of one step at one scale. Nobody is guilty yet."""

    findings: Mapping[Slot, tuple[Finding, ...]] = field(default_factory=dict)
    routes: Mapping[Slot, frozenset[PeerId]] = field(default_factory=dict)
    """Who is to execute a suspect microbatch next."""
    redos: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Lease the microbatch to one of these."""

    to: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class TakeOut:
    """Do the step without this node."""


@dataclass(frozen=True, slots=True)
class Redo:
    """Open the step anew, the suspect microbatches leased by `Suspicions.routes`."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """Record this scale, and open the step anew with it."""

    scale: StepScale
    reason: str


@dataclass(frozen=True, slots=True)
class Diverged:
    """Pause the run."""

    reason: str


Verdict = Move | TakeOut | Redo | BackOff | Diverged


def judge(
    finding: Finding, suspicions: Suspicions, around: Circumstances
) -> tuple[Suspicions, Verdict]:
    """What follows from an execution that gave bad numbers."""
    slot = finding.slot
    earlier = suspicions.findings.get(slot, ())
    found = (*earlier, finding)
    untried = _comparable(finding, around) - {f.peer_id for f in found}
    by_others = any(f.peer_id != finding.peer_id for f in earlier)
    if by_others or (earlier and not untried) or len(found) >= MAX_EXECUTIONS:
        return Suspicions(), _confirmed(found, around)
    after = replace(
        suspicions,
        findings={**suspicions.findings, slot: found},
        routes={**suspicions.routes, slot: frozenset(untried or {finding.peer_id})},
    )
    if untried and not finding.in_sums:
        return after, Move(frozenset(untried))
    if untried and (slot[0] == SUMS or _suspected(finding.peer_id, suspicions, elsewhere=slot)):
        return after, TakeOut()
    if after.redos >= MAX_REDOS:
        return Suspicions(), Diverged(
            _diverged(around.step, found, f"and so it went {MAX_REDOS} times over in this step")
        )
    return replace(after, redos=after.redos + 1), Redo()


def refuted(suspicions: Suspicions, computed_by: Mapping[Slot, tuple[PeerId, str]]) -> list[PeerId]:
    """Whose findings a committed step contradicts: the same task was executed again to good
    numbers. `computed_by` gives who counted for each slot, and in which dtype; another dtype has
    another range, and proves nothing."""
    guilty = {
        f.peer_id: None
        for slot, found in suspicions.findings.items()
        for f in found
        if (by := computed_by.get(slot)) is not None and (f.peer_id == by[0] or f.dtype == by[1])
    }
    return list(guilty)


def _helped_by_loss_scale(finding: Finding) -> bool:
    return finding.dtype == "fp16" and not (finding.forward or finding.overflows)


def _suspected(peer_id: PeerId, suspicions: Suspicions, *, elsewhere: Slot) -> bool:
    found = (f for slot, fs in suspicions.findings.items() if slot != elsewhere for f in fs)
    return any(f.peer_id == peer_id for f in found)


def _comparable(finding: Finding, around: Circumstances) -> set[PeerId]:
    """Replicas whose execution would say something about the first one. What overflows in fp16 at
    a loss scale does not in fp32, and the scale must come down all the same."""
    strict = _helped_by_loss_scale(finding)
    return {peer for peer, dtype in around.replicas.items() if not strict or dtype == finding.dtype}


def _confirmed(found: tuple[Finding, ...], around: Circumstances) -> BackOff | Diverged:
    last = found[-1]
    if around.recomputes:
        return Diverged(
            _diverged(
                around.step, found,
                "though the step was committed with the same scale before: a node computes other "
                "bits than then (docs/assumptions.md)",
            )
        )  # fmt: skip
    if last.overflows:
        scale = coarser(around.scale)
        if scale is None:
            return Diverged(_diverged(around.step, found, "the coarsest fixed point is too fine"))
        return BackOff(scale, f"{_told(found)}; the fixed point gets coarser")
    if any(_helped_by_loss_scale(f) for f in found):
        scale = backed_off(around.scale)
        if scale is None:
            return Diverged(_diverged(around.step, found, "the loss scale is 1 already"))
        return BackOff(scale, f"{_told(found)}; the loss scale becomes {scale.loss_scale:g}")
    return Diverged(_diverged(around.step, found, ""))


def _told(found: tuple[Finding, ...]) -> str:
    (microbatch, stage), last = found[-1].slot, found[-1]
    where = "sums" if microbatch == SUMS else f"microbatch {microbatch}"
    names = list(dict.fromkeys(f.name for f in found))
    by = " and ".join(names) if len(names) > 1 else f"{names[0]}, {len(found)} times"
    return f"{where} at stage {stage}, computed by {by}: {last.what}"


def _diverged(step: int, found: tuple[Finding, ...], why: str) -> str:
    return diverged_reason(step, f"{_told(found)}{'; ' if why else ''}{why}")


def diverged_reason(step: int, what: str) -> str:
    return f"the run diverged in step {step}: {what}. A new run needs a lower optimizer.lr"
