# SPDX-License-Identifier: Apache-2.0
"""A swarm in one thread: a real conductor, nodes that answer by protos, no network and no torch.

A gradient is an integer made from (step, microbatch, stage, weights, what the neighbours sent), a
stage's sum is their sum, moments follow from sums, and weights from moments: whatever is counted
twice or not at all, or applied without the right moments, changes every later digest. Boundary
tensors and sums travel as messages that are lost with their sender, so that a step can hang as a
real one would. Nothing happens by itself: `actions` lists what can happen next, and the test (or
`settle`, in a fixed order) chooses.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.history import InMemoryHistory
from shoal.coordinator.sessions import Session
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.store import InMemoryEventStore, StoredEvent
from shoal.coordinator.terms import Claim
from shoal.node.promises import Promised, Promises
from shoal.node.step_work import LeaseFacts, Push, StepWork
from shoal.protocol.authority import Authority
from shoal.protocol.errors import StorageError, TermError, WrongLeaseError
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.ids import Incarnation, MicrobatchId, PeerId, RunId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.proto import types_pb2
from shoal.protocol.scale import coarsened
from shoal.protocol.spec import (
    BatchSpec,
    DataManifest,
    FaultSpec,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
    ShardRef,
    ValidationSpec,
)
from shoal.protocol.step_record import SignedRecord
from shoal.version import PROTOCOL_VERSION

with TemporaryDirectory() as _folder:
    AUTHORITY = Authority.load_or_create(Path(_folder) / "keys")

TICK_S = 0.2
MASK = (1 << 62) - 1


def mix(*parts: int) -> int:
    """A 62-bit number that depends on every part."""
    return hash(parts) & MASK


def make_run(
    *, stages: int = 2, steps: int = 4, microbatches: int = 4, snapshot_every: int = 2,
    validation_every: int = 3, min_nodes: int = 0, replicas: int = 2, boundary_log_mb: int = 1,
) -> ResolvedRun:  # fmt: skip
    shard = ShardRef(sha256="0" * 64, num_tokens=1000)
    return ResolvedRun(
        run_id=RunId("run-00000000"),
        spec=RunSpec(
            steps=steps,
            model=ModelSpec(
                dim=16, num_layers=stages, num_heads=4, num_kv_heads=2, ffn_dim=24, seq_len=8,
                vocab_size=40,
            ),
            batch=BatchSpec(microbatches=microbatches, microbatch_size=1),
            pipeline=PipelineSpec(
                stages=stages, replicas=replicas, min_nodes=min_nodes,
                cuts=tuple(range(1, stages)),
            ),
            validation=ValidationSpec(every=validation_every, microbatches=2),
            fault=FaultSpec(
                snapshot_every=snapshot_every, heartbeat_s=0.5, lease_s=5.0,
                boundary_log_mb=boundary_log_mb,
            ),
        ),
        data=DataManifest(
            vocab_size=40, token_bytes=2, train=(shard,), validation=(shard,),
            tokenizer_sha256="0" * 64,
        ),
    )  # fmt: skip


def initial_weights(stage: int) -> int:
    return mix(stage, 17)


def advanced(moments: int, total: int) -> int:
    return mix(moments, total, 5)


def applied(weights: int, moments: int, step: int) -> int:
    """`moments` are those after the step."""
    return mix(weights, moments, step)


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run computes: sums and weights by step (from 1, and from 0) and stage."""

    sums: dict[int, tuple[int, ...]]
    weights: dict[int, tuple[int, ...]]


def reference(run: ResolvedRun, coarsen: Mapping[int, int] | None = None) -> Reference:
    """`coarsen`: of the steps that were not made at the usual scale."""
    stages, weights = run.spec.pipeline.stages, {}
    weights[0] = tuple(initial_weights(s) for s in range(stages))
    sums = {}
    moments = [0] * stages
    for step in range(1, run.spec.steps + 1):
        before, totals = weights[step - 1], [0] * stages
        for m in range(run.spec.batch.microbatches):
            values, gradient = [0], 0
            for s in range(stages):
                values.append(mix(step, m, s, before[s], values[s]))
            for s in reversed(range(stages)):
                gradient = mix(step, m, s, before[s], values[s], gradient, 1)
                totals[s] = (totals[s] + gradient) & MASK
        totals = [scaled(total, (coarsen or {}).get(step, 0)) for total in totals]
        sums[step] = tuple(totals)
        moments = [advanced(moments[s], totals[s]) for s in range(stages)]
        weights[step] = tuple(applied(before[s], moments[s], step) for s in range(stages))
    return Reference(sums, weights)


