# SPDX-License-Identifier: Apache-2.0
"""Attached nodes, as the coordinator knows them. Soft state: it comes back when nodes re-attach."""

import asyncio
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.coordinator.replay_plan import ReplayProgress
from shoal.coordinator.transfers import Part, Transfer, Version
from shoal.protocol.deadlines import adaptive_s
from shoal.protocol.ids import NOBODY, Incarnation, PeerId, Stage
from shoal.protocol.proto import coordinator_pb2, types_pb2

SessionState = Literal["attached", "copying", "warming", "ready", "leaving"]
"""copying: it gets the whole state of its stage. warming: it gets the weights of some step while
training goes on. ready, leaving: it has a state; `tier` says which."""

Tier = Literal["holder", "worker", "promoted"]
"""promoted: a worker that has the moments too, and has yet to prove it with its first own apply."""

_LEASE_LIMIT = 4.0
_MOST_BEAT_S = 2.0

MAX_OUTBOX = 1000
"""Commands that wait for one node to read them; there are a handful in a step."""


def lease_timeout_s(intervals: Sequence[float], *, least_s: float) -> float:
    """How long a node may be silent before it is fenced. Pure.

    The median interval between its heartbeats plus eight times their median deviation, between
    `least_s` and four times that: a loaded machine beats irregularly, and slow is not dead.
    """
    return adaptive_s(
        intervals, least_s=least_s, most_s=_LEASE_LIMIT * least_s, unknown_s=2 * least_s
    )


def sane(number: float) -> float:
    """A measurement that a node sent: finite and not negative, else 0 (not measured)."""
    return number if math.isfinite(number) and number >= 0 else 0.0


