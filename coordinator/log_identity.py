# SPDX-License-Identifier: Apache-2.0
"""Which log a run folder holds: a random id that a copy of the folder doesn't keep.

The id is bound to the machine and to the folder's inode. The number of the file system's device
is left out: it changes over reboots for overlays, btrfs and network file systems.
"""

import json
import secrets
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from shoal.protocol.atomic_file import AtomicFile, storage_error
from shoal.protocol.spec import canonical_json

LOG_ID_FILE = "log-id.json"

_MACHINE_ID = Path("/etc/machine-id")
_MAX_BYTES = 4096


class _LogIdentity(BaseModel):
    model_config = ConfigDict(frozen=True)

    log_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    machine: str
    inode: int


def log_identity(folder: Path) -> str:
    """The id of the log in `folder`; a new one in a new, copied or moved folder.

    Raises `StorageError`.
    """
    path = folder / LOG_ID_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        machine, inode = _machine(), folder.stat().st_ino
    except OSError as error:
        raise storage_error(folder, error) from error
    known = _read(path)
    if known is not None and (known.machine, known.inode) == (machine, inode):
        return known.log_id
    fresh = _LogIdentity(log_id=secrets.token_hex(16), machine=machine, inode=inode)
    with AtomicFile(path) as file:
        file.write(canonical_json(fresh.model_dump()))
    return fresh.log_id


def _read(path: Path) -> _LogIdentity | None:
    try:
        with path.open("rb") as file:
            return _LogIdentity.model_validate(json.loads(file.read(_MAX_BYTES)))
    except (OSError, ValueError):
        return None


def _machine() -> str:
    """Empty where there is no such file, as in many containers."""
    try:
        return _MACHINE_ID.read_text(encoding="ascii").strip()[:64]
    except (OSError, UnicodeDecodeError):
        return ""
