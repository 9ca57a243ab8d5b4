# SPDX-License-Identifier: Apache-2.0
"""The stage that this node holds: takes assignments, and keeps the state across sessions.

An incarnation (`StageMember`) ends with its session or its fencing; the state (`StageWorker`)
stays, is offered in the next Hello, and is dropped only for another assignment.
"""

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from shoal.compression.registry import parse_boundary
from shoal.node.admission import Membership
from shoal.node.apprentice import Apprentice, Load
from shoal.node.boundary_fetch import BoundaryFetch
from shoal.node.boundary_log import BoundaryLog
from shoal.node.data import ShardCache, TokenSource
from shoal.node.hardware import Device
from shoal.node.inbox import BoundaryInbox
from shoal.node.reduce_inbox import ReduceInbox
from shoal.node.replay import StageReplay
from shoal.node.stage_member import Prepared, StageMember
from shoal.node.stage_worker import StageWorker
from shoal.node.state_fetch import FetchProgress
from shoal.node.state_pins import PinnedState, StatePins
from shoal.node.state_transfer import StateTransfer, Version
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
    ) -> None:
        run = membership.run
        self._run = run
        self._credentials = membership.credentials
        self._device = device
        self._boundary = parse_boundary(run.spec.pipeline.boundary)
        self._shards = ShardCache(folder / "shards", self._fetch_shard, max_bytes=max_cache_bytes)
        self._num_chunks = 0
        self._tokens = TokenSource(run, self._shards)
        self.boundary_log = BoundaryLog(
            folder / "boundary-log",
            run.run_id,
            boundary=self._boundary.spec,
            budget_bytes=run.spec.fault.boundary_log_mb * 10**6,
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
        self._replaying = ""
        self._fetching: tuple[str, FetchProgress] | None = None
        self._busy_s: deque[float] = deque(maxlen=16)
        self._leaving = False

    # ---- what the peer service asks ------------------------------------------------------

    @property
    def boundary_inbox(self) -> BoundaryInbox | None:
        return self.member.boundary_inbox if self.member else None

    @property
    def reduce_inbox(self) -> ReduceInbox | None:
        return self.member.reduce_inbox if self.member else None

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
                await member.commit(command.commit)
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
        member, self.member = self.member, None
        await self._close_pins()
        if member is not None:
            self._held_sums = member.prepared
            await member.close()
            if member.apprentice is not None:
                self._drop_state()  # a part of it, or one that nobody has checked
            self.on_stage()

    async def close(self) -> None:
        await self.detach()
        self._drop_state()
        self._transfer.forget()
        await self._shards.aclose()
        await self.boundary_log.close()

    def trouble(self, incarnation: int, error: Exception) -> None:
        log.warning("%s: %s", type(error).__name__, error)
        self._send_event(
            coordinator_pb2.NodeEvent(
                trouble=coordinator_pb2.Trouble(
                    kind=coordinator_pb2.TROUBLE_KIND_OWN_FAILURE,
                    incarnation=incarnation,
                    error=type(error).__name__,
                    detail=str(error)[:500],
                    peer_id=error.peer_id if isinstance(error, BoundaryHoleError) else "",
                )
            )
        )

    # ---- taking a stage ------------------------------------------------------------------

    async def _take(self, assign: coordinator_pb2.Assign) -> None:
        try:
            await self._load(assign)
        except _OWN_FAILURES as error:
            self.trouble(assign.incarnation, error)

    async def _load(self, assign: coordinator_pb2.Assign) -> None:
        member, self.member = self.member, None
        await self._close_pins()
        if member is not None:
            await member.close()
        worker = self._worker
        if assign.source == coordinator_pb2.STATE_SOURCE_KEEP:
            if worker is None or worker.spec.stage != assign.stage:
                raise WrongLeaseError(f"stage {assign.stage} is to be kept, but isn't held")
        else:
            self._drop_state()  # first: there may not be memory for two
            worker = await self._fresh_worker(assign)
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

    async def _fresh_worker(self, assign: coordinator_pb2.Assign) -> StageWorker:
        """A worker with the assigned state. Half-loaded ones are never kept, nor offered."""
        worker = StageWorker(
            self._run,
            assign.stage,
            boundary=self._boundary,
            device=self._device,
            tokens=self._tokens,
        )
        try:
            await worker.create()
            if assign.source == coordinator_pb2.STATE_SOURCE_INIT:
                await worker.initialise()
                return worker
            if assign.source == coordinator_pb2.STATE_SOURCE_REPLAY:
                await self._rebuild(worker, assign)
                return worker
            await self._fill(worker, assign)
        except BaseException:
            worker.close()
            raise
        return worker

    async def _fill(self, worker: StageWorker, assign: coordinator_pb2.Assign) -> None:
        """Fetch what was assigned, into the worker."""
        is_worker = assign.tier == types_pb2.TIER_WORKER
        donors = None
        if assign.source == coordinator_pb2.STATE_SOURCE_PEER:
            donors = assign.donors
            names = ", ".join(member.name for member in donors.members)
            self._report(f"copying stage {assign.stage} from {names}")
        else:
            self._report(f"fetching the snapshot of stage {assign.stage} at step {assign.step}")
        part = types_pb2.STATE_PART_WEIGHTS if is_worker else types_pb2.STATE_PART_ALL
        load = worker.load_weights if is_worker else worker.load
        self._fetching = "the weights" if is_worker else "the state", FetchProgress()
        try:
            await self._fetch(
                (assign.stage, assign.step, part),
                donors,
                lambda path: load(path, assign.step),
                self._fetching[1],
            )
        finally:
            self._fetching = None

    async def _fetch(
        self,
        version: Version,
        donors: coordinator_pb2.Donors | None,
        load: Load,
        progress: FetchProgress,
    ) -> int:
        """Fetch a version and load it; returns the weights' digest, which is compared with the
        recorded one where the version has weights."""
        digest = 0
        expected = None
        if donors and donors.has_weights_digest and version[2] != types_pb2.STATE_PART_MOMENTS:
            expected = donors.weights_digest

        async def judge(path: Path) -> bool:
            nonlocal digest
            digest = await load(path)
            return expected is None or digest == expected

        path = await self._transfer.fetch_state(version, donors, judge=judge, progress=progress)
        await asyncio.to_thread(path.unlink, missing_ok=True)
        return digest

    def _apprentice(self, member: StageMember) -> Apprentice:
        incarnation, stage = member.incarnation, member.worker.spec.stage
        return Apprentice(
            member.worker,
            incarnation=incarnation,
            scratch=self._scratch,
            fetch=lambda step, part, donors, load, progress: self._fetch(
                (stage, step, part), donors, load, progress
            ),
            on_step=member.close_step,
            send=self._send,
            on_trouble=lambda error: self.trouble(incarnation, error),
        )

    def waiting_for(self) -> str:
        """What the node waits for, in plain words; empty while it computes."""
        if self._fetching is not None:
            what, progress = self._fetching
            names = " and ".join(progress.sources) or "donors that are preparing it"
            return f"warming up: {100 * progress.share:.0f} % of {what} from {names}"
        if self._replaying:
            return self._replaying
        member = self.member
        if member is None:
            return "an assignment"
        waits = member.waiting_for()
        if member.apprentice is None:
            return waits
        return "; ".join(filter(None, [member.apprentice.progress(), waits]))

    async def _close_pins(self) -> None:
        pins, self._pins = self._pins, None
        if pins is not None:
            await pins.close()

    async def _rebuild(self, worker: StageWorker, assign: coordinator_pb2.Assign) -> None:
        """The state of a lost stage, by replay."""
        replay, stage = assign.replay, assign.stage
        self._report(
            f"replaying stage {stage} from step {replay.base_step} to {assign.step}, out of the "
            "logs of its neighbours"
        )
        if replay.base_step:
            base = coordinator_pb2.Assign(
                stage=stage, step=replay.base_step, source=coordinator_pb2.STATE_SOURCE_SNAPSHOT
            )
            await self._fill(worker, base)
        else:
            await worker.initialise()

        def progress(step: int, log_bytes: int) -> None:
            self._replaying = f"its replay: step {step} of {assign.step}"
            replaying = coordinator_pb2.Replaying(
                incarnation=assign.incarnation, step=step, log_bytes=log_bytes
            )
            self._send_event(coordinator_pb2.NodeEvent(replaying=replaying))

        fetch = BoundaryFetch(
            self._run, stage, replay.logs, boundary=self._boundary, credentials=self._credentials
        )
        try:
            async with fetch:
                await StageReplay(
                    worker,
                    replay,
                    fetch=fetch,
                    boundary=self._boundary,
                    device=self._device.torch_device,
                    log=self.boundary_log,
                    progress=progress,
                ).run()
        finally:
            self._replaying = ""

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
            trouble = coordinator_pb2.Trouble(
                kind=coordinator_pb2.TROUBLE_KIND_SNAPSHOT,
                incarnation=member.incarnation,
                error=type(error).__name__,
                detail=str(error)[:500],
                step=step,
            )
            self._send_event(coordinator_pb2.NodeEvent(trouble=trouble))
