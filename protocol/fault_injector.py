# SPDX-License-Identifier: Apache-2.0
"""Carries faults out, in the process that reaches their moments.

`Faults` is what daemons are given: it does nothing. `InjectedFaults` follows a file that somebody
else writes, one fault a line, and may append to at any time.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.protocol import disk
from shoal.protocol.atomic_file import storage_error
from shoal.protocol.errors import ConfigError, UnreachableError
from shoal.protocol.faults import (
    Action,
    Fault,
    FaultBook,
    FiredFault,
    Moment,
    parse_fault,
    parse_fired,
)
from shoal.protocol.ids import PeerId, display_name

log = logging.getLogger(__name__)

FAULTS_VARIABLE = "SHOAL_FAULTS_FILE"

FIRED_SUFFIX = ".fired"

# It goes when the stopped process does: its pid may be another's by then.
_CONTINUE_LATER = """
import os, signal, sys, time
pid, end_s = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == pid and time.monotonic() < end_s:
    time.sleep(0.05)
if os.getppid() == pid:
    os.kill(pid, signal.SIGCONT)
"""


class Faults:
    """None at all."""

    are_possible = False
    """What costs something is done only where this is true."""

    def reach(self, moment: Moment, step: int) -> None:
        """The process is at `moment` of `step`. It may not live to see this call return."""

    def take_poison(self) -> bool:
        """Whether the gradient that is computed next shall hold a NaN."""
        return False

    def check_link(self, peer: PeerId) -> None:
        """Raises `UnreachableError` while nothing may pass between here and `peer`."""

    async def link_drops(self, peer: PeerId) -> None:
        """Returns when the link to `peer` breaks; call it only where faults `are_possible`."""

    def delay_s(self, peer: PeerId) -> float:
        """How late the next tensor for `peer` leaves."""
        return 0.0


NO_FAULTS = Faults()


@dataclass(slots=True)
class _BrokenLink:
    fault: Fault
    until_s: float
    peer: PeerId | None = None  # whoever is asked for first, where the fault names nobody

    def concerns(self, peer: PeerId) -> bool:
        wanted = self.fault.peer
        if wanted:
            return peer.startswith(wanted) or display_name(peer) == wanted
        if self.peer is None:
            self.peer = peer
        return self.peer == peer


class InjectedFaults(Faults):
    """Faults from `path`, which need not be there yet. Use it on one event loop's thread."""

    are_possible = True

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `StorageError` when what has fired before can't be read."""
        self._path = path
        self._fired_path = path.with_name(path.name + FIRED_SUFFIX)
        self._clock = clock
        self._book = FaultBook(fault.id for fault in read_fired(path))
        self._read_bytes = 0
        self._links: list[_BrokenLink] = []
        self._links_changed = asyncio.Event()
        self._poison = 0
        self._helpers: list[subprocess.Popen[bytes]] = []

    def reach(self, moment: Moment, step: int) -> None:
        self._look()
        for fault in self._book.reach(moment, step):
            self._note(fault, step)
            self._act(fault)

    def take_poison(self) -> bool:
        if not self._poison:
            return False
        self._poison -= 1
        return True

    def check_link(self, peer: PeerId) -> None:
        if self._link(Action.DROP_LINK, peer) is not None:
            raise UnreachableError(f"the link to {display_name(peer)} is broken on order")

    async def link_drops(self, peer: PeerId) -> None:
        while self._link(Action.DROP_LINK, peer) is None:
            await self._links_changed.wait()

    def delay_s(self, peer: PeerId) -> float:
        link = self._link(Action.DELAY_LINK, peer)
        return link.fault.delay_s if link is not None else 0.0

    # ---- files ---------------------------------------------------------------------------

    def _look(self) -> None:
        """Learn what has been appended since. A line counts once it has its end."""
        try:
            if self._path.stat().st_size <= self._read_bytes:
                return
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                fresh, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(self._path, error) from None
        self._read_bytes += len(fresh) + len(end)
        for line in fresh.decode(errors="replace").splitlines():
            try:
                if line.strip():
                    self._book.learn([parse_fault(line)])
            except ConfigError as error:  # not worth a run
                log.error("%s: %s", self._path, error)

    def _note(self, fault: Fault, step: int) -> None:
        """On disk before the act: what has happened must not happen again after a restart."""
        fired = FiredFault(
            id=fault.id,
            step=step,
            moment=fault.moment,
            action=fault.action,
            time_s=time.time(),
            pid=os.getpid(),
        )
        try:
            with self._fired_path.open("ab", buffering=0) as file:  # in one write
                file.write(fired.model_dump_json().encode() + b"\n")
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(self._fired_path, error) from None

    # ---- acts ----------------------------------------------------------------------------

    def _act(self, fault: Fault) -> None:
        log.warning("fault on order: %s", fault.model_dump_json(exclude_defaults=True))
        match fault.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.TERM:
                os.kill(os.getpid(), signal.SIGTERM)
            case Action.STOP:
                self._stop(fault.seconds)
            case Action.DROP_LINK | Action.DELAY_LINK:
                self._links.append(_BrokenLink(fault, self._clock() + fault.seconds))
                self._links_changed.set()
                self._links_changed = asyncio.Event()
            case Action.FULL_DISK:
                disk.fill(fault.seconds)
            case Action.POISON:
                self._poison += 1

    def _stop(self, seconds: float) -> None:
        self._helpers = [helper for helper in self._helpers if helper.poll() is None]
        self._helpers.append(
            subprocess.Popen(
                [sys.executable, "-ISc", _CONTINUE_LATER, str(os.getpid()), str(seconds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        os.kill(os.getpid(), signal.SIGSTOP)

    def _link(self, action: Action, peer: PeerId) -> _BrokenLink | None:
        if not self._links:
            return None
        now_s = self._clock()
        self._links = [link for link in self._links if link.until_s > now_s]
        return next((k for k in self._links if k.fault.action is action and k.concerns(peer)), None)


def read_fired(path: Path) -> list[FiredFault]:
    """What the faults in `path` have done so far. Raises `StorageError`."""
    fired_path = path.with_name(path.name + FIRED_SUFFIX)
    try:
        return parse_fired(fired_path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(fired_path, error) from None


def faults_from(path: Path | None) -> Faults:
    """For the command line: without a file nothing is injected."""
    return NO_FAULTS if path is None else InjectedFaults(path)