class FakeSnapshots(SnapshotStore):
    """Snapshots in memory: step -> stage -> (weights, moments)."""

    def __init__(self) -> None:
        self.full = False
        """Whether the disk has no room."""
        self.incoming: dict[int, dict[int, State]] = {}
        self.complete: dict[int, dict[int, State]] = {}

    def put(self, step: int, stage: int, state: "State", num_stages: int) -> bool:
        self.incoming.setdefault(step, {})[stage] = state
        if len(self.incoming[step]) == num_stages:
            self.complete[step] = self.incoming.pop(step)
        return step in self.complete

    def complete_steps(self) -> list[int]:
        return sorted(self.complete)

    def weights_sha256(self, step: int) -> str:
        return hashlib.sha256(repr(sorted(self.complete[step].items())).encode()).hexdigest()

    def prune(self, keep: int = 2) -> list[int]:
        removed = sorted(self.complete)[:-keep]
        for step in removed:
            del self.complete[step]
        return removed


State = tuple[int, int]
"""(weights, moments)"""


@dataclass
class Try:
    """A node's share of an attempt at a step."""

    step: int
    attempt: int
    work: StepWork[int, int]
    loss_scale: float
    coarsen: int
    inputs: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)  # what is accumulated
    parked: list[tuple[Incarnation, str, int, int]] = field(default_factory=list)


@dataclass
class Reduction:
    command: pb.Reduce
    partials: dict[int, int] = field(default_factory=dict)
    unacknowledged: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class BadNumbers:
    """What a task of a fake node fails with."""

    error: str = "NonFiniteError"
    leg: "pb.TaskLeg.ValueType" = pb.TASK_LEG_BACKWARD


Spoil = Callable[["FakeNode", int, Try], BadNumbers | None]
"""(node, microbatch, try) -> how the task's numbers go wrong."""


def scaled(total: int, coarsen: int) -> int:
    """Sums at a coarser scale have other bits."""
    return mix(total, coarsen) if coarsen else total


class LogHole(Exception):
    """A boundary log lacks something; `args` says whose."""


Message = tuple[int, int, str, int, int, int, int]
"""(step, attempt, kind, microbatch or round, value, sender, receiver)."""


class MemoryPromises(Promises):
    """A node's promises, on a disk that is a variable."""

    def __init__(self, run_id: RunId) -> None:
        super().__init__(Path("/nowhere"), run_id, AUTHORITY.fingerprint)
        self.trust(AUTHORITY.certificate_der)

    def _write(self, promised: Promised) -> None:
        self._promised = promised

    def _write_record(self, record: SignedRecord) -> None:
        self.on_disk = record

    def _read_record(self) -> SignedRecord | None:
        return getattr(self, "on_disk", None)

    def restarted(self) -> None:
        """Only what is on the disk is left."""
        self._records.clear()
        self.trust(AUTHORITY.certificate_der)


