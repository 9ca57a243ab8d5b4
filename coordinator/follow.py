# SPDX-License-Identifier: Apache-2.0
"""What a leading coordinator gives its standbys: the run's files, its log, and every durable event
as it is written.

The files hold the run's keys: whoever has a standby link can become the run's coordinator.
"""

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.followers import Follower
from shoal.coordinator.sqlite_store import SqliteEventStore, last_sequence
from shoal.coordinator.state import StandbyRegistered
from shoal.coordinator.store import StoredEvent
from shoal.protocol.atomic_file import storage_error
from shoal.protocol.authority import Authority
from shoal.protocol.errors import (
    AdmissionError,
    CapacityError,
    MalformedFrameError,
    UnreachableError,
    VersionError,
)
from shoal.protocol.join_link import split_address
from shoal.protocol.proto import coordinator_pb2
from shoal.version import PROTOCOL_VERSION, __version__

log = logging.getLogger(__name__)

RUN_FILES = (
    "run.json",
    "tokenizer.json",
    "operator.token",
    "keys/authority.pem",
    "keys/identity.pem",
)
LOG_FILE = "events.sqlite"
CHUNK_BYTES = 1 << 20
BEAT_S = 1.0

MAX_STANDBYS = 4
_SCRATCH = "follow-"
_MAX_BATCH_BYTES = 4 << 20
_MAX_BATCH = 500


def event_digest(record: StoredEvent) -> bytes:
    """By which two logs compare an event."""
    return hashlib.sha256(record.kind.encode() + b"\0" + record.payload).digest()


