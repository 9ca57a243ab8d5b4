# SPDX-License-Identifier: Apache-2.0
"""One incarnation of a node at a stage: carries out the coordinator's commands for it.

Decisions lie elsewhere: what to compute next in `StepWork`, what peers may send in the inboxes.
This connects them with the compute thread, the links and the session.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.compression.registry import Boundary
from shoal.node.apprentice import Apprentice
from shoal.node.boundary_log import BoundaryLog
from shoal.node.inbox import BoundaryInbox, BoundaryTensor
from shoal.node.links import PeerLinks
from shoal.node.log_file import Sent
from shoal.node.member_reports import MemberReports, Send
from shoal.node.reduce import all_reduce
from shoal.node.reduce_inbox import ReduceInbox
from shoal.node.share_fetch import ShareFetch
from shoal.node.shares import Share, ShareDesk, ShareKey
from shoal.node.stage_worker import Computed, StageWorker
from shoal.node.step_work import LeaseFacts, Push, StepWork
from shoal.node.swarm_view import SwarmView
from shoal.protocol.costs import boundary_shape
from shoal.protocol.errors import (
    NonFiniteError,
    NonFiniteLossError,
    NumericOverflowError,
    ProtocolError,
    ReduceMismatchError,
    ShoalError,
    TruncatedStreamError,
    WrongStepError,
)
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.faults import Moment
from shoal.protocol.ids import NOBODY, Incarnation, MicrobatchId
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.rpc import Credentials
from shoal.protocol.schedule import Task
from shoal.protocol.wire import Payload

log = logging.getLogger(__name__)

_NUMBERS = (NonFiniteError, NumericOverflowError)

_DIRECTIONS = {
    "forward": types_pb2.DIRECTION_FORWARD,
    "backward": types_pb2.DIRECTION_BACKWARD,
}

_RECEIVED = {"forward": Moment.FORWARD_RECEIVED, "backward": Moment.BACKWARD_RECEIVED}

Work = StepWork[memoryview, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Total sums that wait for the coordinator's commit."""

    step: int
    attempt: int
    totals: torch.Tensor
    digest: int


