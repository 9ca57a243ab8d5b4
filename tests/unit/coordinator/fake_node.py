# SPDX-License-Identifier: Apache-2.0
"""A node of a fake swarm: its sessions with a coordinator, and what can happen at it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from shoal.coordinator.sessions import Session
from shoal.protocol.errors import StorageError, TermError
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.version import PROTOCOL_VERSION

from .fake_holder import copied_part
from .fake_member import FakeMember

if TYPE_CHECKING:
    from .fake_swarm import FakeSwarm


class FakeNode(FakeMember):
    def __init__(self, swarm: "FakeSwarm", peer_id: PeerId) -> None:
        super().__init__(swarm, peer_id)
        self.greeted: pb.Hello | None = None
        self.term = 0
        self.dtype = swarm.dtype
        self.done: str | None = None  # why it was dismissed for good
        self.left_s = 0.0
        self.retry_s = 0.0
        self.commands_seen: list[pb.Command] = []

    # ---- session -------------------------------------------------------------------------

    def attach(self) -> None:
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, address=f"{self.peer_id}:1")
        hello.hardware.flops, hello.hardware.memory_bytes = 1e12, 1 << 34
        hello.hardware.compute_dtype = self.dtype
        if self.step >= 0 and not self.is_apprentice:
            hello.held.stage, hello.held.step = self.stage, self.step
            hello.held.weights_digest = self.weights
            if self.held_sums is not None:
                hello.held.has_prepared, hello.held.prepared_digest = True, self.held_sums[1]
        self.members, self.fenced = {}, set()
        self.events.clear()
        self.conductor = conductor = self.swarm.conductor_for(self)
        if conductor is None:
            self.turn_away()
            return
        try:
            conductor.greet(self.peer_id, hello)
            self.greeted = hello
            self.promise_and_attach()
        except (StorageError, TermError):
            self.turn_away()

    def promise_and_attach(self) -> None:
        """Answer Lead, once the coordinator asks."""
        conductor, hello = self.conductor, self.greeted
        assert conductor is not None
        assert hello is not None
        if not conductor.terms.is_worth_a_promise.is_set():
            return
        promise = self.answer(conductor.terms.lead())
        try:
            self.session = conductor.attach(self.peer_id, hello, promise)
            self.term = promise.term
        except (StorageError, TermError):
            self.turn_away()
            return
        if self.leaving:
            self.say(farewell=pb.Farewell(reason="bedtime"))

    def answer(self, lead: pb.Lead) -> pb.Promise:
        promise = self.promises.answer(lead, "127.0.0.1:1")
        self.swarm.on_promise(self, promise)
        return promise

    def turn_away(self) -> None:
        """No session came of it; another coordinator may be asked later."""
        if self.greeted is not None and self.conductor is not None:
            self.conductor.terms.went(self.peer_id)
        self.greeted, self.session = None, None
        self.retry_s = self.swarm.now_s + 1.0

    def drop(self) -> None:
        """The connection breaks; the process lives."""
        session, self.session = self.session, None
        self.detach()
        if self.greeted is not None and self.conductor is not None:
            self.greeted = None
            self.conductor.terms.went(self.peer_id)
        if session is not None and self.conductor is not None:
            self.conductor.detach(session)

    def kill(self) -> None:
        """The process dies, and its connections with it."""
        self.swarm.lose_messages_of(self.incarnation)
        self.forget()
        self.drop()
        self.swarm.nodes.pop(self.peer_id)
        self.swarm.disks.pop(self.peer_id, None)  # nobody comes back to it: see `start_again`

    # ---- what can happen at this node ----------------------------------------------------

    def actions(self) -> Iterator[Callable[[], None]]:
        """In a fixed order, each looked for only when it is asked for."""
        if self.frozen:
            return
        if self.session is not None and self.may_obey(self.session):
            yield self.obey
        if self.session is not None and self.events:
            yield self.report
        if self.session is None and self.done is None:
            if self.greeted is None and self.swarm.now_s >= self.retry_s:
                yield self.attach
            elif self.greeted is not None and self.is_asked():
                yield self.promise_and_attach
        if self.copying is not None and self.has_answer(
            self.copying.source, self.copying.step, copied_part(self.copying), self.copying.donors
        ):
            yield self.finish_copy
        for part, pull in self.pulls.items():
            if self.has_answer(pb.STATE_SOURCE_PEER, pull.step, part, pull.donors):
                yield partial(self.finish_pull, part)
        if self.uploads:
            yield self.upload
        if not self.mute and self.can_compute():
            yield self.compute

    def may_obey(self, session: Session) -> bool:
        """As the service does it: a command is held back until what it follows from is in the
        log, the session's end is not."""
        queued = session.outbox._queue  # type: ignore[attr-defined]
        conductor = self.conductor
        assert conductor is not None
        return bool(queued) and (queued[0] is None or conductor.can_announce.is_set())

    def is_asked(self) -> bool:
        return self.conductor is not None and self.conductor.terms.is_worth_a_promise.is_set()

    def report(self) -> None:
        event = self.events.popleft()
        assert self.session is not None
        assert self.conductor is not None
        if event.HasField("prepared"):
            event.prepared.term = self.term
        self.conductor.receive(self.session, event)

    def obey(self) -> None:
        assert self.session is not None
        command = self.session.outbox.get_nowait()
        if command is None:
            self.drop()
            return
        self.commands_seen.append(command)
        kind = command.WhichOneof("command")
        if kind == "truncate":
            for key in [k for k in self.log if k[0] <= command.truncate.through_step]:
                del self.log[key]
        elif kind == "dismiss":
            if command.dismiss.come_back:
                self.detach()
            else:
                self.done = command.dismiss.reason
                self.left_s = self.swarm.now_s
                self.drop()
        elif kind == "plan":
            self.members = {m.incarnation: m.stage for m in command.plan.members}
            self.fenced = set(sorted(self.fenced | set(command.plan.fenced))[-1024:])
            self.settle_reduction()
            self.take_parked()
        elif kind == "assign":
            self.begin_copy(command.assign)
        elif kind == "lead":
            self.say(promise=self.answer(command.lead))
        elif self.incarnation and self.copying is None:
            if kind == "step_open":
                self.open(command.step_open)
            elif kind == "leases":
                self.update(command.leases)
            elif kind == "reduce":
                self.reduce(command.reduce)
            elif kind == "commit":
                self.commit(command.commit)
            elif kind == "pin":
                self.pin(command.pin)
            elif kind == "pull":
                self.pull(command.pull)
            elif kind == "snapshot":
                self.begin_upload(command.snapshot)
