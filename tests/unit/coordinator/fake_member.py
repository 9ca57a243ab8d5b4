# SPDX-License-Identifier: Apache-2.0
"""A fake node's share of a step: tasks, boundary tensors, sums and commits, as `node/` has them."""

from collections import deque
from typing import TYPE_CHECKING

from shoal.node.step_work import LeaseFacts, Push, StepWork
from shoal.protocol.errors import WrongLeaseError
from shoal.protocol.ids import Incarnation, MicrobatchId, PeerId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.scale import coarsened

from .fake_attempt import BadNumbers, Reduction, Try
from .fake_holder import FakeHolder
from .fake_network import Message
from .fake_training import MASK, advanced, applied, mix, scaled

if TYPE_CHECKING:
    from .fake_swarm import FakeSwarm


class FakeMember(FakeHolder):
    def __init__(self, swarm: "FakeSwarm", peer_id: PeerId) -> None:
        super().__init__(swarm, peer_id)
        self.current: Try | None = None
        self.reduction: Reduction | None = None
        self.early: list[Message] = []
        self.leaving = False
        self.num_done = 0
        self._busy_until_s: float | None = None
        # What a test may break.
        self.busy_s = 0.1  # as it reports for each microbatch
        self.corrupt_bits = 0
        self.corrupt_sums = 0
        self.corrupt_weights = 0
        self.flaky: deque[BadNumbers] = deque()  # what its next tasks fail with
        self.norm: float | None = None  # as it reports it for each tensor
        self.mute = False  # computes nothing, though its heart beats
        self.task_s = 0.0  # what a task takes

    def detach(self) -> None:
        """Work under way is lost."""
        super().detach()
        self.current = self.reduction = None
        self.early = []

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
                Message(now.step, now.attempt, kind, number, value, self.incarnation, to)
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
                forward_bytes=None if is_last else 6,
                backward_bytes=None if stage == 0 or validation else 4,
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
        if reduction is None or message.kind != "partial":
            return
        if message.number == reduction.command.round:
            reduction.unacknowledged.discard(message.receiver)
            self.settle_reduction()

    def commit(self, command: pb.Commit) -> None:
        if self.prepared != (command.step, command.sums_digest):
            self.trouble(pb.TROUBLE_KIND_OWN_FAILURE, f"commit of other sums than {self.prepared}")
            return
        self.promises.keep(command)
        self.swarm.on_commit(self, command)
        self.current = self.reduction = self.prepared = None
        self.early = [m for m in self.early if m.step > command.step]
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


def _lease(lease: pb.Lease) -> LeaseFacts:
    return LeaseFacts(
        microbatch=MicrobatchId(lease.microbatch),
        upstream=Incarnation(lease.upstream),
        downstream=Incarnation(lease.downstream),
        downstream_done=lease.downstream_done,
        upstream_done=lease.upstream_done,
    )
