# SPDX-License-Identifier: Apache-2.0
"""A standby's run folder: files, log, shards and snapshots, as the leader gives them.

Everything is checked before it has its name, and the log is replaced whole or continued, so that
the folder is a run folder at every moment once it `is_whole`.
"""

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.coordinator.compaction import WORTHWHILE_STEPS
from shoal.coordinator.data.shards import shard_is_intact
from shoal.coordinator.export import read_run
from shoal.coordinator.follow import CHUNK_BYTES, LOG_FILE, RUN_FILES, event_digest
from shoal.coordinator.log_compaction import compact_log
from shoal.coordinator.log_identity import log_identity
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.sqlite_store import RunFolderLock, SqliteEventStore
from shoal.coordinator.state import RunState, apply, parse, replay
from shoal.coordinator.store import StoredEvent, decode
from shoal.protocol.atomic_file import TEMPORARY_SUFFIX, AtomicFile
from shoal.protocol.authority import Authority
from shoal.protocol.errors import (
    ConfigError,
    MalformedFrameError,
    OversizedStreamError,
    ShoalError,
)
from shoal.protocol.join_link import JoinLink
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.spec import ResolvedRun

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

_MAX_FILE_BYTES = 64 << 20
_MAX_LOG_BYTES = 8 << 30
_TOKEN_S = 3600.0


