# SPDX-License-Identifier: Apache-2.0
"""Brings a stage's state here, from wherever the coordinator says that it is to be had."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from shoal.compression.registry import Boundary
from shoal.node.apprentice import Load
from shoal.node.boundary_fetch import BoundaryFetch
from shoal.node.boundary_log import BoundaryLog
from shoal.node.data import TokenSource
from shoal.node.disk_room import DiskRoom
from shoal.node.hardware import Device
from shoal.node.replay import StageReplay
from shoal.node.stage_worker import StageWorker
from shoal.node.state_fetch import FetchProgress
from shoal.node.state_transfer import StateTransfer, Version
from shoal.protocol.errors import DiskFullError
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.rpc import Credentials
from shoal.protocol.spec import ResolvedRun


class StageLoader:
    """Of one node, for one assignment after another."""

    def __init__(
        self,
        run: ResolvedRun,
        device: Device,
        *,
        boundary: Boundary,
        credentials: Credentials,
        tokens: TokenSource,
        transfer: StateTransfer,
        log: BoundaryLog,
        room: DiskRoom,
        send: Callable[[coordinator_pb2.NodeEvent], None],
        report: Callable[[str], None],
    ) -> None:
        """`log` gets what a replay computes again. While `room` has none, loading waits."""
        self._run = run
        self._device = device
        self._boundary = boundary
        self._credentials = credentials
        self._tokens = tokens
        self._transfer = transfer
        self._log = log
        self._room = room
        self._send = send
        self._report = report
        self._replaying = ""
        self._fetching: tuple[str, FetchProgress] | None = None

    @property
    def waiting_for(self) -> str:
        """In plain words; empty while nothing is being loaded."""
        if self._room.waiting_for:
            return self._room.waiting_for
        if self._fetching is not None:
            what, progress = self._fetching
            names = " and ".join(progress.sources) or "donors that are preparing it"
            return f"warming up: {100 * progress.share:.0f} % of {what} from {names}"
        return self._replaying

    async def load(self, assign: coordinator_pb2.Assign) -> StageWorker:
        """A worker with the assigned state, which isn't KEEP. Half-loaded ones are never kept, nor
        offered. Begun anew while this node's disk is too full for it.

        Raises what `StateFetch.run` and `StageReplay.run` do.
        """
        while True:
            try:
                return await self._load(assign)
            except DiskFullError as error:
                if not error.folder:
                    raise
                self._room.note(error)
                await self._room.wait()

    async def _load(self, assign: coordinator_pb2.Assign) -> StageWorker:
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
            elif assign.source == coordinator_pb2.STATE_SOURCE_REPLAY:
                await self._rebuild(worker, assign)
            else:
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
            await self.fetch(
                (assign.stage, assign.step, part),
                donors,
                lambda path: load(path, assign.step),
                self._fetching[1],
            )
        finally:
            self._fetching = None

    async def fetch(
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
            self._send(coordinator_pb2.NodeEvent(replaying=replaying))

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
                    log=self._log,
                    progress=progress,
                ).run()
        finally:
            self._replaying = ""
