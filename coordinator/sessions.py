# SPDX-License-Identifier: Apache-2.0
"""Attached nodes, as the coordinator knows them. Soft state: it comes back when nodes re-attach."""

import asyncio
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.protocol.ids import NOBODY, Incarnation, PeerId, Stage
from shoal.protocol.proto import coordinator_pb2, types_pb2

SessionState = Literal["attached", "copying", "ready", "leaving"]

_LEASE_DEVIATIONS = 8
_LEASE_LIMIT = 4.0


def lease_timeout_s(intervals: Sequence[float], *, least_s: float) -> float:
    """How long a node may be silent before it is fenced. Pure.

    The median interval between its heartbeats plus eight times their median deviation, between
    `least_s` and four times that: a loaded machine beats irregularly, and slow is not dead.
    """
    if len(intervals) < 4:
        return 2 * least_s
    median = statistics.median(intervals)
    deviation = statistics.median(abs(i - median) for i in intervals)
    return min(max(least_s, median + _LEASE_DEVIATIONS * deviation), _LEASE_LIMIT * least_s)


@dataclass(eq=False, slots=True)
class Session:
    """One node's session, from its Hello to the end of the stream."""

    peer_id: PeerId
    name: str
    hello: coordinator_pb2.Hello
    attached_s: float
    outbox: "asyncio.Queue[coordinator_pb2.Command | None]" = field(default_factory=asyncio.Queue)
    """Commands to send; None ends the session."""

    state: SessionState = "attached"
    incarnation: Incarnation = NOBODY
    stage: Stage | None = None
    step: int = -1
    """Committed steps in the node's state, once it is ready."""
    assigned_s: float = 0.0
    last_heartbeat_s: float = 0.0
    heartbeat: coordinator_pb2.Heartbeat = field(default_factory=coordinator_pb2.Heartbeat)
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    """Seconds of computation per microbatch."""
    failures: int = 0
    farewell: str | None = None
    """Why the node wants to leave, once it said so."""
    placement: str = ""
    """Why the node has no stage."""
    last_wait: str = ""

    def send(self, **command: object) -> None:
        self.outbox.put_nowait(coordinator_pb2.Command(**command))  # type: ignore[arg-type]

    def say(self, reason: str) -> None:
        """Tell the node what it waits for, once."""
        if reason != self.last_wait:
            self.last_wait = reason
            self.send(wait=coordinator_pb2.Wait(reason=reason))

    def heard(self, now_s: float) -> None:
        if self.last_heartbeat_s:
            self.intervals.append(now_s - self.last_heartbeat_s)
        self.last_heartbeat_s = now_s

    def silent_s(self, now_s: float) -> float:
        return now_s - max(self.last_heartbeat_s, self.attached_s)

    @property
    def speed(self) -> float:
        """Microbatches per second, 0 while not measured."""
        return 1.0 / max(statistics.median(self.busy), 1e-6) if self.busy else 0.0

    def held(self) -> coordinator_pb2.HeldState | None:
        return self.hello.held if self.hello.HasField("held") else None

    def member(self) -> types_pb2.Member:
        return types_pb2.Member(
            peer_id=self.peer_id,
            name=self.name,
            address=self.hello.address,
            stage=self.stage or 0,
            incarnation=self.incarnation,
        )

    def unassign(self) -> None:
        """Back to a node without a stage; what it held before counts no more."""
        self.state, self.incarnation, self.stage, self.step = "attached", NOBODY, None, -1
        self.hello.ClearField("held")
