# SPDX-License-Identifier: Apache-2.0
"""A disk that can be full on order.

The disk is the process's, and so is this: whatever writes files of ours asks `require_space` where
the real disk would say ENOSPC, and handles that as it handles the real one.
"""

import errno
import os
import shutil
import time
from pathlib import Path

_full_until_s = 0.0


def fill(seconds: float) -> None:
    """From now on, and for so long, every write fails."""
    global _full_until_s
    _full_until_s = time.monotonic() + seconds


def require_space(path: Path) -> None:
    """Raises `OSError` (ENOSPC) while the disk is full."""
    if _full_until_s and time.monotonic() < _full_until_s:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def has_room(folder: Path, num_bytes: int) -> bool:
    """Whether the disk under `folder` has so much free, as far as can be known: nobody sees
    quotas. `folder` need not be there yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        require_space(folder)
        return shutil.disk_usage(folder).free >= num_bytes
    except OSError:
        return False
