# SPDX-License-Identifier: Apache-2.0
"""Fetches one version of a stage's state from several donors at once, chunk by verified chunk.

A donor that dies, is slow or lies is left out; what it had brought stays. The partial file stays
too when nobody is left, so that the next try, with other donors or after a restart, goes on.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from shoal.node.chunk_schedule import MOST_DEADLINE_S, ChunkSchedule, ranked
from shoal.node.state_sources import StateSource
from shoal.protocol.errors import (
    ChecksumError,
    MalformedFrameError,
    OversizedStreamError,
    ProtocolError,
    ShoalError,
    StorageError,
    TruncatedStreamError,
    UnreachableError,
)
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import peer_pb2
from shoal.protocol.rpc import backoff, error_from_rpc
from shoal.protocol.state_chunks import PartialState, check_description

log = logging.getLogger(__name__)

DESCRIBE_S = 120.0
"""A donor writes and hashes its copy of the state before it answers."""

_GRACE_S = 2.0
"""Once one donor has answered, the others have so long, before those that have are believed."""

_IDLE_S = 0.5
_DISHONEST = (ChecksumError, MalformedFrameError, OversizedStreamError)

OnBadPeer = Callable[[PeerId, ProtocolError], None]


@dataclass(slots=True)
class FetchProgress:
    """For the node's display, and for tests."""

    share: float = 0.0
    sources: list[str] = field(default_factory=list)
    """Names of the donors in use."""
    fetched_bytes: int = 0
    resumed_bytes: int = 0
    """Found in the partial file of an earlier try."""


