# SPDX-License-Identifier: Apache-2.0
"""A member that has its stage's weights, and not yet the optimizer's moments: a worker.

It computes and sums up as every replica does. At a commit it can't apply; it keeps the sums, and
pulls the weights after the step. Meanwhile it gets the moments of a pinned step and brings them
forward with the sums. Then it is promoted: it applies the next step itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import torch

from shoal.node.catch_up import CatchUp
from shoal.node.stage_worker import StageWorker
from shoal.node.state_fetch import FetchProgress
from shoal.protocol.errors import ShoalError, UnreachableError, WrongStepError
from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.proto.types_pb2 import STATE_PART_MOMENTS, STATE_PART_WEIGHTS, StatePart

log = logging.getLogger(__name__)

Load = Callable[[Path], Awaitable[int]]
"""Takes a fetched file in; returns the weights' digest."""

Fetch = Callable[
    [int, StatePart.ValueType, coordinator_pb2.Donors, Load, FetchProgress], Awaitable[int]
]
"""Fetches a part of the stage's state at a step and loads it; returns the weights' digest."""

Send = Callable[[coordinator_pb2.NodeEvent], None]
OnTrouble = Callable[[Exception], None]


class Apprentice:
    """Of one incarnation. The runtime's moments are at step `_moments_step`, its weights at its
    own."""

    def __init__(
        self,
        worker: StageWorker,
        *,
        incarnation: Incarnation,
        scratch: Path,
        fetch: Fetch,
        on_step: Callable[[int], None],
        send: Send,
        on_trouble: OnTrouble,
    ) -> None:
        """`on_step` is called when the weights of a later step are here, before that is said."""
        self._on_step = on_step
        self._worker = worker
        self._incarnation = incarnation
        self._scratch = scratch
        self._fetch = fetch
        self._send = send
        self._on_trouble = on_trouble
        self._catch_up: CatchUp | None = None
        self._projections: dict[int, Mapping[str, torch.Tensor]] = {}
        """By step that `_catch_up` holds, what its moments need of the weights before it."""
        self._moments_step: int | None = None
        self._committed = worker.runtime.step
        self._advancing = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._progress: dict[int, FetchProgress] = {}
        self.promoted_at: int | None = None
        """The step at which it has the moments too."""

    @property
    def is_promoted(self) -> bool:
        return self.promoted_at is not None

    @property
    def is_proven(self) -> bool:
        """It has applied a step itself. When another one opens, the result was right."""
        return self.promoted_at is not None and self._worker.runtime.step > self.promoted_at

    async def committed(self, totals: torch.Tensor, commit: coordinator_pb2.Commit) -> None:
        """A step that this node can't apply. Raises `CapacityError` or `StorageError`."""
        self._committed = commit.step
        if self._catch_up is not None:
            projections = await self._worker.projections()
            self._projections[commit.step] = projections  # beside the catch-up that there is now
            await self._catch_up.append(commit, totals)

    async def pull(self, command: coordinator_pb2.Pull) -> None:
        """Begin to get a part of the state; what was being fetched of it before is given up."""
        part = command.part
        if self.is_promoted or part not in (STATE_PART_WEIGHTS, STATE_PART_MOMENTS):
            return
        await self._cancel(part)
        if part == STATE_PART_MOMENTS:
            if self._catch_up is not None:
                self._catch_up.close()
            self._projections = {}
            self._moments_step = None
            self._catch_up = CatchUp(self._scratch)
        self._tasks[part] = asyncio.create_task(self._pull(command))

    def progress(self) -> str:
        """What it waits for before it is promoted, in plain words."""
        pulling = self._progress.get(STATE_PART_WEIGHTS)
        if pulling is not None:
            return f"worker: pulls the weights, {100 * pulling.share:.0f} % done"
        moments = self._progress.get(STATE_PART_MOMENTS)
        if moments is not None:
            return f"worker: moments {100 * moments.share:.0f} %"
        return "worker" if self._moments_step is None else "worker: moments 100 %"

    async def close(self) -> None:
        for part in list(self._tasks):
            await self._cancel(part)
        if self._catch_up is not None:
            self._catch_up.close()

    async def _cancel(self, part: int) -> None:
        task = self._tasks.pop(part, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _pull(self, command: coordinator_pb2.Pull) -> None:
        part = command.part
        progress = self._progress[part] = FetchProgress()
        try:
            load = self._load_weights if part == STATE_PART_WEIGHTS else self._load_moments

            async def take(path: Path) -> int:
                return await load(path, command.step)

            digest = await self._fetch(command.step, part, command.donors, take, progress)
            del self._progress[part]
            if part == STATE_PART_WEIGHTS:
                self._on_step(command.step)
                self._send(self._applied(command.step, digest))
            await self._advance()
        except UnreachableError as error:
            if part == STATE_PART_WEIGHTS:
                self._on_trouble(error)
            else:  # the coordinator names other donors when these are gone
                log.warning("the moments of step %d are not to be had: %s", command.step, error)
        except Exception as error:  # out of memory, a bug: whatever it is, this can't go on
            if not isinstance(error, ShoalError):
                log.exception("pulling a part of the state failed")
            self._on_trouble(error)
        finally:
            self._progress.pop(part, None)

    def _applied(self, step: int, digest: int) -> coordinator_pb2.NodeEvent:
        return coordinator_pb2.NodeEvent(
            applied=coordinator_pb2.Applied(
                incarnation=self._incarnation, step=step, weights_digest=digest
            )
        )

    async def _load_weights(self, path: Path, step: int) -> int:
        return await self._worker.load_weights(path, step)

    async def _load_moments(self, path: Path, step: int) -> int:
        async with self._advancing:
            await self._worker.load_moments(path, step)
            self._moments_step = step
        return 0

    async def _advance(self) -> None:
        """Bring the moments forward to the weights' step; when they are there, it is promoted."""
        async with self._advancing:
            catch_up, known = self._catch_up, self._projections
            runtime = self._worker.runtime
            if self._moments_step is None or catch_up is None or self.is_promoted:
                return
            while self._moments_step < runtime.step:
                if catch_up.steps[:1] != [self._moments_step + 1]:
                    raise WrongStepError(
                        f"the moments are of step {self._moments_step}, the sums that were kept of "
                        f"{catch_up.steps[:4]}; this node warms up again"
                    )
                commit, totals = await catch_up.pop()
                await self._worker.advance_moments(totals, commit, known.pop(commit.step, {}))
                if self._catch_up is not catch_up:
                    return  # another version was asked for meanwhile
                self._moments_step = commit.step
            if self._committed > runtime.step:
                return  # once the weights after that step are here
            self.promoted_at = self._moments_step
        self._send(
            coordinator_pb2.NodeEvent(
                promoted=coordinator_pb2.Promoted(
                    incarnation=self._incarnation, step=self.promoted_at
                )
            )
        )