class StandbyCopy:
    """Use it as a context manager: it holds the folder's lock while it is open."""

    def __init__(self, folder: Path, link: JoinLink) -> None:
        """Raises `CapacityError` when a coordinator works in the folder, `ConfigError` when it is
        another run's, `StorageError`."""
        self.folder = folder
        self._link = link
        self.store: SqliteEventStore | None = None
        self.state = RunState()
        """What the copied log adds up to."""
        self._intact: set[str] = set()  # shards, by digest, that were verified
        self._compacted_at = 0  # the step at which that was tried last
        self._partial: tuple[str, AtomicFile, int] | None = None
        self._lock: RunFolderLock | None = RunFolderLock(folder)
        for left in (
            *folder.glob(f".*{TEMPORARY_SUFFIX}"),
            *folder.glob(f"keys/.*{TEMPORARY_SUFFIX}"),
        ):
            left.unlink(missing_ok=True)  # of a standby that was killed
        self.log_id = log_identity(folder)
        if (folder / "run.json").exists() and read_run(folder).run_id != link.run_id:
            run_id = read_run(folder).run_id
            self.close()
            raise ConfigError(
                f"{folder} holds run {run_id}, the link is for {link.run_id}: give another --folder"
            )
        if self.has_files:
            os.chmod(folder / "keys", 0o700)
        if self.has_files and (folder / LOG_FILE).exists():
            self.open_log()

    # ---- facts ---------------------------------------------------------------------------

    @property
    def has_files(self) -> bool:
        return all((self.folder / name).is_file() for name in RUN_FILES)

    @property
    def is_whole(self) -> bool:
        """Whether the run could be led from here: files, log and every shard of the data."""
        return self.has_files and self.store is not None and not self.missing_shards()

    @property
    def run(self) -> ResolvedRun:
        return read_run(self.folder)

    @property
    def authority(self) -> Authority:
        return Authority.load_or_create(self.folder / "keys")

    def token(self) -> str:
        """The link's, until the standby can sign its own: a link expires, a standby doesn't."""
        if not self.has_files:
            return self._link.token
        expires_s = int(time.time() + _TOKEN_S)
        return self.authority.issue_token(self._link.run_id, expires_s, "standby")

    def newest_event(self) -> tuple[int, bytes]:
        """Sequence and digest of the log's last event; (0, b"") without one."""
        if self.store is None or not self.store.last_sequence:
            return 0, b""
        (record,) = self.store.durable(self.store.last_sequence - 1)
        return record.sequence, event_digest(record)

    def missing_shards(self) -> list[bytes]:
        """Digests. Reads every shard, but each only until it was found intact."""
        run = self.run
        missing = []
        for ref in (*run.data.train, *run.data.validation):
            if ref.sha256 in self._intact:
                continue
            if shard_is_intact(self.folder, ref, run.data.token_bytes):
                self._intact.add(ref.sha256)
            else:
                missing.append(bytes.fromhex(ref.sha256))
        return missing

    def found_intact(self, sha256: bytes) -> None:
        """A shard was verified when it came."""
        self._intact.add(sha256.hex())

    def snapshots(self) -> list[int]:
        if not self.has_files:
            return []
        return SnapshotStore(self.folder, self.run, read_only=True).complete_steps()

    # ---- files ---------------------------------------------------------------------------

    def begin(self) -> None:
        """A leader's stream begins: what another one had sent of a file counts no more."""
        self._discard()

    def take(self, piece: coordinator_pb2.RunFile) -> None:
        """A piece of a file; the last one puts it in place. Raises `ProtocolError` for a name
        that is no run file's or for too many bytes, and `StorageError`."""
        name = piece.name
        if name not in (*RUN_FILES, LOG_FILE):
            raise MalformedFrameError(f"no file of a run: {name[:80]!r}")
        if self._partial is None or self._partial[0] != name:
            self._discard()
            self._partial = name, self._incoming(name), 0
        _, file, size = self._partial
        size += len(piece.content)
        limit = _MAX_LOG_BYTES if name == LOG_FILE else _MAX_FILE_BYTES
        if size > limit or len(piece.content) > CHUNK_BYTES:
            self._discard()
            raise OversizedStreamError(f"{name} has over {limit} bytes, or a piece is too large")
        file.write(piece.content)
        self._partial = name, file, size
        if piece.last:
            self._partial = None
            self._place(name, file)

    def _incoming(self, name: str) -> AtomicFile:
        path = self.folder / name
        if path.parent != self.folder:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = AtomicFile(path)
        file.make_private()
        return file

    def _place(self, name: str, file: AtomicFile) -> None:
        if name == LOG_FILE:
            self._close_log()
            for suffix in ("-wal", "-shm"):
                (self.folder / f"{LOG_FILE}{suffix}").unlink(missing_ok=True)
        file.commit()
        if name == LOG_FILE:
            self.open_log()

    def _discard(self) -> None:
        if self._partial is not None:
            self._partial[1].discard()
            self._partial = None

    # ---- the log -------------------------------------------------------------------------

    def open_log(self) -> None:
        self._release_lock()  # the store takes it
        self.store = SqliteEventStore(self.folder / LOG_FILE)
        self.refresh()

    def refresh(self) -> None:
        """Read the log again: a conductor may have written it. Raises `StorageError`."""
        assert self.store is not None, "there is a log"
        self.state = replay((event.kind, event.payload) for event in self.store.read())

    def append(self, events: coordinator_pb2.LogEvents) -> None:
        """Durably. Raises `StorageError` for a gap, and for an event that this release can't read;
        the log is as it was then."""
        if self.store is None:
            raise MalformedFrameError("events of a log whose beginning is missing")
        records = [StoredEvent(e.sequence, e.kind, e.payload) for e in events.events]
        state = self.state
        for event in decode(records):
            state = apply(parse(event.kind, event.payload), state)
        self.store.adopt(records)
        self.state = state
        self._compact()

    def _compact(self) -> None:
        """The copy stays bounded as the leader's log does. Who is attached there doesn't matter
        here: a record names its nodes, and a takeover gives all of them new incarnations."""
        step = self.state.step
        if self.store is None or step - self._compacted_at < WORTHWHILE_STEPS:
            return
        self._compacted_at = step
        self.state = compact_log(
            self.store,
            self.state,
            oldest_snapshot=min(self.snapshots(), default=0),
            live=(),
            num_microbatches=self.run.spec.batch.microbatches,
            now_s=time.time(),
        )

    # ---- the end -------------------------------------------------------------------------

    def _close_log(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def _release_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def close(self) -> None:
        self._discard()
        self._close_log()
        self._release_lock()

    def __enter__(self) -> "StandbyCopy":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ShoalError):
            self.close()
