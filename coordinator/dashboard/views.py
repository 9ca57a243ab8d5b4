# SPDX-License-Identifier: Apache-2.0
"""The one public description of a run: what API, page, metrics and `shoal status --json` show.

Everything here may be read by strangers, except `join_link`. Texts and numbers that come from
peers are cleaned on the way in: no control characters, bounded lengths, no NaN or infinity (JSON
has neither, and one bad node must not blind everybody else).
"""

import math
import unicodedata
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from shoal.protocol.ids import PeerId, RunId

MAX_HISTORY = 2_000
MAX_EVENTS = 200
MAX_TEXT = 300
UPDATE_TAIL = 8
"""Points that an update repeats, for values that arrive after their step."""

RunState = Literal["waiting", "training", "paused", "draining", "finished", "failed"]
NodeState = Literal[
    "joining", "copying", "warming", "training", "ready", "paused", "leaving", "left", "fenced"
]
GONE: frozenset[str] = frozenset({"left", "fenced"})


def clean_text(value: Any) -> Any:
    """One line without control, format or bidirectional characters, at most `MAX_TEXT` long.

    A node chooses some of these texts, and terminals obey escape sequences."""
    if not isinstance(value, str):
        return value
    kept = (
        " " if character in "\t\r\n" else character
        for character in value[: 4 * MAX_TEXT]
        if character in "\t\r\n" or unicodedata.category(character) not in {"Cc", "Cf", "Cs"}
    )
    text = " ".join("".join(kept).split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite_or_zero(value: Any) -> Any:
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value


Text = Annotated[str, BeforeValidator(clean_text)]
Number = Annotated[float, BeforeValidator(_finite_or_zero)]
MaybeNumber = Annotated[float | None, BeforeValidator(_finite_or_none)]
Count = Annotated[int, Field(ge=0)]


class _View(BaseModel):
    # Unknown fields are ignored, so that `shoal status` reads a newer coordinator.
    model_config = ConfigDict(frozen=True)


class SpecSummary(_View):
    """The run spec in a line."""

    num_params: Count
    num_layers: Count
    dim: Count
    seq_len: Count
    vocab_size: Count
    num_stages: Count
    microbatches: Count
    """Per step."""
    tokens_per_step: Count
    boundary: Text
    """The codec on stage boundaries."""


class NodeView(_View):
    peer_id: PeerId
    name: Text
    incarnation: Count = 0
    stage: int | None = None
    state: NodeState
    tier: Literal["", "worker", "holder"] = ""
    """worker: it has its stage's weights, and not yet the optimizer's state."""
    leaves_within_s: MaybeNumber = None
    """What is left of its grace; None for a node that stays, or that gave itself no bound."""
    device: Text = "cpu"
    device_name: Text = ""
    pid: Count = 0
    address: Text = ""
    queue_depth: Count = 0
    """Forward and backward tasks that wait for the processor."""
    microbatches_per_s: Number = 0.0
    memory_bytes: Count = 0
    bytes_sent: Count = 0
    bytes_received: Count = 0
    waiting_for: Text = ""
    contributed_microbatches: Count = 0
    """Committed (microbatch, stage) receipts over the whole run."""
    contributed_share: Number = 0.0
    """Of all committed receipts, 0 to 1."""
    last_seen_s: Number = 0.0
    """Unix time of the last heartbeat; 0 before the first."""
    discovered_peers: Count = 0
    log_bytes: Count = 0
    """On its disk, of what it sent over boundaries since the newest snapshot."""
    log_oldest_step: Count = 0
    """With which its boundary log begins; 0 when that is empty."""
    marks: Count = 0
    """How often it sent something that was refused."""

    @property
    def is_gone(self) -> bool:
        return self.state in GONE


class StageView(_View):
    stage: Count
    layers: Text
    """ "0–1", or "2" for one layer."""
    parts: Text
    """ "embedding + layers 0–1"."""
    nodes: list[NodeView] = []


class TrafficView(_View):
    """What crossed a boundary in a step, of one kind, as the nodes measured it."""

    kind: Text
    """forward: activations. backward: gradients with respect to them. synchronization: gradients of
    what a learned codec holds on both sides."""
    encoded_bytes: Count
    bf16_bytes: Count | None = None
    """What the same tensors take in plain bf16; None for a kind that only a codec needs."""


class BoundaryView(_View):
    """The cut between two neighbouring stages, in the last step: training microbatches, each
    once."""

    from_stage: Count
    to_stage: Count
    traffic: list[TrafficView] = []
    """Kinds that nobody reported are left out."""

    @property
    def encoded_bytes(self) -> int:
        return sum(part.encoded_bytes for part in self.traffic)


class ReplayView(_View):
    """A lost stage whose state is being computed again."""

    stage: Count
    node: Text
    from_step: Count
    """The snapshot's; 0 is the beginning."""
    to_step: Count
    step: Count
    """How far it is."""
    seconds: Number
    """Since it was begun."""
    log_bytes: Count = 0
    """Read out of the neighbours' logs."""


class RecoveryView(_View):
    """A loss that was made good, by a replay or by going back."""

    kind: Literal["replay", "rollback"]
    time_s: Number
    """Unix time at which the stage was held again, or the run went back."""
    stage: Count | None = None
    """None for a rollback: every stage went back."""
    from_step: Count
    """A replay began there; a rollback happened there."""
    to_step: Count
    """A replay reached it; a rollback went back to it."""
    seconds: MaybeNumber = None
    """That it took, up to the step that the run was at; None while a rollback is being caught up
    with."""
    log_bytes: Count = 0
    reason: Text = ""

    @property
    def at_step(self) -> int:
        """The step that the run was at when it happened."""
        return self.to_step if self.kind == "replay" else self.from_step


class BackOffView(_View):
    """How often NaN or an overflow made the run redo a step with another scale, and what it has
    come to."""

    count: Count
    step: Count
    """Of the last one."""
    reason: Text
    loss_scale: Number
    """Now; 1 while nobody computes in fp16."""
    coarser_bits: Count
    """Now: low bits of the gradient sums given up for range."""


class StepPoint(_View):
    """One committed step."""

    step: Count
    loss: MaybeNumber
    """Mean over the step's tokens, in nats."""
    tokens_per_s: Number
    boundary_bytes: Count
    reduce_bytes: Count
    seconds: Number
    grad_norm: MaybeNumber
    learning_rate: Number
    validation_loss: MaybeNumber = None


class StandbyView(_View):
    """A coordinator that takes over when the leading one is gone."""

    address: Text
    connected: bool = False
    events_behind: Count = 0
    """Logged events that have yet to be sent to it, while it is connected."""


class EventLine(_View):
    """Something that happened, in plain words."""

    time_s: Number
    """Unix time."""
    kind: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")]
    """A stable word for machines: "joined", "left", "fenced", "committed", "snapshot", …"""
    text: Text


class RunView(_View):
    run_id: RunId
    name: Text
    spec_summary: SpecSummary
    state: RunState
    waiting_for: Text = ""
    """Why nothing moves and what would end it, in plain words; empty when something moves."""
    step: Count = 0
    """Committed steps."""
    total_steps: Count
    attempt: Count = 0
    """Of the open step: 1 at first, higher when it had to be redone."""
    receipts_done: Count = 0
    """Of the open step."""
    receipts_total: Count = 0
    receipts_taken: Count = 0
    """(Microbatch, stage) pairs computed since this coordinator began, withdrawn and recomputed
    ones too. What exceeds the committed ones was computed twice."""
    loss: MaybeNumber = None
    loss_first: MaybeNumber = None
    validation_loss: MaybeNumber = None
    tokens_per_s: Number = 0.0
    boundary_bytes_per_step: Count = 0
    reduce_bytes_per_step: Count = 0
    bytes_total: Count = 0
    steps_lost: Count = 0
    microbatches_missing: Count = 0
    microbatches_double: Count = 0
    started_s: Number = 0.0
    """Unix time of the launch."""
    now_s: Number = 0.0
    """Unix time at the coordinator when this view was made; after the end, the time it ended."""
    stages: list[StageView] = []
    nodes: list[NodeView] = []
    """All nodes ever seen, also those without a stage and those that left."""
    boundaries: list[BoundaryView] = []
    """Empty before the first step, and with one stage."""
    history: list[StepPoint] = []
    """Ascending by step, at most `MAX_HISTORY`."""
    events: list[EventLine] = []
    """Newest last, at most `MAX_EVENTS`."""
    log_bytes: Count = 0
    """Of all boundary logs that are attached."""
    log_budget_bytes: Count = 0
    """That each node may use for its log; 0 keeps none."""
    replaying: list[ReplayView] = []
    replays: Count = 0
    """Lost stages whose state was computed again out of their neighbours' logs."""
    replay_seconds: Number = 0.0
    replay_bytes: Count = 0
    """Read out of logs for that."""
    rollbacks: Count = 0
    """Losses after which every stage went back to a snapshot."""
    rollback_seconds: Number = 0.0
    """Until the run was at its old step again."""
    recoveries: list[RecoveryView] = []
    """The newest last; a few dozen at most."""
    back_offs: BackOffView | None = None
    """None while there was none."""
    coordinator: Text = ""
    """host:port at which nodes join; empty once the run has ended."""
    term: Count = 0
    """In which the coordinator leads, or claims to."""
    leads: bool = True
    """False while it collects promises, and once another coordinator leads."""
    standbys: list[StandbyView] = []
    weights_digest: Text | None = None
    snapshot_step: Count | None = None
    join_link: str | None = None
    """Only for the operator: whoever has it can join."""

    @property
    def live_nodes(self) -> list[NodeView]:
        return [node for node in self.nodes if not node.is_gone]


def thin_history(points: Sequence[StepPoint], limit: int = MAX_HISTORY) -> list[StepPoint]:
    """At most `limit` points: the first, the last, and evenly spread ones between, where a
    validated step wins over its neighbours."""
    if len(points) <= limit:
        return list(points)
    if limit <= 1:
        return list(points[-1:]) if limit == 1 else []
    inner = points[1:-1]
    buckets = limit - 2
    kept = [points[0]]
    for index in range(buckets):
        bucket = inner[index * len(inner) // buckets : (index + 1) * len(inner) // buckets]
        kept.append(
            next((p for p in bucket if p.validation_loss is not None), bucket[len(bucket) // 2])
        )
    return [*kept, points[-1]]


def bounded(view: RunView) -> RunView:
    """The view within the limits above."""
    if len(view.history) <= MAX_HISTORY and len(view.events) <= MAX_EVENTS:
        return view
    return view.model_copy(
        update={"history": thin_history(view.history), "events": view.events[-MAX_EVENTS:]}
    )


def public(view: RunView) -> RunView:
    """The view without what only the operator may see."""
    return view if view.join_link is None else view.model_copy(update={"join_link": None})


def update_after(view: RunView, last_step: int) -> RunView:
    """The view with only those history points that somebody who has seen `last_step` lacks (and
    a few before it, to be merged by step)."""
    first = len(view.history)
    while first > 0 and view.history[first - 1].step > last_step:
        first -= 1
    return view.model_copy(update={"history": view.history[max(0, first - UPDATE_TAIL) :]})


def seconds_left(view: RunView) -> float | None:
    """Estimated from the last 20 steps; None when there is nothing to estimate."""
    recent = sorted(point.seconds for point in view.history[-20:])
    if view.state != "training" or not recent:
        return None
    return recent[len(recent) // 2] * max(0, view.total_steps - view.step)
