# SPDX-License-Identifier: Apache-2.0
"""Asks the daemon of a folder to hand over and leave, and waits for its end."""

import time
from collections.abc import Callable
from pathlib import Path

from shoal.node.daemon_file import ask_to_finish, is_held, read_record
from shoal.protocol.errors import HandOverError, UnreachableError

_POLL_S = 0.2
_AFTER_GRACE_S = 30.0
"""It leaves at the end of its grace by itself; closing down takes a moment more."""

_UNHEARD_S = 30.0
"""For so long a daemon may take to say that it leaves: it may be within a long call."""


def finish(
    folder: Path,
    grace_s: float | None,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when the daemon has ended and everything that it held is with others.

    Raises `UnreachableError` when no daemon runs in `folder`, or when it doesn't end in time;
    `HandOverError` when it ended without handing over.
    """
    asked = ask_to_finish(folder, grace_s)
    say(f"{asked.name} (pid {asked.pid}) is asked to finish")
    said, ends_s = "", clock() + _UNHEARD_S
    while is_held(folder):
        record = read_record(folder)
        if record is not None and record.pid == asked.pid and record.leave_by_s is not None:
            ends_s = record.leave_by_s + _AFTER_GRACE_S
            if record.doing != said:
                said = record.doing
                say(said)
        if clock() > ends_s:
            raise UnreachableError(
                f"{asked.name} (pid {asked.pid}) does not end; see its log, or end it with "
                f"`kill -9 {asked.pid}`: the run then computes again what it held"
            )
        sleep(_POLL_S)
    record = read_record(folder)
    if record is None or record.started_s != asked.started_s or not record.handed_over:
        raise HandOverError(
            f"{asked.name} ended without handing over, so the run computes again what only it "
            "held; a longer --grace gives the others more time"
        )
    say(f"{asked.name} has handed over and left")
