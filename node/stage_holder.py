# SPDX-License-Identifier: Apache-2.0
"""The stage that this node holds: takes assignments, and keeps the state across sessions.

An incarnation (`StageMember`) ends with its session or its fencing; the state (`StageWorker`)
stays, is offered in the next Hello, and is dropped only for another assignment.
"""

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from shoal.compression.registry import parse_boundary
from shoal.node.admission import Membership
from shoal.node.apprentice import Apprentice
from shoal.node.boundary_log import BoundaryLog
from shoal.node.data import ShardCache, TokenSource
from shoal.node.disk_room import DiskRoom
from shoal.node.hardware import Device
from shoal.node.inbox import BoundaryInbox
from shoal.node.member_reports import trouble_event
from shoal.node.reduce_inbox import ReduceInbox
from shoal.node.shares import ShareDesk
from shoal.node.stage_loader import StageLoader
from shoal.node.stage_member import Prepared, StageMember
from shoal.node.stage_worker import StageWorker
from shoal.node.state_pins import PinnedState, StatePins
from shoal.node.state_transfer import StateTransfer
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import (
    BoundaryHoleError,
    CoordinatorDiskError,
    ShoalError,
    WrongLeaseError,
)
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.task_scope import TaskScope

log = logging.getLogger(__name__)

Report = Callable[[str], None]
"""Tells the owner, in one line, what the node does."""

_OWN_FAILURES = (ShoalError, MemoryError, RuntimeError, OSError)
"""What a stage may fail with (PyTorch's out-of-memory errors among them): the coordinator hears
of it, the node goes on. Anything else is a bug and ends the node."""