class FollowDesk:
    def __init__(
        self,
        conductor: Conductor,
        authority: Authority,
        store: SqliteEventStore,
        *,
        folder: Path,
        session_address: Callable[[], str],
    ) -> None:
        self._conductor = conductor
        self._authority = authority
        self._store = store
        self._folder = folder
        self._session_address = session_address
        for left in folder.glob(f"{_SCRATCH}*"):  # of a coordinator that was killed
            shutil.rmtree(left, ignore_errors=True)

    async def follow(
        self, request: coordinator_pb2.FollowRequest
    ) -> AsyncIterator[coordinator_pb2.FollowEvent]:
        """A standby's stream. Raises `AdmissionError`, `VersionError`, `TermError` while this
        coordinator doesn't lead, `CapacityError` for too many standbys."""
        follower = self._admit(request)
        followers = self._conductor.followers
        followers[request.standby_id] = follower
        self._conductor.say_changed()
        try:
            async for event in self._stream(request, follower):
                yield event
        finally:
            if followers.get(request.standby_id) is follower:
                del followers[request.standby_id]
                self._conductor.say_changed()

    def _admit(self, request: coordinator_pb2.FollowRequest) -> Follower:
        run = self._conductor.run
        if request.protocol_version != PROTOCOL_VERSION:
            raise VersionError(
                f"a standby of protocol version {request.protocol_version} (release "
                f"{request.release[:32]}) can't follow version {PROTOCOL_VERSION} (release "
                f"{__version__}); install the same release"
            )
        if request.run_id != run.run_id:
            raise AdmissionError(f"this is run {run.run_id}, not {request.run_id[:64]!r}")
        self._authority.check_token(request.token, run.run_id, time.time(), "standby")
        addresses = request.addresses
        try:
            for address in (addresses.admission, addresses.session):
                split_address(address)
        except ValueError as error:
            raise MalformedFrameError(f"the standby's address {error}") from None
        if not 8 <= len(request.standby_id) <= 64 or not request.standby_id.isalnum():
            raise MalformedFrameError(f"no log id: {request.standby_id[:64]!r}")
        followers = self._conductor.followers
        if len(followers) >= MAX_STANDBYS and request.standby_id not in followers:
            raise CapacityError(f"the run has {MAX_STANDBYS} standbys already")
        self._conductor.register_standby(
            StandbyRegistered(
                time_s=time.time(),
                log_id=request.standby_id,
                admission=addresses.admission,
                session=addresses.session,
            )
        )
        return Follower(addresses.session, snapshots=tuple(request.snapshots)[:8])

    async def _stream(
        self, request: coordinator_pb2.FollowRequest, follower: Follower
    ) -> AsyncIterator[coordinator_pb2.FollowEvent]:
        loop, more = asyncio.get_running_loop(), asyncio.Event()

        def written() -> None:
            loop.call_soon_threadsafe(more.set)

        stop_watching = self._store.watch(written)
        try:
            follower.sequence, anew = request.last_sequence, not await self._continues(request)
            yield coordinator_pb2.FollowEvent(begin=self._begin(anew=anew))
            if not request.has_files:
                for name in RUN_FILES:
                    async for event in _send_file(self._folder / name, name):
                        yield event
            if anew:
                async for event in self._whole_log(follower):
                    yield event
            while (reason := self._over()) is None:
                more.clear()
                records = await asyncio.to_thread(self._store.durable, follower.sequence)
                if _is_broken(records, follower.sequence):  # compacted in this moment
                    yield coordinator_pb2.FollowEvent(begin=self._begin(anew=True))
                    async for event in self._whole_log(follower):
                        yield event
                    continue
                for batch in _batches(records):
                    yield batch
                if records:
                    follower.sequence = records[-1].sequence
                yield coordinator_pb2.FollowEvent(beat=self._beat())
                try:
                    async with asyncio.timeout(BEAT_S):
                        await more.wait()
                except TimeoutError:
                    pass
            if reason:
                yield coordinator_pb2.FollowEvent(end=coordinator_pb2.FollowEnd(reason=reason))
        finally:
            stop_watching()

    def _over(self) -> str | None:
        """Why nobody is to take over any more; empty when the stream just ends."""
        conductor = self._conductor
        if conductor.deposed is not None:
            raise UnreachableError(str(conductor.deposed))
        if not conductor.ended:
            return None
        return conductor.waiting_for or "the run is finished" if conductor.can_write else ""

    def _begin(self, *, anew: bool) -> coordinator_pb2.FollowBegin:
        terms = self._conductor.terms
        return coordinator_pb2.FollowBegin(
            term=terms.term,
            coordinator_id=terms.log_id,
            anew=anew,
            session_address=self._session_address(),
        )

    def _beat(self) -> coordinator_pb2.FollowBeat:
        return coordinator_pb2.FollowBeat(
            last_sequence=self._store.last_sequence,
            step=self._conductor.state.step,
            snapshots=self._conductor.snapshots.complete_steps(),
        )

    async def _continues(self, request: coordinator_pb2.FollowRequest) -> bool:
        """Whether the standby's log is a beginning of this one."""
        if not request.last_sequence:
            return False
        records = await asyncio.to_thread(self._store.durable, request.last_sequence - 1)
        return bool(records) and (records[0].sequence, event_digest(records[0])) == (
            request.last_sequence,
            request.last_digest,
        )

    async def _whole_log(self, follower: Follower) -> AsyncIterator[coordinator_pb2.FollowEvent]:
        with TemporaryDirectory(prefix=_SCRATCH, dir=self._folder) as scratch:
            path = Path(scratch) / LOG_FILE
            await asyncio.to_thread(self._store.backup, path)
            copied = await asyncio.to_thread(last_sequence, path)
            async for event in _send_file(path, LOG_FILE):
                yield event
        follower.sequence = copied


def _is_broken(records: Sequence[StoredEvent], sent: int) -> bool:
    """Whether what follows is no continuation of what was sent."""
    return bool(records) and (
        records[0].sequence != sent + 1 or any(r.kind == "compacted" for r in records)
    )


def _batches(records: Sequence[StoredEvent]) -> list[coordinator_pb2.FollowEvent]:
    batches: list[coordinator_pb2.FollowEvent] = []
    size = _MAX_BATCH_BYTES
    for record in records:
        if size + len(record.payload) > _MAX_BATCH_BYTES or (
            len(batches[-1].log.events) >= _MAX_BATCH
        ):
            batches.append(coordinator_pb2.FollowEvent(log=coordinator_pb2.LogEvents()))
            size = 0
        size += len(record.payload)
        batches[-1].log.events.append(
            coordinator_pb2.LogEvent(
                sequence=record.sequence, kind=record.kind, payload=record.payload
            )
        )
    return batches


async def _send_file(path: Path, name: str) -> AsyncIterator[coordinator_pb2.FollowEvent]:
    """In pieces; the last one says so. Raises `StorageError`."""
    try:
        with path.open("rb") as file:
            while True:
                content = await asyncio.to_thread(file.read, CHUNK_BYTES)
                last = len(content) < CHUNK_BYTES
                yield coordinator_pb2.FollowEvent(
                    file=coordinator_pb2.RunFile(name=name, content=content, last=last)
                )
                if last:
                    return
    except OSError as error:
        raise storage_error(path, error) from None