class FakeNode:
    """Mirrors what `node/` does with commands."""

    def __init__(self, swarm: "FakeSwarm", peer_id: PeerId) -> None:
        self.swarm = swarm
        self.peer_id = peer_id
        self.session: Session | None = None
        self.conductor: Conductor | None = None  # whom it is attached to, or asks
        self.greeted: pb.Hello | None = None
        self.term = 0
        self.promises = MemoryPromises(swarm.run.run_id)
        self.frozen = False
        self.done: str | None = None  # why it was dismissed for good
        self.left_s = 0.0
        self.retry_s = 0.0
        self.events: deque[pb.NodeEvent] = deque()
        self.commands_seen: list[pb.Command] = []
        # State, kept over sessions.
        self.stage = -1
        self.step = -1
        self.weights = 0
        self.moments = 0
        self.prepared: tuple[int, int] | None = None  # (step, total)
        # One incarnation.
        self.incarnation = 0
        self.members: dict[int, int] = {}  # incarnation -> stage
        self.fenced: set[int] = set()
        self.current: Try | None = None
        self.reduction: Reduction | None = None
        self.early: list[Message] = []
        self.copying: pb.Assign | None = None
        self.uploads: list[tuple[int, int, State]] = []  # (step, stage, state)
        self.pins: dict[tuple[int, int], State] = {}  # (step, part) -> what it serves
        # A worker: it has the weights, and the moments of some step or none.
        self.is_apprentice = False
        self.moments_step: int | None = None
        self.promoted_at: int | None = None
        self.committed = 0
        self.catch_up: list[tuple[int, int]] = []  # (step, total)
        self.pulls: dict[int, pb.Pull] = {}  # part -> what is on its way
        self.held_sums: tuple[int, int] | None = None
        self.replayed: list[pb.ReplayStep] | None = None  # steps still to do
        self.replay_state: State = (0, 0)
        # What a test may break.
        self.busy_s = 0.1  # as it reports for each microbatch
        self.disk_full = False
        self.corrupt_bits = 0
        self.corrupt_sums = 0
        self.corrupt_copy = 0
        self.corrupt_moments = 0
        self.slow_parts: set[int] = set()  # what it fetches of these doesn't arrive
        self.corrupt_weights = 0
        self.dtype = swarm.dtype
        self.flaky: deque[BadNumbers] = deque()  # what its next tasks fail with
        self.norm: float | None = None  # as it reports it for each tensor
        self.corrupt_log = 0
        self.mute = False  # computes nothing, though its heart beats
        self.task_s = 0.0  # what a task takes
        self.leaving = False
        self.num_done = 0
        self._busy_until_s: float | None = None

    @property
    def has_all(self) -> bool:
        """Holds the moments too, and has applied a step with them."""
        return not self.is_apprentice or (
            self.promoted_at is not None and self.step > self.promoted_at
        )

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

    def detach(self) -> None:
        """The session's end is the incarnation's end; the state stays."""
        if self.incarnation and self.prepared is not None:
            self.held_sums = self.prepared
        self.incarnation, self.current, self.reduction, self.prepared = 0, None, None, None
        self.copying, self.early, self.uploads, self.replayed = None, [], [], None
        self.pins, self.pulls, self.catch_up = {}, {}, []
        if self.is_apprentice:
            self.forget()

    def forget(self) -> None:
        """Without a state that is worth anything."""
        self.step, self.held_sums = -1, None
        self.is_apprentice, self.moments_step, self.promoted_at = False, None, None

    @property
    def log(self) -> dict[tuple[int, int], dict[tuple[str, int], int]]:
        """The boundary log on its disk: (step, stage) -> (direction, microbatch) -> value."""
        return self.swarm.disks.setdefault(self.peer_id, {})

    def write_log(self, step: int, stage: int, sent: list[tuple[str, int, int]]) -> None:
        if self.swarm.run.spec.fault.boundary_log_mb:
            self.log[step, stage] = {(kind, m): value for kind, m, value in sent}

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

    # ---- what can happen at this node ----------------------------------------------------

    def actions(self) -> list[Callable[[], None]]:
        if self.frozen:
            return []
        found: list[Callable[[], None]] = []
        if self.session is not None and self.may_obey(self.session):
            found.append(self.obey)
        if self.session is not None and self.events:
            found.append(self.report)
        if self.session is None and self.done is None:
            if self.greeted is None and self.swarm.now_s >= self.retry_s:
                found.append(self.attach)
            elif self.greeted is not None and self.is_asked():
                found.append(self.promise_and_attach)
        if self.copying is not None and self.has_answer(
            self.copying.source, self.copying.step, copied_part(self.copying), self.copying.donors
        ):
            found.append(self.finish_copy)
        for part, pull in self.pulls.items():
            if self.has_answer(pb.STATE_SOURCE_PEER, pull.step, part, pull.donors):
                found.append(lambda part=part: self.finish_pull(part))  # type: ignore[misc]
        if self.uploads:
            found.append(self.upload)
        if not self.mute and self.can_compute():
            found.append(self.compute)
        return found

    def may_obey(self, session: Session) -> bool:
        """As the service does it: a command is held back until what it follows from is in the
        log, the session's end is not."""
        queued = list(session.outbox._queue)  # type: ignore[attr-defined]
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
                assert self.has_all, "a worker can't be asked"
                if self.disk_full:
                    self.trouble(pb.TROUBLE_KIND_SNAPSHOT, "no space left; free some space.")
                elif self.step == command.snapshot.step:
                    state = self.weights, self.moments
                    self.uploads.append((self.step, self.stage, state))
                else:
                    self.trouble(pb.TROUBLE_KIND_SNAPSHOT, "the state moved on")

    # ---- state ---------------------------------------------------------------------------

    def begin_copy(self, assign: pb.Assign) -> None:
        held, self.held_sums = self.held_sums, None
        self.detach()
        self.held_sums = held
        if assign.source != pb.STATE_SOURCE_KEEP:
            self.step = -1  # dropped first
        self.copying = assign
        if assign.source == pb.STATE_SOURCE_REPLAY:
            base, self.replayed = assign.replay.base_step, list(assign.replay.steps)
            self.replay_state = initial_weights(assign.stage), 0
            if base:
                self.replay_state = self.swarm.snapshots.complete[base][assign.stage]

    def replay_step(self) -> None:
        """One step of a lost stage, out of its neighbours' logs."""
        assert self.copying is not None
        assert self.replayed
        assign, step = self.copying, self.replayed.pop(0)
        weights, moments = self.replay_state
        self.incarnation = assign.incarnation
        try:
            total, sent = self._replayed(assign, weights, step)
        except LogHole as hole:
            self.copying = self.replayed = None
            self.trouble(
                pb.TROUBLE_KIND_OWN_FAILURE, "a hole", error="BoundaryHoleError",
                peer_id=str(hole.args[0]),
            )  # fmt: skip
            return
        moments = advanced(moments, total)
        after = applied(weights, moments, step.commit.step)
        wrong = step.has_weights_digest and after != step.weights_digest
        if total != step.commit.sums_digest or wrong:
            self.copying = self.replayed = None
            self.trouble(pb.TROUBLE_KIND_OWN_FAILURE, "other bits", error="ReplayMismatchError")
            return
        self.replay_state = after, moments
        self.write_log(step.commit.step, assign.stage, sent)
        self.say(
            replaying=pb.Replaying(
                incarnation=assign.incarnation, step=step.commit.step, log_bytes=8 * len(sent)
            )
        )

    def _replayed(
        self, assign: pb.Assign, weights: int, step: pb.ReplayStep
    ) -> tuple[int, list[tuple[str, int, int]]]:
        number, stage, total = step.commit.step, assign.stage, 0
        inputs = self._logged(assign.replay, number, stage - 1, "forward", step.inputs)
        gradients = self._logged(assign.replay, number, stage + 1, "backward", step.gradients)
        sent: list[tuple[str, int, int]] = []
        for m in range(self.swarm.run.spec.batch.microbatches):
            x = inputs[m] if stage else 0
            is_last = stage == self.swarm.num_stages - 1
            gradient = mix(number, m, stage, weights, x, 0 if is_last else gradients[m], 1)
            total = (total + gradient) & MASK
            if not is_last:
                sent.append(("forward", m, mix(number, m, stage, weights, x)))
            if stage:
                sent.append(("backward", m, gradient))
        exponent = step.commit.scale_exponent
        return scaled(total, coarsened(self.swarm.run.spec.tokens_per_step, exponent)), sent

    def _logged(
        self, replay: pb.Replay, step: int, stage: int, kind: str,
        sources: Iterable[pb.BoundarySource],
    ) -> dict[int, int]:  # fmt: skip
        found = {}
        for source in sources:
            peer_id = PeerId(replay.logs[source.log].peer_id)
            node = self.swarm.nodes.get(peer_id)
            if node is None or node.frozen:
                raise LogHole(peer_id)
            entries = node.log.get((step, stage), {})
            for m in source.microbatches:
                if (kind, m) not in entries:
                    raise LogHole(peer_id)
                found[m] = entries[kind, m] ^ node.corrupt_log
        return found

    def finish_copy(self) -> None:
        if self.replayed:
            self.replay_step()
            return
        assert self.copying is not None
        assign, self.copying = self.copying, None
        held, self.held_sums = self.held_sums, None
        self.incarnation = assign.incarnation
        keeps = assign.source == pb.STATE_SOURCE_KEEP
        state: State | None = None
        if assign.source == pb.STATE_SOURCE_INIT:
            state = initial_weights(assign.stage), 0
        elif assign.source == pb.STATE_SOURCE_PEER:
            state = self.copy(assign.donors, assign.step, copied_part(assign))
        elif assign.source == pb.STATE_SOURCE_SNAPSHOT:
            state = self.swarm.snapshots.complete[assign.step][assign.stage]
        elif assign.source == pb.STATE_SOURCE_REPLAY:
            state = self.replay_state
        elif self.stage == assign.stage and self.step >= 0:
            state = self.weights, self.moments
        if state is None:
            self.trouble(pb.TROUBLE_KIND_OWN_FAILURE, "the state was not to be had")
            self.incarnation = 0
            return
        if not keeps:
            self.forget()
            self.stage, self.step = assign.stage, assign.step
            self.weights, self.moments = state
            if assign.tier == types_pb2.TIER_WORKER:
                self.is_apprentice, self.moments = True, -1
                self.committed = self.step
        elif held is not None and held[0] == self.step + 1:
            self.prepared = held
        self.say(
            ready=pb.Ready(
                incarnation=self.incarnation, step=self.step, weights_digest=self.weights
            )
        )

    # ---- state from others ---------------------------------------------------------------

    def pin(self, command: pb.Pin) -> None:
        wanted = {(v.step, v.part) for v in command.versions}
        self.pins = {version: state for version, state in self.pins.items() if version in wanted}
        for version in wanted - self.pins.keys():
            if version[0] == self.step and self.has_all:
                self.pins[version] = (
                    self.weights ^ self.corrupt_copy, self.moments ^ self.corrupt_moments
                )  # fmt: skip

    def has_answer(
        self, source: "pb.StateSource.ValueType", step: int, part: int, donors: pb.Donors
    ) -> bool:
        """Whether what is fetched is to be had, or known not to be: no donor waits for its pin."""
        if source != pb.STATE_SOURCE_PEER:
            return True
        if part in self.slow_parts:
            return False
        found = [self.swarm.by_incarnation(m.incarnation) for m in donors.members]
        alive = [d for d in found if d is not None and d.session is not None]
        if any((step, part) in d.pins for d in alive):
            return True
        return all(d.session is not None and d.session.outbox.empty() for d in alive)

    def copy(self, donors: pb.Donors, step: int, part: int) -> State | None:
        """What the run has recorded, or else the first donor's; None when nobody has it."""
        found: dict[str, State] = {}
        for member in donors.members:
            donor = self.swarm.by_incarnation(member.incarnation)
            if donor is None or (step, part) not in donor.pins:
                continue
            found[member.peer_id] = state = donor.pins[step, part]
            compares = donors.has_weights_digest and part != types_pb2.STATE_PART_MOMENTS
            if compares and state[0] != donors.weights_digest:
                del found[member.peer_id]
                bad = pb.TROUBLE_KIND_BAD_PEER
                self.say(trouble=pb.Trouble(kind=bad, peer_id=member.peer_id, error="FakeError"))
        return next(iter(found.values()), None)

    def pull(self, command: pb.Pull) -> None:
        if not self.is_apprentice or self.promoted_at is not None:
            return
        self.pulls[command.part] = command
        if command.part == types_pb2.STATE_PART_MOMENTS:
            self.moments_step, self.catch_up = None, []

    def finish_pull(self, part: int) -> None:
        command = self.pulls.pop(part)
        state = self.copy(command.donors, command.step, part)
        if state is None:
            if part == types_pb2.STATE_PART_WEIGHTS:
                self.trouble(pb.TROUBLE_KIND_OWN_FAILURE, "the weights were not to be had")
            return
        if part == types_pb2.STATE_PART_WEIGHTS:
            self.weights, self.step = state[0], command.step
            self.say(
                applied=pb.Applied(
                    incarnation=self.incarnation, step=self.step, weights_digest=self.weights
                )
            )
        else:
            self.moments, self.moments_step = state[1], command.step
        self.try_promotion()

    def try_promotion(self) -> None:
        if self.moments_step is None or self.promoted_at is not None:
            return
        while self.moments_step < self.step:
            step, total = self.catch_up.pop(0)
            assert step == self.moments_step + 1
            self.moments, self.moments_step = advanced(self.moments, total), step
        if self.committed <= self.step:
            self.promoted_at = self.step
            self.say(promoted=pb.Promoted(incarnation=self.incarnation, step=self.step))

    def upload(self) -> None:
        step, stage, state = self.uploads.pop(0)
        conductor = self.conductor
        assert conductor is not None
        if not conductor.expects_snapshot(self.peer_id, step, stage):
            self.trouble(pb.TROUBLE_KIND_SNAPSHOT, "nobody asked for it")
        elif self.swarm.snapshots.full:
            conductor.snapshot_refused(step, "no space left; free some space.")
        elif self.swarm.snapshots.put(step, stage, state, self.swarm.num_stages):
            conductor.snapshot_stored(step)

    # ---- the step ------------------------------------------------------------------------

    def open(self, command: pb.StepOpen) -> None:
        work: StepWork[int, int] = StepWork(
            stage=self.stage,
            num_stages=self.swarm.num_stages,
            num_microbatches=command.num_microbatches,
            window=command.window,
            credits=command.credits,
        )
        for key in [k for k in self.log if k[0] >= command.step]:
            del self.log[key]
        if self.has_all:
            self.is_apprentice, self.promoted_at = False, None
        self.current, self.reduction, self.prepared = (
            Try(
                command.step, command.attempt, work, command.loss_scale,
                coarsened(self.swarm.run.spec.tokens_per_step, command.scale_exponent),
            ), None, None,
        )  # fmt: skip
        work.update_leases(_lease(lease) for lease in command.leases)
        if self.leaving:
            self.release()
        early, self.early = self.early, []
        for message in early:
            self.take(message)

    def leave(self, grace_s: float = 0.0) -> None:
        self.leaving = True
        self.say(farewell=pb.Farewell(reason="bedtime", grace_s=grace_s))
        if self.current is not None:
            self.release()

    def release(self) -> None:
        now = self.current
        assert now is not None
        self.say(
            release=pb.Release(
                incarnation=self.incarnation, step=now.step, attempt=now.attempt,
                microbatches=now.work.release(),
            )
        )  # fmt: skip

    def progress(self) -> pb.Progress:
        waits_for = 0
        if self.reduction is not None and self.prepared is None:
            parts = [p.incarnation for p in self.reduction.command.parts]
            lacking = [p for p in parts if p not in self.reduction.partials]
            waits_for = next(iter([*lacking, *sorted(self.reduction.unacknowledged)]), 0)
        elif self.current is not None:
            waits_for = self.current.work.lacks()
        return pb.Progress(done=self.num_done, waits_for=waits_for)

    def update(self, command: pb.LeaseUpdate) -> None:
        now = self.current
        if now is None or (now.step, now.attempt) != (command.step, command.attempt):
            return
        self.push(now.work.update_leases(_lease(lease) for lease in command.leases))
        self.take_parked()

    def push(self, pushes: list[Push[int]]) -> None:
        now = self.current
        assert now is not None
        for push in pushes:
            self.send(push.direction, push.microbatch, push.payload, push.to)

    def send(self, kind: str, number: int, value: int, to: int) -> None:
        now = self.current
        if now is not None and to in self.members:
            self.swarm.messages.append(
                (now.step, now.attempt, kind, number, value, self.incarnation, to)
            )

    def take(self, message: Message) -> None:
        """A message from a peer arrives."""
        step, attempt, kind, number, value, sender, _ = message
        if sender in self.fenced or (step, attempt) < self.newest_try():
            return
        now = self.current
        if now is None or (step, attempt) > (now.step, now.attempt):
            self.early.append(message)
        elif kind == "partial":
            if self.reduction is not None and self.reduction.command.round == number:
                self.reduction.partials[sender] = value
                self.settle_reduction()
            else:
                self.early.append(message)
        else:
            now.parked.append((Incarnation(sender), kind, number, value))
            self.take_parked()

    def knows(self, incarnation: int) -> bool:
        """Until the plan names a sender, its stream waits."""
        return incarnation in self.members or incarnation in self.fenced

    def newest_try(self) -> tuple[int, int]:
        return (self.current.step, self.current.attempt) if self.current else (self.step + 1, 0)

    def take_parked(self) -> None:
        now = self.current
        if now is None:
            return
        parked, now.parked = now.parked, []
        for sender, kind, number, value in parked:
            try:
                now.work.receive(kind, MicrobatchId(number), sender, value)  # type: ignore[arg-type]
            except WrongLeaseError:  # the lease may be on its way here
                if sender not in self.fenced:
                    now.parked.append((sender, kind, number, value))

    def can_compute(self) -> bool:
        if self.current is None:
            return False
        task = self.current.work.next_task()
        self.current.work.task_failed()
        if task is None or not self.task_s:
            return task is not None
        if self._busy_until_s is None:
            self._busy_until_s = self.swarm.now_s + self.task_s
        return self.swarm.now_s >= self._busy_until_s

    def compute(self) -> None:
        now = self.current
        assert now is not None
        work, step, stage = now.work, now.step, self.stage
        task = work.next_task()
        assert task is not None
        self._busy_until_s = None
        self.num_done += 1
        m, is_last = task.microbatch, stage == self.swarm.num_stages - 1
        validation = work.is_validation(m)
        bad = self.flaky.popleft() if self.flaky else self.swarm.spoil(self, m, now)
        if bad is not None:
            self.give_back(m, bad)
            return
        if task.kind == "forward":
            now.inputs[m] = work.input_of(task) or 0
            if not is_last:
                output = mix(step, m, stage, self.weights, now.inputs[m])
                self.push(work.forward_done(m, output))
                return
            gradient_in = 0
        else:
            gradient_in = work.input_of(task) or 0
        gradient = mix(step, m, stage, self.weights, now.inputs[m], gradient_in, 1)
        if not validation:
            assert m not in now.gradients, "computed twice"
            now.gradients[m] = gradient
        self.push(work.backward_done(m, None if stage == 0 or validation else gradient))
        self.say(
            receipt=pb.Receipt(
                incarnation=self.incarnation, step=step, attempt=now.attempt, microbatch=m,
                stage=stage, loss_sum=mix(step, m) % 1000 / 100.0 if is_last else 0.0,
                has_loss=is_last, busy_s=self.busy_s, boundary_bytes=10,
                digest=(gradient ^ self.corrupt_bits) & MASK,
            )
        )  # fmt: skip

    def give_back(self, m: MicrobatchId, bad: BadNumbers) -> None:
        now = self.current
        assert now is not None
        now.work.give_back(m)
        if bad.leg == pb.TASK_LEG_SUMMED:
            now.gradients[m] = 1
        self.say(
            trouble=pb.Trouble(
                kind=pb.TROUBLE_KIND_NUMBERS, incarnation=self.incarnation, error=bad.error,
                detail="bad numbers", step=now.step, attempt=now.attempt, microbatch=m, leg=bad.leg,
            )
        )  # fmt: skip

    # ---- the step's end ------------------------------------------------------------------

    def reduce(self, command: pb.Reduce) -> None:
        now = self.current
        mine = {p.incarnation: set(p.microbatches) for p in command.parts}.get(self.incarnation)
        if now is None or (now.step, now.attempt) != (command.step, command.attempt):
            self.trouble(pb.TROUBLE_KIND_OWN_FAILURE, "reduce of another step")
            return
        if mine != set(now.gradients):
            self.trouble(pb.TROUBLE_KIND_OWN_FAILURE, f"manifest {mine}, {set(now.gradients)}")
            return
        own = sum(now.gradients.values()) & MASK
        others = {p.incarnation for p in command.parts} - {self.incarnation}
        self.prepared = None
        self.reduction = Reduction(command, {self.incarnation: own}, others)
        for other in others:
            self.send("partial", command.round, own, other)
        early, self.early = self.early, []
        for message in early:
            self.take(message)
        self.settle_reduction()

    def settle_reduction(self) -> None:
        reduction, now = self.reduction, self.current
        if reduction is None or now is None or self.prepared is not None:
            return
        parts = {p.incarnation for p in reduction.command.parts}
        if self.members:
            reduction.unacknowledged &= set(self.members)
        if reduction.unacknowledged or set(reduction.partials) != parts:
            return
        total = scaled(sum(reduction.partials.values()) & MASK, now.coarsen) ^ self.corrupt_sums
        self.prepared = now.step, total
        self.write_log(now.step, self.stage, list(now.work.sent()))
        self.say(
            prepared=pb.Prepared(
                incarnation=self.incarnation, step=now.step, attempt=now.attempt,
                round=reduction.command.round, sums_digest=total, reduce_bytes=8,
                squared_norms=[float(total % 997) if self.norm is None else self.norm],
            )
        )  # fmt: skip

    def acknowledged(self, message: Message) -> None:
        reduction = self.reduction
        if reduction is not None and message[2:4] == ("partial", reduction.command.round):
            reduction.unacknowledged.discard(message[6])
            self.settle_reduction()

    def commit(self, command: pb.Commit) -> None:
        if self.prepared != (command.step, command.sums_digest):
            self.trouble(pb.TROUBLE_KIND_OWN_FAILURE, f"commit of other sums than {self.prepared}")
            return
        self.promises.keep(command)
        self.swarm.on_commit(self, command)
        self.current = self.reduction = self.prepared = None
        self.early = [m for m in self.early if m[0] > command.step]
        self.committed = command.step
        if self.is_apprentice and self.promoted_at is None:
            self.catch_up.append((command.step, command.sums_digest))
            return
        self.moments = advanced(self.moments, command.sums_digest)
        self.weights = applied(self.weights, self.moments, command.step)
        self.weights ^= self.corrupt_weights
        self.step = command.step
        self.say(
            applied=pb.Applied(
                incarnation=self.incarnation, step=self.step, weights_digest=self.weights
            )
        )


