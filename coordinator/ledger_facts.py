# SPDX-License-Identifier: Apache-2.0
"""What enters a step's ledger, and what it answers."""

from dataclasses import dataclass

from shoal.protocol.ids import Incarnation, MicrobatchId, Stage

Slot = tuple[MicrobatchId, Stage]


@dataclass(frozen=True, slots=True)
class Lease:
    """One microbatch at one stage, seen from its holder."""

    microbatch: MicrobatchId
    upstream: Incarnation
    downstream: Incarnation
    downstream_done: bool
    upstream_done: bool


@dataclass(frozen=True, slots=True)
class ReceiptFacts:
    incarnation: Incarnation
    microbatch: MicrobatchId
    stage: Stage
    loss_sum: float | None = None
    busy_s: float = 0.0
    boundary_bytes: int = 0
    forward_bytes: int | None = None
    """Of `boundary_bytes`, what went to the next stage; None where nothing did."""
    backward_bytes: int | None = None
    """What went to the stage before."""
    digest: int = 0
    """Of the tensors and the loss that came of it; 0 says nothing."""


@dataclass(frozen=True, slots=True)
class ReduceRound:
    """A frozen manifest: which accumulators, holding which microbatches, make a stage's sum."""

    stage: Stage
    round: int
    parts: tuple[tuple[Incarnation, tuple[MicrobatchId, ...]], ...]


@dataclass(frozen=True, slots=True)
class PreparedFacts:
    incarnation: Incarnation
    round: int
    sums_digest: int
    squared_norms: tuple[float, ...]
    reduce_bytes: int = 0
    share_bytes: tuple[tuple[int, int], ...] = ()
    """(boundary, bytes) of the other sides' shares that it has fetched."""

    @property
    def sums(self) -> tuple[int, tuple[float, ...]]:
        """What replicas must agree on."""
        return self.sums_digest, self.squared_norms


@dataclass(frozen=True, slots=True)
class Dissent:
    """Replicas of a stage that have prepared different sums."""

    stage: Stage
    outvoted: tuple[Incarnation, ...]
    """Participants against the majority; empty when there is none to believe."""