class StageHolder:
    def __init__(
        self,
        membership: Membership,
        device: Device,
        *,
        folder: Path,
        scratch: Path,
        transfer: StateTransfer,
        swarm: SwarmView,
        tasks: TaskScope,
        send: Callable[[coordinator_pb2.NodeEvent], None],
        report: Report,
        faults: Faults = NO_FAULTS,
        max_cache_bytes: int | None = None,
        room: DiskRoom | None = None,
    ) -> None:
        run = membership.run
        self._credentials = membership.credentials
        self._device = device
        self._boundary = parse_boundary(run.spec.pipeline.boundary)
        self._room = room or DiskRoom(report)
        self._shards = ShardCache(
            folder / "shards",
            self._fetch_shard,
            max_bytes=max_cache_bytes,
            on_full=self._room.note,
        )
        self._num_chunks = 0
        self.boundary_log = BoundaryLog(
            folder / "boundary-log",
            run.run_id,
            boundary=self._boundary.spec,
            budget_bytes=run.spec.fault.boundary_log_mb * 10**6,
        )
        self._loader = StageLoader(
            run,
            device,
            boundary=self._boundary,
            credentials=membership.credentials,
            tokens=TokenSource(run, self._shards),
            transfer=transfer,
            log=self.boundary_log,
            room=self._room,
            send=send,
            report=report,
        )
        self._scratch = scratch
        self._transfer = transfer
        self._swarm = swarm
        self._tasks = tasks
        self._send_event = send
        self._report = report
        self._faults = faults
        self.on_stage: Callable[[], None] = lambda: None
        """Called when the stage has changed."""
        self.member: StageMember | None = None
        self._worker: StageWorker | None = None
        self._weights_digest = 0
        self._held_sums: Prepared | None = None  # of a session that broke before their commit
        self._taking: asyncio.Task[None] | None = None
        self._pins: StatePins | None = None
        self._ending: set[asyncio.Task[None]] = set()  # of incarnations that are over
        self._committing = False
        self._busy_s: deque[float] = deque(maxlen=16)
        self._leaving = False

    # ---- what the peer service asks ------------------------------------------------------

    @property
    def boundary_inbox(self) -> BoundaryInbox | None:
        return self.member.boundary_inbox if self.member else None

    @property
    def reduce_inbox(self) -> ReduceInbox | None:
        return self.member.reduce_inbox if self.member else None

    def share_desk(self, stage: int) -> ShareDesk | None:
        member = self.member
        return member.share_desk if member and member.worker.spec.stage == stage else None

    @property
    def committed_step(self) -> int:
        return self._worker.runtime.step if self._worker else 0

    async def pinned(
        self, stage: int, step: int, part: types_pb2.StatePart.ValueType
    ) -> PinnedState:
        member, pins = self.member, self._pins
        if member is None or pins is None or member.worker.spec.stage != stage:
            raise WrongLeaseError(f"this node doesn't hold stage {stage}")
        return await pins.get(step, part)

    # ---- what the session and the display ask --------------------------------------------

    @property
    def stage(self) -> int | None:
        return self.member.worker.spec.stage if self.member else None

    @property
    def microbatches_per_s(self) -> float:
        """Per second of busy time, a moving median; 0 while unknown."""
        return 1.0 / max(statistics.median(self._busy_s), 1e-6) if self._busy_s else 0.0

    def held(self) -> coordinator_pb2.HeldState | None:
        """The state that an earlier session left here."""
        if self._worker is None or (self.member and self.member.apprentice):
            return None
        held = coordinator_pb2.HeldState(
            stage=self._worker.spec.stage,
            step=self._worker.runtime.step,
            weights_digest=self._weights_digest,
        )
        if self._held_sums is not None:
            held.has_prepared = True
            held.prepared_digest = self._held_sums.digest
        return held

    def progress(self) -> coordinator_pb2.Progress | None:
        """How far the present incarnation is; tokens that it has to fetch count as well."""
        if self.member is None:
            return None
        progress = self.member.progress()
        progress.done += self._num_chunks
        return progress

    async def _fetch_shard(self, sha256: str) -> AsyncIterator[bytes]:
        async for data in self._transfer.fetch_shard(sha256):
            self._num_chunks += 1
            yield data

    # ---- commands ------------------------------------------------------------------------

    async def take(self, assign: coordinator_pb2.Assign) -> None:
        """Begin to take a stage; a long copy must not hold up the commands that come meanwhile."""
        await self._stop_taking()
        self._taking = self._tasks.spawn(self._take(assign))

    async def obey(self, command: coordinator_pb2.Command, kind: str) -> None:
        """A command for the stage; without one it is stale and ignored."""
        member = self.member
        if member is None:
            return
        try:
            if kind == "step_open":
                await member.open_step(command.step_open)
            elif kind == "leases":
                await member.update_leases(command.leases)
            elif kind == "reduce":
                await member.reduce(command.reduce)
            elif kind == "commit":
                self._committing = True
                await member.commit(command.commit)
                self._committing = False
            elif kind == "snapshot":
                self._tasks.spawn(self._snapshot(member, command.snapshot.step))
                # Lets it queue the copy, before a command that changes the state is read.
                await asyncio.sleep(0)
            elif kind == "pull" and member.apprentice is not None:
                await member.apprentice.pull(command.pull)
            elif kind == "pin" and self._pins is not None:
                await self._pins.want(command.pin)
        except _OWN_FAILURES as error:
            self.trouble(member.incarnation, error)

    def release(self) -> None:
        """The node leaves: it gives back the work that it has not begun, and begins none."""
        self._leaving = True
        if self.member is not None:
            self.member.release()

    async def detach(self) -> None:
        """The incarnation is over; the state stays."""
        await self._stop_taking()
        member = await self._end_member()
        if member is not None:
            self._held_sums = member.prepared
            if member.apprentice is not None:
                self._drop_state()  # a part of it, or one that nobody has checked
            elif self._committing:
                await self._look_again()
            self.on_stage()
        self._committing = False

    async def _look_again(self) -> None:
        """The session broke over a commit: it is applied to its end all the same, or was not."""
        worker = self._worker
        assert worker is not None, "a member has one"
        try:
            self._weights_digest = await worker.weights_digest()
        except _OWN_FAILURES as error:
            log.warning("the state is lost: %s: %s", type(error).__name__, error)
            self._drop_state()

    async def close(self) -> None:
        await self.detach()
        await self._all_ended()
        self._drop_state()
        self._transfer.forget()
        await self._shards.aclose()
        await self.boundary_log.close()

    def trouble(self, incarnation: int, error: Exception) -> None:
        log.warning("%s: %s", type(error).__name__, error)
        self._room.note(error)
        self._send_event(
            trouble_event(
                coordinator_pb2.TROUBLE_KIND_OWN_FAILURE,
                error,
                incarnation=incarnation,
                peer_id=error.peer_id if isinstance(error, BoundaryHoleError) else "",
            )
        )

    # ---- taking a stage ------------------------------------------------------------------

    async def _take(self, assign: coordinator_pb2.Assign) -> None:
        try:
            await self._load(assign)
        except _OWN_FAILURES as error:
            self.trouble(assign.incarnation, error)

    async def _load(self, assign: coordinator_pb2.Assign) -> None:
        await self._end_member()
        await self._room.wait()
        worker = self._worker
        if assign.source == coordinator_pb2.STATE_SOURCE_KEEP:
            if worker is None or worker.spec.stage != assign.stage:
                raise WrongLeaseError(f"stage {assign.stage} is to be kept, but isn't held")
        else:
            await self._all_ended()  # first: there may not be memory for two
            self._drop_state()
            worker = await self._loader.load(assign)
        digest = await worker.weights_digest()
        is_worker = assign.tier == types_pb2.TIER_WORKER
        self._worker, self._weights_digest = worker, digest
        step = worker.runtime.step
        member = StageMember(
            worker,
            incarnation=Incarnation(assign.incarnation),
            boundary=self._boundary,
            swarm=self._swarm,
            credentials=self._credentials,
            device=self._device.torch_device,
            send=self._send,
            log=self.boundary_log,
            faults=self._faults,
        )
        if is_worker:
            member.apprentice = self._apprentice(member)
        held_sums, self._held_sums = self._held_sums, None
        if held_sums is not None and held_sums.step == step + 1:
            member.prepared = held_sums
        self.member = member
        self._pins = StatePins(
            self._scratch,
            step=lambda: worker.runtime.step,
            save=lambda path, part: worker.save(path, part=part, durable=False),
        )
        if self._leaving:
            member.release()
        self._busy_s.clear()
        what = "the weights of stage" if is_worker else "stage"
        self._report(f"holding {what} {assign.stage} at step {step}")
        ready = coordinator_pb2.Ready(
            incarnation=assign.incarnation, step=step, weights_digest=digest
        )
        self._send_event(coordinator_pb2.NodeEvent(ready=ready))
        self.on_stage()

    def _apprentice(self, member: StageMember) -> Apprentice:
        incarnation, stage = member.incarnation, member.worker.spec.stage
        return Apprentice(
            member.worker,
            incarnation=incarnation,
            scratch=self._scratch,
            fetch=lambda step, part, donors, load, progress: self._loader.fetch(
                (stage, step, part), donors, load, progress
            ),
            on_step=member.close_step,
            send=self._send,
            on_trouble=lambda error: self.trouble(incarnation, error),
        )

    def waiting_for(self) -> str:
        """What the node waits for, in plain words; empty while it computes."""
        if waits := self._loader.waiting_for:
            return waits
        member = self.member
        if member is None:
            return "an assignment"
        waits = member.waiting_for()
        if member.apprentice is None:
            return waits
        return "; ".join(filter(None, [member.apprentice.progress(), waits]))

    async def _end_member(self) -> StageMember | None:
        """The incarnation is over, also when whoever asks is cancelled. Returns it once it computes
        and sends no more; versions that it still writes for joiners hold nobody up."""
        member, self.member = self.member, None
        pins, self._pins = self._pins, None
        if pins is not None:
            self._end(pins.close())
        if member is not None:
            await asyncio.shield(self._end(member.close()))
        return member

    def _end(self, closing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.spawn(closing)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _all_ended(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending)

    def _drop_state(self) -> None:
        self._held_sums = None
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    async def _stop_taking(self) -> None:
        task, self._taking = self._taking, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _send(self, event: coordinator_pb2.NodeEvent) -> None:
        if event.HasField("applied"):
            self._weights_digest = event.applied.weights_digest
        elif event.HasField("receipt"):
            self._busy_s.append(event.receipt.busy_s)
        self._send_event(event)

    # ---- snapshots -----------------------------------------------------------------------

    async def _snapshot(self, member: StageMember, step: int) -> None:
        """Copy the state now; write and send it while training goes on."""
        try:
            path = await member.state_file(self._scratch, step)
            try:
                await self._transfer.store_snapshot(path, stage=member.worker.spec.stage, step=step)
            finally:
                path.unlink(missing_ok=True)
        except CoordinatorDiskError as error:
            self._report(f"the snapshot of step {step} was not taken: {error}")
        except _OWN_FAILURES as error:
            log.warning("the snapshot of step %d: %s: %s", step, type(error).__name__, error)
            self._send_event(
                trouble_event(
                    coordinator_pb2.TROUBLE_KIND_SNAPSHOT,
                    error,
                    incarnation=member.incarnation,
                    step=step,
                )
            )
