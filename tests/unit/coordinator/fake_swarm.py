# SPDX-License-Identifier: Apache-2.0
"""A swarm in one thread: a real conductor, nodes that answer by protos, no network and no torch.

What it trains are integers (`fake_training`), so that whatever is counted twice or not at all
changes every later digest. Nothing happens by itself: `actions` lists what can happen next, and
the test (or `settle`, in a fixed order) chooses.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.history import InMemoryHistory
from shoal.coordinator.store import InMemoryEventStore, StoredEvent
from shoal.coordinator.terms import Claim
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.spec import ResolvedRun

from .fake_attempt import Spoil
from .fake_disk import BoundaryLog, FakeSnapshots
from .fake_member import FakeMember
from .fake_network import Message, oldest_of_each_channel
from .fake_node import FakeNode
from .fake_run import AUTHORITY

TICK_S = 0.2


class StillWaiting(AssertionError):
    """What a test waited for did not happen in time."""


class FakeSwarm:
    faults: Faults = NO_FAULTS

    def __init__(
        self, run: ResolvedRun, nodes: int = 0, *, folder: Path | None = None, dtype: str = "fp32"
    ) -> None:
        self.run = run
        self.dtype = dtype
        self.spoil: Spoil = lambda node, microbatch, now: None
        self.num_stages = run.spec.pipeline.stages
        self.now_s = 1000.0
        self.disk: list[StoredEvent] = []
        self.history = InMemoryHistory()
        self.store = InMemoryEventStore(self.disk, history=self.history)
        self.snapshots = FakeSnapshots()
        self.conductor = self._conduct()
        self.nodes: dict[PeerId, FakeNode] = {}
        self.disks: dict[PeerId, BoundaryLog] = {}
        """Boundary logs; they outlive the processes."""
        self.messages: list[Message] = []
        self.beat_s = 0.5
        self._beaten_s = self.now_s
        self._names = 0
        for _ in range(nodes):
            self.join()

    def _conduct(self) -> Conductor:
        return Conductor(
            self.run, self.store, self.snapshots, Claim(authority=AUTHORITY),
            clock=lambda: self.now_s, faults=self.faults,
        )  # fmt: skip

    def conductor_for(self, node: FakeNode) -> Conductor | None:
        """Whom a node without a session asks; None when it reaches nobody."""
        return self.conductor

    def on_promise(self, node: FakeNode, promise: pb.Promise) -> None:
        """A node has answered a coordinator."""

    def on_commit(self, node: FakeMember, commit: pb.Commit) -> None:
        """A node is about to apply a step."""

    def join(self) -> FakeNode:
        self._names += 1
        node = FakeNode(self, PeerId(f"peer-{self._names}"))
        self.nodes[node.peer_id] = node
        node.attach()
        return node

    def start_again(self, node: FakeNode) -> FakeNode:
        """The process is killed and started again: same identity and disk, empty memory."""
        log = node.log
        node.kill()
        self.disks[node.peer_id] = log
        again = FakeNode(self, node.peer_id)
        self.nodes[node.peer_id] = again
        again.attach()
        return again

    def restart(self, *, lose_soft: bool = True) -> None:
        """The coordinator dies and starts again from what is on the disk."""
        if not lose_soft:
            self.store.flush()
        for node in self.nodes.values():
            node.session = node.greeted = None
            node.detach()
        self.store = InMemoryEventStore(self.disk, history=self.history)
        self.conductor = self._conduct()

    # ---- facts ---------------------------------------------------------------------------

    @property
    def live(self) -> list[FakeNode]:
        return [n for n in self.nodes.values() if not n.frozen]

    def by_incarnation(self, incarnation: int) -> FakeNode | None:
        found = (n for n in self.nodes.values() if n.incarnation == incarnation and incarnation)
        return next(found, None)

    def at(self, stage: int) -> list[FakeNode]:
        """Nodes that the conductor counts on at a stage."""
        return [
            self.nodes[s.peer_id]
            for s in self.conductor.sessions.values()
            if s.stage == stage and s.peer_id in self.nodes
        ]

    # ---- what can happen -----------------------------------------------------------------

    def actions(self) -> Iterator[Callable[[], None]]:
        """Everything that can happen now, in a fixed order. Take one only: it changes the rest."""
        for node in self.nodes.values():
            yield from node.actions()
        for message in oldest_of_each_channel(self.messages):
            receiver = self.by_incarnation(message.receiver)
            sender = self.by_incarnation(message.sender)
            if receiver is None or sender is None:
                yield partial(self.messages.remove, message)
            elif not (receiver.frozen or sender.frozen) and receiver.knows(message.sender):
                yield partial(self.deliver, message)
        for peer_id in self.conductor.missing_holders():
            if peer_id not in self.nodes:  # its address refuses the connection
                yield partial(self.conductor.process_gone, peer_id)

    def deliver(self, message: Message) -> None:
        self.messages.remove(message)
        receiver = self.by_incarnation(message.receiver)
        sender = self.by_incarnation(message.sender)
        assert receiver is not None
        assert sender is not None
        receiver.take(message)
        sender.acknowledged(message)

    def lose_messages_of(self, incarnation: int) -> None:
        self.messages = [m for m in self.messages if incarnation not in (m.sender, m.receiver)]

    def tick(self) -> None:
        """Time passes; hearts beat."""
        self.now_s += TICK_S
        if self.now_s - self._beaten_s >= self.beat_s:
            self._beaten_s = self.now_s
            for node in self.live:
                if node.session is not None and node.conductor is not None:
                    log = node.log
                    beat = pb.NodeEvent(
                        heartbeat=pb.Heartbeat(
                            memory_bytes=1, progress=node.progress(),
                            log_bytes=sum(8 * len(e) for e in log.values()),
                            log_oldest_step=min((step for step, _ in log), default=0),
                        )
                    )  # fmt: skip
                    node.conductor.receive(node.session, beat)
        self.conductor.tick()

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def settle(
        self, until: Callable[[], bool] = lambda: False, *, max_actions: int = 20_000
    ) -> bool:
        """Let things happen, fairly and in a fixed order, until `until` holds (then True) or
        nothing can happen any more without time passing (then False)."""
        for _ in range(max_actions):
            if until():
                return True
            action = next(self.actions(), None)
            if action is None:
                return False
            action()
            self._rotate()
        raise AssertionError(f"still not settled: {self.conductor.waiting_for}")

    def _rotate(self) -> None:
        first = next(iter(self.nodes), None)
        if first is not None:
            self.nodes[first] = self.nodes.pop(first)

    def run_until(self, until: Callable[[], bool], *, within_s: float = 60.0) -> None:
        """Let things and time happen. Fails when `until` doesn't hold within that time."""
        deadline_s = self.now_s + within_s
        while not self.settle(until):
            if self.now_s > deadline_s:
                raise StillWaiting(
                    f"not within {within_s} s; step {self.conductor.state.step}, "
                    f"{self.conductor.phase}, waiting for {self.conductor.waiting_for!r}"
                )
            self.tick()

    def run_to_step(self, step: int) -> None:
        self.run_until(lambda: self.conductor.state.step >= step)

    def finish(self, *, within_s: float = 120.0) -> None:
        """To the run's end, and until everybody knows."""
        self.run_until(lambda: self.conductor.ended, within_s=within_s)
        self.settle()
        assert not self.conductor.failed, self.conductor.failed