def copied_part(assign: pb.Assign) -> int:
    is_worker = assign.tier == types_pb2.TIER_WORKER
    return types_pb2.STATE_PART_WEIGHTS if is_worker else types_pb2.STATE_PART_ALL


def _lease(lease: pb.Lease) -> LeaseFacts:
    return LeaseFacts(
        microbatch=MicrobatchId(lease.microbatch),
        upstream=Incarnation(lease.upstream),
        downstream=Incarnation(lease.downstream),
        downstream_done=lease.downstream_done,
        upstream_done=lease.upstream_done,
    )


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
        self.disks: dict[PeerId, dict[tuple[int, int], dict[tuple[str, int], int]]] = {}
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

    def on_commit(self, node: FakeNode, commit: pb.Commit) -> None:
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

    def actions(self) -> list[Callable[[], None]]:
        """Everything that can happen now; the order is fixed."""
        found = [action for node in list(self.nodes.values()) for action in node.actions()]
        channels: dict[tuple[int, int], Message] = {}
        for message in self.messages:  # each channel keeps its order
            channels.setdefault((message[5], message[6]), message)
        for message in channels.values():
            receiver = self.by_incarnation(message[6])
            sender = self.by_incarnation(message[5])
            if receiver is None or sender is None:
                found.append(lambda m=message: self.messages.remove(m))  # type: ignore[misc]
            elif not (receiver.frozen or sender.frozen) and receiver.knows(message[5]):
                found.append(lambda m=message: self.deliver(m))  # type: ignore[misc]
        for peer_id in self.conductor.missing_holders():
            if peer_id not in self.nodes:  # its address refuses the connection
                found.append(lambda p=peer_id: self.conductor.process_gone(p))  # type: ignore[misc]
        return found

    def deliver(self, message: Message) -> None:
        self.messages.remove(message)
        receiver, sender = self.by_incarnation(message[6]), self.by_incarnation(message[5])
        assert receiver is not None
        assert sender is not None
        receiver.take(message)
        sender.acknowledged(message)

    def lose_messages_of(self, incarnation: int) -> None:
        self.messages = [m for m in self.messages if incarnation not in (m[5], m[6])]

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
            action = next(iter(self.actions()), None)
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
                raise AssertionError(
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
