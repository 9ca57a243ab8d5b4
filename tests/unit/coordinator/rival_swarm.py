# SPDX-License-Identifier: Apache-2.0
"""Two coordinators, each with a log of its own, and nodes that reach both, one, or neither.

Side "a" begins, alone; once "b" has registered as its standby a majority decides. Whatever a
node accepts is held against what the nodes have accepted before: that is where two leaders at
once would show.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.state import StandbyRegistered
from shoal.coordinator.store import InMemoryEventStore, StoredEvent
from shoal.coordinator.terms import Claim
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.spec import ResolvedRun

from .fake_disk import MemoryPromises
from .fake_member import FakeMember
from .fake_node import FakeNode
from .fake_run import AUTHORITY
from .fake_swarm import FakeSwarm
from .fake_training import reference

SIDES = ("a", "b")


@dataclass
class Side:
    """A coordinator's machine."""

    name: str
    disk: list[StoredEvent] = field(default_factory=list)
    store: InMemoryEventStore | None = None
    conductor: Conductor | None = None
    least_term: int = 1
    forced: bool = False

    @property
    def leads(self) -> bool:
        conductor = self.conductor
        return conductor is not None and conductor.terms.leads and conductor.deposed is None


class RivalSwarm(FakeSwarm):
    def __init__(self, run: ResolvedRun, nodes: int) -> None:
        self.sides = {name: Side(name) for name in SIDES}
        self.cut: set[tuple[PeerId, str]] = set()
        self.is_link_cut = False
        self.prefers: dict[PeerId, str] = {}
        self.dead: dict[PeerId, MemoryPromises] = {}
        self.accepted: dict[int, dict[tuple[int, str], pb.Commit]] = {}
        """By record number, by (term, log): what nodes have accepted."""
        self.leaders: dict[int, str] = {}
        self.highest: dict[PeerId, int] = {}
        self.expected = reference(run)
        super().__init__(run, nodes)

    # ---- coordinators --------------------------------------------------------------------

    def _conduct(self) -> Conductor:
        self.start("a")
        return self.conductor

    def start(self, name: str, *, forced: bool = False) -> None:
        """Claim the next term, whoever leads."""
        side = self.sides[name]
        self.kill_coordinator(name)
        side.store = InMemoryEventStore(side.disk)
        claim = Claim(name, forced=forced, least_term=side.least_term, authority=AUTHORITY)
        side.conductor = Conductor(
            self.run, side.store, self.snapshots, claim, clock=lambda: self.now_s
        )
        self.conductor = side.conductor

    def kill_coordinator(self, name: str) -> None:
        side = self.sides[name]
        gone, side.conductor = side.conductor, None
        for node in list(getattr(self, "nodes", {}).values()):
            if gone is not None and node.conductor is gone:
                node.session = node.greeted = None
                node.detach()

    def register_standby(self) -> None:
        """Side "b" begins to follow "a"."""
        side = self.sides["a"]
        if side.leads:
            assert side.conductor is not None
            side.conductor.register_standby(
                StandbyRegistered(time_s=self.now_s, log_id="b", admission="b:1", session="b:2")
            )
            self.follow()

    def follow(self) -> None:
        """A side that leads gives its log to the other, if that one stands by."""
        for leader, other in (SIDES, SIDES[::-1]):
            source, target = self.sides[leader], self.sides[other]
            if source.leads and target.conductor is None and not self.is_link_cut:
                assert source.conductor is not None
                if source.conductor.terms.term >= self._term_on_disk(target):
                    target.disk[:] = source.disk

    def _term_on_disk(self, side: Side) -> int:
        opened = (json.loads(e.payload) for e in side.disk if e.kind == "term_opened")
        return max((event["term"] for event in opened), default=0)

    def is_finished(self) -> bool:
        """Whether the run has ended, on either side."""
        return any(e.kind == "run_finished" for side in self.sides.values() for e in side.disk)

    def supervise(self) -> None:
        """A coordinator that was deposed claims a higher term, or stands by: as its operator's
        service manager would, without looking around first."""
        for side in self.sides.values():
            conductor = side.conductor
            if conductor is not None and conductor.deposed is not None:
                side.least_term = max(side.least_term, conductor.deposed.term + 1)
                self.start(side.name)

    # ---- nodes ---------------------------------------------------------------------------

    def conductor_for(self, node: FakeNode) -> Conductor | None:
        first = self.prefers.get(node.peer_id, "a")
        for name in (first, *(s for s in SIDES if s != first)):
            conductor = self.sides[name].conductor
            if (
                conductor is not None
                and (node.peer_id, name) not in self.cut
                and not conductor.ended
            ):
                # The next time it asks the other one.
                self.prefers[node.peer_id] = next(s for s in SIDES if s != name)
                return conductor
        return None

    def partition(self, node: FakeNode, name: str) -> None:
        """Nothing passes between them any more; the coordinator finds out by silence."""
        self.cut.add((node.peer_id, name))
        if node.conductor is self.sides[name].conductor:
            node.session = node.greeted = None
            node.detach()

    def give_up_waiting(self, node: FakeNode) -> None:
        """A node that a claimant keeps waiting looks elsewhere."""
        if node.session is None and node.greeted is not None:
            node.turn_away()

    def kill_node(self, node: FakeNode) -> None:
        node.promises.restarted()
        self.dead[node.peer_id] = node.promises
        node.kill()

    def revive(self) -> None:
        """All dead nodes come back, with their identities and promises, and nothing else."""
        for peer_id, promises in self.dead.items():
            node = FakeNode(self, peer_id)
            node.promises = promises
            self.nodes[peer_id] = node
            node.attach()
        self.dead.clear()

    # ---- what happens --------------------------------------------------------------------

    def tick(self) -> None:
        """Time passes everywhere; hearts beat."""
        super().tick()
        for side in self.sides.values():
            if side.conductor is not None and side.conductor is not self.conductor:
                side.conductor.tick()

    def on_promise(self, node: FakeNode, promise: pb.Promise) -> None:
        if not promise.refused:
            before = self.highest.get(node.peer_id, 0)
            assert promise.term >= before, "a promise was broken"
            self.highest[node.peer_id] = promise.term

    def on_commit(self, node: FakeMember, commit: pb.Commit) -> None:
        assert node.conductor is not None
        log_id = node.conductor.terms.log_id
        assert commit.term == self.highest[node.peer_id], "a commit of a lower term"
        assert self.leaders.setdefault(commit.term, log_id) == log_id, "two leaders in one term"
        step, stage = commit.step, node.stage
        assert commit.sums_digest == self.expected.sums[step][stage], "another result"
        state = node.conductor.state
        made_here = state.last_record is not None and state.last_record.term == commit.term
        if made_here and state.step == step:
            self.accepted.setdefault(state.commits, {})[commit.term, log_id] = commit
            self.check_one_lineage()

    def check_one_lineage(self) -> None:
        """A record may be made twice when its announcement reached few; nothing is built on the
        one of the lower term."""
        for number, versions in self.accepted.items():
            newest = max(versions)
            for term, log_id in versions:
                if (term, log_id) != newest and log_id != newest[1]:
                    later = self.accepted.get(number + 1, {})
                    assert (term, log_id) not in later, "two coordinators led at once"


disturbances: dict[str, Callable[[RivalSwarm, FakeNode], object]] = {
    "cut from a": lambda swarm, node: swarm.partition(node, "a"),
    "cut from b": lambda swarm, node: swarm.partition(node, "b"),
    "heal": lambda swarm, node: swarm.cut.clear(),
    "cut the coordinators": lambda swarm, node: setattr(swarm, "is_link_cut", True),
    "heal the coordinators": lambda swarm, node: setattr(swarm, "is_link_cut", False),
    "register": lambda swarm, node: swarm.register_standby(),
    "follow": lambda swarm, node: swarm.follow(),
    "kill a": lambda swarm, node: swarm.kill_coordinator("a"),
    "kill b": lambda swarm, node: swarm.kill_coordinator("b"),
    "start a": lambda swarm, node: swarm.start("a"),
    "start b": lambda swarm, node: swarm.sides["b"].disk and swarm.start("b"),
    "kill a node": lambda swarm, node: swarm.kill_node(node),
    "revive": lambda swarm, node: swarm.revive(),
    "lose a session": lambda swarm, node: node.drop(),
    "look elsewhere": lambda swarm, node: swarm.give_up_waiting(node),
    "let time pass": lambda swarm, node: swarm.pass_time(6),
}
