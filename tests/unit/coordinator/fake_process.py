# SPDX-License-Identifier: Apache-2.0
"""A process of a fake swarm: who it is, whom it knows, and how it speaks to its coordinator."""

from collections import deque
from typing import TYPE_CHECKING

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.sessions import Session
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2 as pb

from .fake_disk import BoundaryLog, MemoryPromises

if TYPE_CHECKING:
    from .fake_swarm import FakeSwarm


class FakeProcess:
    def __init__(self, swarm: "FakeSwarm", peer_id: PeerId) -> None:
        self.swarm = swarm
        self.peer_id = peer_id
        self.conductor: Conductor | None = None  # whom it is attached to, or asks
        self.session: Session | None = None
        self.events: deque[pb.NodeEvent] = deque()
        self.frozen = False
        self.promises = MemoryPromises(swarm.run.run_id)
        # One incarnation.
        self.incarnation = 0
        self.members: dict[int, int] = {}  # incarnation -> stage
        self.fenced: set[int] = set()

    @property
    def log(self) -> BoundaryLog:
        """The boundary log on its disk."""
        return self.swarm.disks.setdefault(self.peer_id, {})

    def write_log(self, step: int, stage: int, sent: list[tuple[str, int, int]]) -> None:
        if self.swarm.run.spec.fault.boundary_log_mb:
            self.log[step, stage] = {(kind, m): value for kind, m, value in sent}

    def say(self, **event: object) -> None:
        self.events.append(pb.NodeEvent(**event))  # type: ignore[arg-type]

    def trouble(
        self,
        kind: "pb.TroubleKind.ValueType",
        detail: str,
        *,
        error: str = "FakeError",
        peer_id: str = "",
        **more: int,
    ) -> None:
        self.say(
            trouble=pb.Trouble(
                kind=kind, incarnation=self.incarnation, error=error, detail=detail,
                peer_id=peer_id, **more,
            )
        )  # fmt: skip

    def knows(self, incarnation: int) -> bool:
        """Until the plan names a sender, its stream waits."""
        return incarnation in self.members or incarnation in self.fenced

    def detach(self) -> None:
        """The session's end is the incarnation's end."""
        self.incarnation = 0
