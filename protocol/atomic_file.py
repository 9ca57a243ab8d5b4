# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all: temporary name, fsync, rename, fsync of the folder."""

import contextlib
import errno
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.protocol.disk import require_space
from shoal.protocol.errors import DiskFullError, StorageError

TEMPORARY_SUFFIX = ".tmp"
"""What an interrupted write leaves behind ends so, and begins with a dot."""


class AtomicFile:
    """Write, then `commit` or `discard`. As a context manager it commits on success.

    Until the commit `path` keeps its previous content. Every operating system error becomes a
    `StorageError` and discards the temporary file.
    """

    def __init__(self, path: Path, *, durable: bool = True, expected_bytes: int = 0) -> None:
        """Not `durable`: whole or not at all, yet not kept through a power failure.
        `expected_bytes`, where known, are named when the disk is full."""
        self.path = path
        self._durable = durable
        self._expected_bytes = expected_bytes
        self._temporary = path.with_name(
            f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
        )
        try:
            require_space(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._temporary, "xb")  # noqa: SIM115 - outlives this call
        except OSError as error:
            raise self._storage_error(error) from error

    def make_private(self) -> None:
        """For secrets: nobody but the owner may read it, now or under its name."""
        os.fchmod(self._file.fileno(), 0o600)

    def write(self, data: bytes | memoryview) -> None:
        try:
            require_space(self.path)
            self._file.write(data)
        except OSError as error:
            self.discard()
            raise self._storage_error(error) from error

    def commit(self) -> None:
        """Under its name when this returns, durably unless told otherwise."""
        try:
            require_space(self.path)
            self._file.flush()
            if self._durable:
                os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self.path)
            if self._durable:
                fsync_folder(self.path.parent)
        except OSError as error:
            self.discard()
            raise self._storage_error(error) from error

    def discard(self) -> None:
        """Remove the temporary file; a second call, or one after the commit, does nothing."""
        try:
            self._file.close()
        except OSError:
            pass  # what could not be flushed is thrown away anyhow
        finally:
            self._temporary.unlink(missing_ok=True)

    def _storage_error(self, error: OSError) -> StorageError:
        return storage_error(self.path, error, needed_bytes=self._expected_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed, in `folder` and below. Call it
    before this process writes any there: in a container the killed one had the same id."""
    for path in folder.glob(f"**/.*{TEMPORARY_SUFFIX}"):
        pid = path.name.removesuffix(TEMPORARY_SUFFIX).rpartition(".")[2].partition("-")[0]
        if pid.isdecimal() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            with contextlib.suppress(OSError):
                path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def fsync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(path: Path, error: OSError, *, needed_bytes: int = 0) -> StorageError:
    """The same failure in a user's words, with a remedy. `needed_bytes`: how much more room a full
    disk must have, where that is known."""
    cause = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        some = f"{needed_bytes / 1e6:,.1f} MB" if needed_bytes else "some space"
        remedy = f"free {some} under {path.parent}, or keep it on a larger disk"
        return DiskFullError(
            f"{path}: {cause}; {remedy}.", folder=str(path.parent), needed_bytes=needed_bytes
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = f"make {path.parent} writable for this user, or choose another folder"
    else:
        remedy = "check that the disk is healthy and the folder still exists"
    return StorageError(f"{path}: {cause}; {remedy}.")