@dataclass(eq=False, slots=True)
class Session:
    """One node's session, from its Hello to the end of the stream."""

    peer_id: PeerId
    name: str
    hello: coordinator_pb2.Hello
    attached_s: float
    outbox: "asyncio.Queue[coordinator_pb2.Command | None]" = field(default_factory=asyncio.Queue)
    """Commands to send; None ends the session."""

    # Its place in the run.
    state: SessionState = "attached"
    incarnation: Incarnation = NOBODY
    stage: Stage | None = None
    last_incarnation: Incarnation = NOBODY
    """Its assignment, or the one that it had last; for display."""
    last_stage: Stage | None = None
    step: int = -1
    """Committed steps in the node's state, once it is ready; before, those it is told to get."""
    weights_digest: int = 0
    """As the node reports it, at `step`."""
    assigned_s: float = 0.0
    keeps: bool = False
    """It was assigned the state that it held already."""
    owed_commit: bool = False
    """It holds the sums of a committed step, and was told to apply them."""
    tier: Tier = "holder"
    is_warm: bool = False
    """Warming, and has its weights."""
    pull_since_s: float | None = None
    """When it was told to pull the weights of the run's step."""
    pulls_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """Seconds that its pulls of weights took."""
    promoted_at: int = -1
    """The step whose state it had when it was promoted."""
    setbacks: int = 0
    """How often it didn't keep up as a worker."""
    warms_up_after_s: float = 0.0
    """When it may warm up again."""
    transfers: list[Transfer] = field(default_factory=list)
    """State that it is getting from replicas."""
    pinned: frozenset[Version] = frozenset()
    """Versions of its own state that it was told to serve."""
    bad_donors: set[PeerId] = field(default_factory=set)
    """Whose copies turned out wrong."""
    replay: ReplayProgress | None = None
    """It computes a lost stage's state again."""
    failures: int = 0
    snapshot_failed_s: float = -math.inf
    """When it said last that it could not store its stage; and why."""
    snapshot_trouble: str = ""
    farewell: str | None = None
    """Why the node wants to leave, once it said so."""
    leave_by_s: float | None = None
    """When it is gone at the latest, by the coordinator's clock."""
    grace_s: float = 0.0
    dismissed: bool = False
    """It was let go for good."""
    process_gone: bool = False
    """Its session is over, and nobody listens at its address any more."""
    placement: str = ""
    """Why the node has no stage."""
    last_wait: str = ""
    is_deaf: bool = False
    """It doesn't read its commands; some were dropped."""
    cut: Callable[[], object] = lambda: None
    """Ends the stream at once, whatever waits in it."""

    # Signs of life.
    last_heartbeat_s: float = 0.0
    last_heard_s: float = 0.0
    heartbeat: coordinator_pb2.Heartbeat = field(default_factory=coordinator_pb2.Heartbeat)
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    """Seconds of computation per microbatch."""

    # Progress in a step.
    asked_s: float = 0.0
    """When it was last told to do something."""
    still_s: float = 0.0
    """For how long its heart has beaten since it last finished something, said something new about
    its progress, or was told to do something. Silence doesn't count: the lease is for that."""
    pace: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    """As `busy`, but a rest forgets nothing."""
    mutes: int = 0
    """How often in a row it was taken out for finishing nothing."""
    rests_until_s: float = 0.0
    """Until then it gets no stage."""

    def moved(self) -> None:
        self.still_s = 0.0

    def asked(self, now_s: float) -> None:
        self.asked_s, self.still_s = now_s, 0.0

    def beat(self, heartbeat: coordinator_pb2.Heartbeat) -> None:
        """Call `heard` first."""
        if heartbeat.progress != self.heartbeat.progress:
            self.moved()
        elif self.intervals:
            self.still_s += min(max(0.0, self.intervals[-1]), _MOST_BEAT_S)
        self.heartbeat = heartbeat

    def send(self, **command: object) -> None:
        if self.outbox.qsize() >= MAX_OUTBOX:
            self.is_deaf = True  # the next tick ends the session
            return
        self.outbox.put_nowait(coordinator_pb2.Command(**command))  # type: ignore[arg-type]

    def end(self) -> None:
        """Once what was sent before is delivered."""
        self.outbox.put_nowait(None)

    def say(self, reason: str) -> None:
        """Tell the node what it waits for, once."""
        if reason != self.last_wait:
            self.last_wait = reason
            self.send(wait=coordinator_pb2.Wait(reason=reason))

    def heard(self, now_s: float, *, heartbeat: bool) -> None:
        self.last_heard_s = now_s
        if heartbeat:
            if self.last_heartbeat_s:
                self.intervals.append(now_s - self.last_heartbeat_s)
            self.last_heartbeat_s = now_s

    def silent_s(self, now_s: float) -> float:
        return now_s - max(self.last_heard_s, self.attached_s)

    @property
    def speed(self) -> float:
        """Microbatches per second, 0 while not measured."""
        return 1.0 / max(statistics.median(self.busy), 1e-6) if self.busy else 0.0

    def rest(self) -> None:
        """It gets no work in a step: forget the older half of its measurements. A node that was
        slow for a while is so tried again, as fast as the others on average."""
        for _ in range((len(self.busy) + 1) // 2):
            self.busy.popleft()

    def held(self) -> coordinator_pb2.HeldState | None:
        return self.hello.held if self.hello.HasField("held") else None

    def member(self) -> types_pb2.Member:
        return types_pb2.Member(
            peer_id=self.peer_id,
            name=self.name,
            address=self.hello.address,
            stage=self.stage or 0,
            incarnation=self.incarnation,
            tier=types_pb2.TIER_HOLDER if self.tier == "holder" else types_pb2.TIER_WORKER,
        )

    def assign(
        self,
        stage: Stage,
        incarnation: Incarnation,
        *,
        step: int,
        keeps: bool,
        now_s: float,
        as_worker: bool = False,
    ) -> None:
        self.state = "warming" if as_worker else "copying"
        self.tier = "worker" if as_worker else "holder"
        self.stage, self.incarnation = stage, incarnation
        self.last_stage, self.last_incarnation = stage, incarnation
        self.step, self.weights_digest = step, 0
        self.keeps, self.owed_commit = keeps, False
        self.transfers, self.pinned = [], frozenset()
        self.replay = None
        self.assigned_s = now_s
        self._forget_pulls()

    def end_transfer(self, part: Part) -> None:
        self.transfers = [t for t in self.transfers if t.version.part != part]

    def _forget_pulls(self) -> None:
        self.is_warm, self.pull_since_s, self.promoted_at = False, None, -1

    def unassign(self, *, still_holds: bool) -> None:
        """Back to a node without a stage. `still_holds`: its state is whole and may be kept."""
        self.hello.ClearField("held")
        if still_holds and self.tier == "holder":
            self.hello.held.stage = self.stage or 0
            self.hello.held.step = self.step
            self.hello.held.weights_digest = self.weights_digest
        self.state, self.incarnation, self.stage, self.step = "attached", NOBODY, None, -1
        self.keeps = self.owed_commit = False
        self.tier = "holder"
        self._forget_pulls()
        self.transfers, self.pinned = [], frozenset()
        self.replay = None
