# SPDX-License-Identifier: Apache-2.0
"""The state that a fake node holds: where it gets it, how it serves it to others, and a worker that
becomes a holder."""

from typing import TYPE_CHECKING

from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.proto import types_pb2

from .fake_process import FakeProcess
from .fake_replay import LogHole, OtherBits, replayed
from .fake_training import State, advanced, initial_weights

if TYPE_CHECKING:
    from .fake_swarm import FakeSwarm


class FakeHolder(FakeProcess):
    def __init__(self, swarm: "FakeSwarm", peer_id: PeerId) -> None:
        super().__init__(swarm, peer_id)
        # Kept over sessions.
        self.stage = -1
        self.step = -1
        self.weights = 0
        self.moments = 0
        self.prepared: tuple[int, int] | None = None  # (step, total)
        self.held_sums: tuple[int, int] | None = None
        # One incarnation.
        self.copying: pb.Assign | None = None
        self.uploads: list[tuple[int, int, State]] = []  # (step, stage, state)
        self.pins: dict[tuple[int, int], State] = {}  # (step, part) -> what it serves
        self.replayed: list[pb.ReplayStep] | None = None  # steps still to do
        self.replay_state: State = (0, 0)
        # A worker: it has the weights, and the moments of some step or none.
        self.is_apprentice = False
        self.moments_step: int | None = None
        self.promoted_at: int | None = None
        self.committed = 0
        self.catch_up: list[tuple[int, int]] = []  # (step, total)
        self.pulls: dict[int, pb.Pull] = {}  # part -> what is on its way
        # What a test may break.
        self.disk_full = False
        self.corrupt_copy = 0
        self.corrupt_moments = 0
        self.corrupt_log = 0
        self.slow_parts: set[int] = set()  # what it fetches of these doesn't arrive

    @property
    def has_all(self) -> bool:
        """Holds the moments too, and has applied a step with them."""
        return not self.is_apprentice or (
            self.promoted_at is not None and self.step > self.promoted_at
        )

    def detach(self) -> None:
        """The state stays, unless it is a worker's."""
        if self.incarnation and self.prepared is not None:
            self.held_sums = self.prepared
        super().detach()
        self.prepared = self.copying = self.replayed = None
        self.uploads, self.pins, self.pulls, self.catch_up = [], {}, {}, []
        if self.is_apprentice:
            self.forget()

    def forget(self) -> None:
        """Without a state that is worth anything."""
        self.step, self.held_sums = -1, None
        self.is_apprentice, self.moments_step, self.promoted_at = False, None, None

    # ---- where it comes from -------------------------------------------------------------

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
        """One step of a lost stage."""
        assert self.copying is not None
        assert self.replayed
        assign, step = self.copying, self.replayed.pop(0)
        self.incarnation = assign.incarnation
        try:
            done = replayed(self.swarm, assign, self.replay_state, step)
        except LogHole as hole:
            self.copying = self.replayed = None
            self.trouble(
                pb.TROUBLE_KIND_OWN_FAILURE, "a hole", error="BoundaryHoleError",
                peer_id=str(hole.args[0]),
            )  # fmt: skip
            return
        except OtherBits:
            self.copying = self.replayed = None
            self.trouble(pb.TROUBLE_KIND_OWN_FAILURE, "other bits", error="ReplayMismatchError")
            return
        self.replay_state = done.state
        self.write_log(step.commit.step, assign.stage, done.sent)
        self.say(
            replaying=pb.Replaying(
                incarnation=assign.incarnation, step=step.commit.step, log_bytes=8 * len(done.sent)
            )
        )

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

    # ---- from others, and for them -------------------------------------------------------

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

    # ---- snapshots -----------------------------------------------------------------------

    def begin_upload(self, command: pb.TakeSnapshot) -> None:
        assert self.has_all, "a worker can't be asked"
        if self.disk_full:
            self.trouble(pb.TROUBLE_KIND_SNAPSHOT, "no space left; free some space.")
        elif self.step == command.step:
            self.uploads.append((self.step, self.stage, (self.weights, self.moments)))
        else:
            self.trouble(pb.TROUBLE_KIND_SNAPSHOT, "the state moved on")

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


def copied_part(assign: pb.Assign) -> int:
    is_worker = assign.tier == types_pb2.TIER_WORKER
    return types_pb2.STATE_PART_WEIGHTS if is_worker else types_pb2.STATE_PART_ALL
