# SPDX-License-Identifier: Apache-2.0
"""How another command of the same owner finds the daemon of a folder and asks it to finish.

The daemon holds a lock on `daemon.lock` and says in `daemon.json` who it is and what it does.
Whoever asks writes `finish.json`, names in it the process that is meant, and sends it
`FINISH_SIGNAL`.
"""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.protocol.atomic_file import AtomicFile, storage_error
from shoal.protocol.errors import UnreachableError

M = TypeVar("M", bound=BaseModel)

LOCK_FILE: Final = "daemon.lock"
FINISH_SIGNAL: Final = signal.SIGUSR1
"""Unlike Ctrl-C it may come twice: the second does not quit."""

_RECORD_FILE: Final = "daemon.json"
_REQUEST_FILE: Final = "finish.json"
_MAX_BYTES: Final = 64 * 1024


class DaemonRecord(BaseModel):
    """What a daemon says of itself; the last word of one that has ended stays."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started_s: float
    """When the process began, as the system counts: two processes of one pid differ in it."""
    name: str
    doing: str = ""
    leave_by_s: float | None = None
    """Unix time at which a leaving daemon is gone at the latest."""
    handed_over: bool | None = None
    """How it ended; None before, or when it was killed."""


class FinishRequest(BaseModel):
    model_config = ConfigDict(frozen=True)

    pid: int
    started_s: float
    grace_s: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    """None: as the daemon is configured."""


def own_record(name: str) -> DaemonRecord:
    process = psutil.Process()
    return DaemonRecord(pid=process.pid, started_s=_started_s(process), name=name)


def write_record(folder: Path, record: DaemonRecord) -> None:
    """Raises `StorageError`."""
    _write(folder / _RECORD_FILE, record)


def take_request(folder: Path, record: DaemonRecord) -> FinishRequest | None:
    """What this very process was asked, once; None when nothing readable is there for it."""
    path = folder / _REQUEST_FILE
    request = _read(path, FinishRequest)
    with contextlib.suppress(OSError):
        path.unlink()
    if request is None or (request.pid, request.started_s) != (record.pid, record.started_s):
        return None
    return request


def ask_to_finish(folder: Path, grace_s: float | None) -> DaemonRecord:
    """Tell the folder's daemon to hand over and end. Raises `UnreachableError` when none runs
    there, `StorageError` when the folder can't be written."""
    nobody = UnreachableError(
        f"no node daemon runs in {folder}; name the folder of the one that you mean with --folder"
    )
    if not is_held(folder):
        raise nobody
    record = _read(folder / _RECORD_FILE, DaemonRecord)
    if record is None or not _is_alive(record):
        raise UnreachableError(
            f"the node daemon in {folder} is just starting or ending; try again in some seconds"
        )
    request = FinishRequest(pid=record.pid, started_s=record.started_s, grace_s=grace_s)
    _write(folder / _REQUEST_FILE, request)
    try:
        _signal(record, folder)
    except (ProcessLookupError, PermissionError) as error:
        if isinstance(error, PermissionError):
            raise storage_error(folder, error) from None
        raise nobody from None
    return record


def read_record(folder: Path) -> DaemonRecord | None:
    return _read(folder / _RECORD_FILE, DaemonRecord)


def is_held(folder: Path) -> bool:
    """Whether a daemon has the folder now."""
    try:
        with (folder / LOCK_FILE).open("r", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise storage_error(folder / LOCK_FILE, error) from None
    return False


def _signal(record: DaemonRecord, folder: Path) -> None:
    """To the process that holds the lock, and no other that may have got its pid meanwhile."""
    with _process(record.pid) as descriptor:
        # Whoever is behind the descriptor stays that; now see that it is the daemon.
        if not (_is_alive(record) and is_held(folder)):
            raise ProcessLookupError
        if descriptor is None:
            os.kill(record.pid, FINISH_SIGNAL)
        else:
            signal.pidfd_send_signal(descriptor, FINISH_SIGNAL)


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int | None]:
    """A descriptor of the process, where the system has such."""
    if not hasattr(os, "pidfd_open"):
        yield None
        return
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_alive(record: DaemonRecord) -> bool:
    try:
        return _started_s(psutil.Process(record.pid)) == record.started_s
    except psutil.Error:
        return False


def _started_s(process: psutil.Process) -> float:
    """When it began. On Linux in seconds after the boot: what psutil tells moves with the clock."""
    created_s = float(process.create_time())
    return round(created_s - psutil.boot_time(), 2) if psutil.LINUX else created_s


def _write(path: Path, value: BaseModel) -> None:
    with AtomicFile(path, durable=False) as file:  # of no use to anybody after a power failure
        file.write(value.model_dump_json().encode() + b"\n")


def _read(path: Path, model: type[M]) -> M | None:
    try:
        with path.open("rb") as file:
            return model.model_validate_json(file.read(_MAX_BYTES))
    except (OSError, ValidationError):
        return None