class StageMember:
    def __init__(
        self,
        worker: StageWorker,
        *,
        incarnation: Incarnation,
        boundary: Boundary,
        swarm: SwarmView,
        credentials: Credentials,
        device: torch.device,
        send: Send,
        log: BoundaryLog | None = None,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.prepared: Prepared | None = None
        self.apprentice: Apprentice | None = None
        """Set while this member lacks the optimizer's state, or has not shown that it is right."""
        self._boundary = boundary
        self._swarm = swarm
        self._faults = faults
        self._log = log
        run, runtime = worker.run, worker.runtime
        self._run = run
        self._reports = MemberReports(send, incarnation, worker.spec.stage)
        self.boundary_inbox = BoundaryInbox(run, worker.spec, boundary, swarm, device, runtime.step)
        self.reduce_inbox = ReduceInbox(
            run.run_id, worker.spec.stage, runtime.sums.numel(), runtime.step
        )
        self.links = PeerLinks(
            credentials,
            incarnation=incarnation,
            on_refused=self._report_refused,
            on_unreachable=self._reports.unreachable,
            faults=faults,
            on_broken=lambda member, reason: self._reports.unreachable(
                member, reason, error=TruncatedStreamError
            ),
        )
        self.share_desk = ShareDesk(runtime.step)
        self._share_fetch = ShareFetch(
            run,
            worker.spec.stage,
            me=incarnation,
            swarm=swarm,
            credentials=credentials,
            on_unreachable=self._reports.unreachable,
        )
        self._scale = (0, 1.0)  # the open step's (scale_exponent, loss_scale)
        self._work: Work | None = None
        self._forwards: dict[MicrobatchId, Computed] = {}  # this attempt's, for their receipts
        self._leaving = False
        self._given_back_late: MicrobatchId | None = None  # its forward was running
        self._done = 0
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._reduction: asyncio.Task[None] | None = None

    @property
    def _step(self) -> int:
        """The step that is open, or was last."""
        return self._reports.step

    @property
    def _attempt(self) -> int:
        return self._reports.attempt

    # ---- commands ------------------------------------------------------------------------

    async def open_step(self, command: coordinator_pb2.StepOpen) -> None:
        """Start a step, or start it anew."""
        await self._stop_step()
        self.prepared = None
        if self.apprentice is not None and self.apprentice.is_proven:
            apprentice, self.apprentice = self.apprentice, None
            await apprentice.close()
        await self.worker.begin_step(command)
        if self._log is not None:
            self._log.forget_from(command.step)
        self._reports.step, self._reports.attempt = command.step, command.attempt
        self._scale = (command.scale_exponent, command.loss_scale)
        self._forwards = {}
        spec = self.worker.spec
        work: Work = StepWork(
            stage=spec.stage,
            num_stages=spec.num_stages,
            num_microbatches=command.num_microbatches,
            window=command.window,
            credits=command.credits,
        )
        self._work = work
        work.update_leases(_lease(lease) for lease in command.leases)
        self.boundary_inbox.open_step(command.step, command.attempt, self._deliver)
        if self._leaving:
            self.release()
        self._wake.set()
        self._pump = asyncio.create_task(self._compute(work), name=f"step {command.step}")

    async def update_leases(self, command: coordinator_pb2.LeaseUpdate) -> None:
        if self._work is None or (command.step, command.attempt) != (self._step, self._attempt):
            return
        self._push(self._work.update_leases(_lease(lease) for lease in command.leases))
        self.boundary_inbox.leases_changed()
        self._wake.set()

    def release(self) -> None:
        """The node leaves: give back what it has not begun, now and in a step that still opens.
        What it has summed stays with it until the step is committed."""
        self._leaving = True
        work = self._work
        if work is None:
            return
        self._given_back_late = work.running
        self._reports.release(work.release())

    async def reduce(self, command: coordinator_pb2.Reduce) -> None:
        await self._cancel(self._reduction)
        self._reduction = asyncio.create_task(self._reduce(command), name="reduce")

    async def commit(self, command: coordinator_pb2.Commit) -> None:
        prepared = self.prepared
        if (
            prepared is None
            or prepared.step != command.step
            or prepared.digest != command.sums_digest
        ):
            raise ReduceMismatchError(
                f"step {command.step} is committed with sums {command.sums_digest:#x}; this node "
                + (f"holds {prepared.digest:#x}" if prepared else "holds none")
            )
        self._faults.reach(Moment.COMMITTED, command.step)
        await self._stop_step()
        if self.apprentice is not None and not self.apprentice.is_promoted:
            self.prepared = None
            await self.apprentice.committed(prepared.totals, command)
            self.close_step(command.step)
            return  # the weights come with the next Pull
        digest = await self.worker.apply(prepared.totals, command)
        self.prepared = None
        self.close_step(command.step)
        self._reports.applied(command.step, digest)

    def close_step(self, step: int) -> None:
        """The weights are those after `step`, or will be before another step opens."""
        self.boundary_inbox.close_step(step)
        self.reduce_inbox.close_step(step)
        self.share_desk.close_step(step)

    async def members_gone(self, gone: Iterable[Incarnation]) -> None:
        for incarnation in gone:
            await self.links.drop(incarnation)
            await self._share_fetch.drop(incarnation)

    async def close(self) -> None:
        if self.apprentice is not None:
            await self.apprentice.close()
        await self._stop_step()
        self.reduce_inbox.close()
        self.share_desk.close()
        await self._share_fetch.close()
        await self.links.close()

    # ---- the step ------------------------------------------------------------------------

    def _deliver(self, received: BoundaryTensor) -> bool:
        assert self._work is not None, "the inbox delivers to an open step only"
        fresh = self._work.receive(
            received.leg, received.microbatch, received.sender, received.tensor
        )
        self._wake.set()
        if fresh:
            self._faults.reach(_RECEIVED[received.leg], self._step)
        return fresh

    async def _compute(self, work: Work) -> None:
        try:
            while True:
                self._wake.clear()
                task = work.next_task()
                if task is None:
                    await self._wake.wait()
                    continue
                try:
                    await self._run_task(work, task)
                except _NUMBERS as error:
                    await self._give_back(work, task, error)
                self._done += 1
                if task.microbatch == self._given_back_late:
                    self._given_back_late = None
                    if late := work.release(task.microbatch):
                        self._reports.release(late)
        except ShoalError as error:
            self._reports.failure(error)
        except Exception as error:  # out of memory, a failed kernel, a bug: others take the work
            log.exception("computation failed")
            self._reports.failure(error)

    async def _run_task(self, work: Work, task: Task) -> None:
        worker, microbatch, step = self.worker, task.microbatch, self._step
        validation = work.is_validation(microbatch)
        training_ids = [] if validation else [microbatch]
        validation_ids = [microbatch - self._run.spec.batch.microbatches] if validation else []
        await worker.ensure_samples(step, training_ids, validation_ids)
        x = work.input_of(task)
        if self._faults.take_poison():
            worker.runtime.poisoned = True
        if task.kind == "backward":
            assert x is not None, "a backward is chosen once its gradient is here"
            done = await worker.backward(step, microbatch, x)
        elif worker.spec.is_last:
            done = await worker.loss(step, microbatch, x, validation=validation)
        else:
            done = await worker.forward(step, microbatch, x, validation=validation)
            assert done.payload is not None, "a forward always has an output"
            self._push(work.forward_done(microbatch, done.payload))
            self._forwards[microbatch] = done
            return
        if not validation:
            self._faults.reach(Moment.GRADIENT_ACCUMULATED, step)
        self._push(work.backward_done(microbatch, done.payload))
        forward = self._forwards.pop(microbatch, None)
        self._reports.receipt(microbatch, [done] if forward is None else [forward, done])

    async def _give_back(self, work: Work, task: Task, error: ProtocolError) -> None:
        """The task gave bad numbers: the coordinator has it executed again, and judges."""
        microbatch = task.microbatch
        log.warning("microbatch %d: %s: %s", microbatch, type(error).__name__, error)
        only_here = not await self.worker.give_back(microbatch)
        work.give_back(microbatch)
        self._forwards.pop(microbatch, None)
        if only_here:  # it could not be encoded once it was summed
            leg = coordinator_pb2.TASK_LEG_SUMMED
        elif (
            isinstance(error, NonFiniteLossError)
            or work.is_validation(microbatch)
            or (task.kind == "forward" and not self.worker.spec.is_last)
        ):
            leg = coordinator_pb2.TASK_LEG_FORWARD
        else:
            leg = coordinator_pb2.TASK_LEG_BACKWARD
        self._reports.numbers(error, microbatch, leg)

    def _push(self, pushes: Sequence[Push[memoryview]]) -> None:
        shape = boundary_shape(self._run.spec)
        for push in pushes:
            member = self._swarm.member(push.to)
            if member is None:
                continue  # on its way out; the coordinator will name another
            codec = (
                self._boundary.forward if push.direction == "forward" else self._boundary.backward
            )
            header = types_pb2.TensorHeader(
                key=types_pb2.TensorKey(
                    run_id=self._run.run_id,
                    step=self._step,
                    attempt=self._attempt,
                    microbatch=push.microbatch,
                    stage=member.stage,
                    direction=_DIRECTIONS[push.direction],
                    incarnation=self.incarnation,
                ),
                codec=codec.spec,
                codec_version=codec.version,
                dtype=types_pb2.DTYPE_FLOAT32,
                shape=shape,
            )
            pushed = self.links.push(member, header, push.payload)
            if push.direction == "forward":
                self._reach_once_acknowledged(Moment.FORWARD_SENT, pushed, self._step)

    def _reach_once_acknowledged(
        self, moment: Moment, pushed: "asyncio.Future[None]", step: int
    ) -> None:
        def acknowledged(future: "asyncio.Future[None]") -> None:
            if not future.cancelled() and future.exception() is None:
                self._faults.reach(moment, step)

        if self._faults.are_possible:
            pushed.add_done_callback(acknowledged)

    async def _reduce(self, command: coordinator_pb2.Reduce) -> None:
        try:
            await self._sum_up(command)
        except NumericOverflowError as error:  # in a peer's sums, perhaps
            log.warning("reduction failed: %s", error)
            self._reports.numbers(error, MicrobatchId(0), coordinator_pb2.TASK_LEG_REDUCED)
        except Exception as error:  # whatever it is, the round can't end without this node
            log.log(
                logging.WARNING if isinstance(error, ShoalError) else logging.ERROR,
                "reduction failed",
                exc_info=not isinstance(error, ShoalError),
            )
            self._reports.failure(error)

    async def _sum_up(self, command: coordinator_pb2.Reduce) -> None:
        if (command.step, command.attempt) != (self._step, self._attempt):
            raise WrongStepError(
                f"reduce of step {command.step}, attempt {command.attempt}; this node is at step "
                f"{self._step}, attempt {self._attempt}"
            )
        mine = {p.incarnation: set(p.microbatches) for p in command.parts}.get(self.incarnation)
        have = self.worker.runtime.accumulated
        if mine != have:
            raise ReduceMismatchError(
                f"the manifest gives this node microbatches {sorted(mine or ())}, its accumulator "
                f"holds {sorted(have)}"
            )
        if len(command.parts) == 1:
            self._faults.reach(Moment.MID_REDUCE, command.step)
        shares_nothing = not self.worker.runtime.mirrored
        if shares_nothing:  # else with the shares, which are yet to come
            self._log_sent()
        first_slice = True

        def push_slice(
            to: Incarnation, header: types_pb2.TensorHeader, payload: Payload
        ) -> "asyncio.Future[None]":
            nonlocal first_slice
            pushed = self._push_slice(to, header, payload)
            if first_slice:
                first_slice = False
                self._reach_once_acknowledged(Moment.MID_REDUCE, pushed, command.step)
            return pushed

        outcome = await all_reduce(
            self.worker.runtime.sums,
            me=self.incarnation,
            parts=[Incarnation(p.incarnation) for p in command.parts],
            key=types_pb2.TensorKey(
                run_id=self._run.run_id,
                step=command.step,
                attempt=command.attempt,
                round=command.round,
                stage=self.worker.spec.stage,
                incarnation=self.incarnation,
            ),
            inbox=self.reduce_inbox,
            push=push_slice,
        )
        totals, share_bytes = outcome.totals, dict[int, int]()
        if not shares_nothing:
            totals, share_bytes = await self._exchange_shares(totals)
        sums = await self.worker.prepare(totals)
        if self._log is not None:  # from here on the step may be committed without this node
            await self._log.settle()
        self.prepared = Prepared(command.step, command.attempt, totals, sums.digest)
        self._reports.prepared(
            command.round, sums, reduce_bytes=outcome.bytes_sent, share_bytes=share_bytes
        )

    async def _exchange_shares(self, totals: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
        """Totals with the neighbours' shares of what both sides of a boundary hold; and how many
        bytes these took, by boundary."""
        own = await self.worker.shares(totals)
        keys = {boundary: ShareKey(self._step, boundary, *self._scale) for boundary in own}
        packed = await asyncio.to_thread(lambda: {b: Share.of(own[b]) for b in own})
        self.share_desk.offer({keys[b]: share for b, share in packed.items()})
        self._log_sent(Sent("share", b, share.payload) for b, share in packed.items())
        others = await self._share_fetch.fetch(keys.values())
        values = {boundary: share.values for boundary, share in others.items()}
        num_bytes = {boundary: share.num_bytes for boundary, share in others.items()}
        return await self.worker.add_shares(totals, values), num_bytes

    def _log_sent(self, shares: Iterable[Sent] = ()) -> None:
        """All of it: every microbatch of the manifest has been through its backward here."""
        if self._work is None or self._log is None or not self._log.is_on:
            return
        sent = [Sent(leg, microbatch, payload) for leg, microbatch, payload in self._work.sent()]
        self._log.append(self._step, self.worker.spec.stage, [*sent, *shares])

    def _push_slice(
        self, to: Incarnation, header: types_pb2.TensorHeader, payload: Payload
    ) -> "asyncio.Future[None]":
        member = self._swarm.member(to)
        if member is None:  # fenced in this moment: the round will be cancelled or go on without it
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            gone.cancel()
            return gone
        return self.links.push(member, header, payload)

    async def _stop_step(self) -> None:
        await self._cancel(self._reduction)
        await self._cancel(self._pump)
        self.boundary_inbox.suspend()
        self._reduction = self._pump = self._work = None

    @staticmethod
    async def _cancel(task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # ---- snapshots and state -------------------------------------------------------------

    async def state_file(self, folder: Path, step: int) -> Path:
        """Write the state at `step` into `folder`. Raises `WrongStepError` when it moved on."""
        # A name of its own: several readers may ask for one step, and each removes its file.
        path = folder / f"stage-{self.worker.spec.stage}-{uuid.uuid4().hex}.safetensors"
        have = self.worker.runtime.step
        if have == step:
            have, _ = await self.worker.save(path)
        if have != step:  # also when a commit came first
            path.unlink(missing_ok=True)
            raise WrongStepError(f"the state of step {step} is asked for; this node holds {have}")
        return path

    # ---- reports -------------------------------------------------------------------------

    def _report_refused(
        self, member: types_pb2.Member, key: types_pb2.TensorKey, error: ProtocolError
    ) -> None:
        """A peer finds this node's bytes wrong. Both sides report; the coordinator judges."""
        log.warning("%s refused a tensor: %s: %s", member.name, type(error).__name__, error)
        if isinstance(error, NonFiniteError) and key.direction in _DIRECTIONS.values():
            if (key.step, key.attempt) == (self._step, self._attempt):
                self._reports.numbers(
                    error, MicrobatchId(key.microbatch), coordinator_pb2.TASK_LEG_SUMMED
                )
            return
        self._reports.failure(error)

    def progress(self) -> coordinator_pb2.Progress:
        """How far this incarnation is; changes whenever it has finished something."""
        waits_for = self.reduce_inbox.waits_for()
        if waits_for is None:
            waits_for = self._share_fetch.waits_for
            if waits_for == NOBODY and self._work is not None:
                waits_for = self._work.lacks()
        return coordinator_pb2.Progress(
            done=self._done + self.reduce_inbox.num_taken + self._share_fetch.num_fetched,
            waits_for=waits_for,
        )

    def queue_depth(self) -> int:
        return self._work.queue_depth() if self._work else 0

    def waiting_for(self) -> str:
        """What the node waits for, in plain words; empty while it computes."""
        if self._work is None:
            return "the coordinator to open a step"
        if self._work.queue_depth():
            return ""
        if self._log is not None and self._log.is_awaited:
            return "its disk, to write the boundary log"
        if (neighbour := self._share_fetch.waits_for) != NOBODY:
            name = self._swarm.name(neighbour)
            return f"the share of {name} in what both sides of a boundary hold"
        waits = self._work.waits_for()
        if not waits:
            return "the other nodes to finish the step"
        direction, microbatch, neighbour = waits[0]
        what = "activations" if direction == "forward" else "gradients"
        return f"{what} of microbatch {microbatch} from {self._swarm.name(neighbour)}"


def _lease(lease: coordinator_pb2.Lease) -> LeaseFacts:
    return LeaseFacts(
        microbatch=MicrobatchId(lease.microbatch),
        upstream=Incarnation(lease.upstream),
        downstream=Incarnation(lease.downstream),
        downstream_done=lease.downstream_done,
        upstream_done=lease.upstream_done,
    )
