# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the one that started them, however that one ends.

The starter holds the writing end of a pipe that nobody else has, and gives the reading end as
stdin. Nothing is ever written: the reader sees the end of file when the starter is gone.
"""

import functools
import logging
import os
import signal
import sys
import threading
import time

from shoal.protocol.terminal import quit_now

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""To leave politely, before the process quits."""


@functools.cache
def lifeline() -> int:
    """The descriptor to start processes with, as their stdin; with `--end-with-stdin` they end
    when this process does."""
    reading, writing = os.pipe()
    _held.append(writing)  # open until this process ends; children don't inherit it
    return reading


_held: list[int] = []


def end_with_stdin() -> None:
    """From now on the end of stdin ends this process: by SIGTERM, and for good after a while."""
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass  # whatever is written there is not for us
    log.warning("whoever started this process is gone; it ends too")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    quit_now()