class StateFetch:
    """One fetch. `run` may be called once; the caller removes the file."""

    def __init__(
        self,
        sources: Sequence[StateSource],
        request: peer_pb2.StateRequest,
        path: Path,
        *,
        max_bytes: int,
        weights_digest: int | None,
        judge: Callable[[Path], Awaitable[bool]] | None,
        on_bad: OnBadPeer,
        progress: FetchProgress,
    ) -> None:
        """`weights_digest` and `judge` decide between donors that describe different files:
        the digest that the run has recorded, and whether a whole file has it."""
        self._sources = list(sources)
        self._request = request
        self._path = path
        self._max_bytes = max_bytes
        self._weights_digest = weights_digest
        self._judge = judge
        self._on_bad = on_bad
        self._progress = progress
        self._changed = asyncio.Condition()
        self._rng = random.Random()
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> Path:
        """The whole file, every chunk of it verified.

        Raises `UnreachableError` when no donor is left, the `ProtocolError` of the last one when
        all of them lie or refuse, `StorageError` for the own disk and no other.
        """
        try:
            described, errors = await self._describe_all()
            groups = ranked({s: described[s].SerializeToString() for s in described})
            for number, group in enumerate(groups):
                try:
                    await self._fetch(group, described[group[0]])
                except StorageError:
                    raise
                except ShoalError as error:
                    errors.append(error)
                    continue
                if self._judge is None or await self._judge(self._path):
                    for other in groups[number + 1 :]:
                        self._blame(other, ChecksumError("describes another state than the rest"))
                    return self._path
                wrong = ChecksumError("gives other weights than the run has recorded")
                self._blame(group, wrong)
                errors.append(wrong)
                await asyncio.to_thread(self._path.unlink, missing_ok=True)
            raise errors[-1] if errors else UnreachableError("no donor was named")
        finally:
            for source in self._sources:
                await source.close()

    # ---- what there is to fetch ----------------------------------------------------------

    async def _describe_all(
        self,
    ) -> tuple[dict[StateSource, peer_pb2.StateDescription], list[ShoalError]]:
        asking = {asyncio.create_task(self._describe(s)): s for s in self._sources}
        described: dict[StateSource, peer_pb2.StateDescription] = {}
        errors: list[ShoalError] = []
        pending = set(asking)
        grace_ends_s: float | None = None
        try:
            while pending:
                left_s = None
                if grace_ends_s is not None and (left_s := grace_ends_s - self._clock()) <= 0:
                    break
                done, pending = await asyncio.wait(
                    pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    found = task.result()
                    if isinstance(found, ShoalError):
                        log.info("%s can't give the state: %s", asking[task].name, found)
                        errors.append(found)
                    else:
                        described[asking[task]] = found
                        grace_ends_s = grace_ends_s or self._clock() + _GRACE_S
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        order = [s for s in self._sources if s in described]
        return {s: described[s] for s in order}, errors

    async def _describe(self, source: StateSource) -> peer_pb2.StateDescription | ShoalError:
        try:
            description = await source.describe(self._request, timeout_s=DESCRIBE_S)
            check_description(description, max_bytes=self._max_bytes)
            claimed, expected = description.weights_digest, self._weights_digest
            if claimed and expected is not None and claimed != expected:
                raise ChecksumError(
                    f"{source.name} claims weights {claimed:#x}; the run's are {expected:#x}"
                )
        except grpc.aio.AioRpcError as rpc_error:
            return _refusal(source, rpc_error)
        except ShoalError as error:
            if isinstance(error, _DISHONEST):
                self._blame([source], error)
            return error
        return description

    # ---- fetching it ---------------------------------------------------------------------

    async def _fetch(
        self, sources: Sequence[StateSource], description: peer_pb2.StateDescription
    ) -> None:
        partial = await asyncio.to_thread(PartialState, self._path, description)
        with partial:
            schedule = ChunkSchedule[StateSource](partial.num_chunks, have=partial.have)
            self._progress.resumed_bytes = partial.resumed_bytes
            for source in sources:
                schedule.add(source)
            self._note(schedule, partial)
            tasks = [
                asyncio.create_task(self._ask(source, schedule, partial)) for source in sources
            ]
            errors: list[ShoalError] = []
            pending = set(tasks)
            try:
                while pending and not schedule.done:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    errors += [error for task in done if (error := task.result()) is not None]
            finally:  # also those that still wait for a late donor
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if not schedule.done:
                raise errors[-1] if errors else UnreachableError("no donor is left")

    async def _ask(
        self, source: StateSource, schedule: ChunkSchedule[StateSource], partial: PartialState
    ) -> ShoalError | None:
        """Ask one donor until all is there, or it isn't to be asked any more; then why."""
        failures = 0
        while not schedule.done:
            wanted = schedule.take(source, self._clock())
            if not wanted:
                # Until something arrives or is given up; or somebody is late.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_S), self._changed:
                        await self._changed.wait()
                continue
            error: ShoalError
            try:
                await self._bring(source, wanted, schedule, partial)
                failures = 0
                continue
            except grpc.aio.AioRpcError as rpc_error:
                error = _refusal(source, rpc_error)
            except StorageError:
                raise
            except ShoalError as shoal_error:
                error = shoal_error
            log.info("%s failed to give chunks: %s", source.name, error)
            failures += 1
            if isinstance(error, _DISHONEST):
                self._blame([source], error)
                schedule.drop(source)
            again = schedule.failed(source)
            self._note(schedule, partial)
            await self._announce()
            if not again or not isinstance(error, UnreachableError | TruncatedStreamError):
                schedule.drop(source)
                return error
            await asyncio.sleep(backoff(failures, self._rng, limit_s=2.0))
        return None

    async def _bring(
        self,
        source: StateSource,
        wanted: Sequence[int],
        schedule: ChunkSchedule[StateSource],
        partial: PartialState,
    ) -> None:
        request = peer_pb2.StateRequest()
        request.CopyFrom(self._request)
        request.chunks.extend(wanted)
        timeout_s = MOST_DEADLINE_S * len(wanted)
        async with aclosing(source.fetch(request, timeout_s=timeout_s)) as pieces:
            for index in wanted:
                if schedule.done:
                    return
                data = await self._chunk(source, pieces, index, schedule, partial)
                self._progress.fetched_bytes += len(data)
                if index not in partial.have:
                    await asyncio.to_thread(partial.write, index, data)
                schedule.arrived(source, index, self._clock())
                self._note(schedule, partial)
                await self._announce()

    async def _chunk(
        self,
        source: StateSource,
        pieces: AsyncIterator[peer_pb2.StateChunk],
        index: int,
        schedule: ChunkSchedule[StateSource],
        partial: PartialState,
    ) -> bytearray:
        """A chunk put together; its hash isn't checked yet."""
        data = bytearray()
        while len(data) < partial.length(index):
            try:
                async with asyncio.timeout(schedule.deadline_s(source)):
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise UnreachableError(f"{source.name} sent nothing for too long") from None
            if piece is None:
                raise TruncatedStreamError(f"{source.name} ended before chunk {index} was whole")
            offset = partial.offset(index) + len(data)
            if piece.offset != offset or not piece.data:
                raise MalformedFrameError(
                    f"{source.name} sent byte {piece.offset}, asked for byte {offset}"
                )
            if len(data) + len(piece.data) > partial.length(index):
                raise OversizedStreamError(f"{source.name} sent more than chunk {index}")
            data += piece.data
        return data

    def _note(self, schedule: ChunkSchedule[StateSource], partial: PartialState) -> None:
        self._progress.share = 1 - partial.missing / partial.num_chunks
        self._progress.sources = [source.name for source in schedule.donors]

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _blame(self, sources: Sequence[StateSource], error: ProtocolError) -> None:
        for source in sources:
            log.warning("%s gave a wrong state: %s", source.name, error)
            if source.peer_id is not None:
                self._on_bad(source.peer_id, error)


def _refusal(source: StateSource, rpc_error: grpc.aio.AioRpcError) -> ShoalError:
    """Why a donor gives nothing. Its disk is not this node's."""
    error = error_from_rpc(rpc_error)
    if isinstance(error, StorageError):
        return UnreachableError(f"{source.name} can't read its copy: {error}")
    return error
