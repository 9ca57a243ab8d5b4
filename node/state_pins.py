# SPDX-License-Identifier: Apache-2.0
"""Versions of this node's state that it serves to joiners while it trains on.

The coordinator says between two steps which ones (`Pin`). The tensors are copied on the compute
thread, before the next commit can change them, and written into a scratch file.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shoal.protocol.errors import CapacityError, ShoalError, WrongStepError
from shoal.protocol.proto import coordinator_pb2, peer_pb2, types_pb2
from shoal.protocol.state_chunks import describe
from shoal.protocol.state_file import PARTS

log = logging.getLogger(__name__)

MAX_PINS = 8
MAX_AGE_S = 1800.0
"""Nobody keeps a version for longer; a joiner that needs more time gets a newer one."""

PIN_LAG_S = 10.0
"""How long before its donor a joiner may hear of a pin."""

Part: TypeAlias = types_pb2.StatePart.ValueType
Written: TypeAlias = tuple[Path, peer_pb2.StateDescription]
Save = Callable[[Path, Part], Awaitable[tuple[int, int]]]
"""Writes a part of the state as it is when called; returns its step and the weights' digest."""


@dataclass(frozen=True, slots=True)
class PinnedState:
    path: Path
    description: peer_pb2.StateDescription
    urgent: bool
    """The run waits for whoever fetches it."""


@dataclass(slots=True)
class _Pin:
    writing: "asyncio.Task[Written]"
    expiry: asyncio.TimerHandle
    urgent: bool


class StatePins:
    """Of one incarnation. `close` removes the files."""

    def __init__(self, folder: Path, *, step: Callable[[], int], save: Save) -> None:
        self._folder = folder
        self._step = step
        self._save = save
        self._pins: dict[tuple[int, Part], _Pin] = {}
        self._writing: set[asyncio.Task[Written]] = set()
        self._changed = asyncio.Condition()

    @property
    def versions(self) -> list[tuple[int, Part]]:
        return list(self._pins)

    async def want(self, command: coordinator_pb2.Pin) -> None:
        """Pin exactly these. Returns once the copies of new ones are queued before whatever the
        compute thread is told next; they are written behind."""
        wanted = {(v.step, v.part): v.urgent for v in command.versions}
        for version in self._pins.keys() - wanted.keys():
            self._drop(version)
        for version, urgent in wanted.items():
            step, part = version
            if version in self._pins:
                self._pins[version].urgent = urgent
                continue
            if step != self._step() or part not in PARTS or len(self._pins) >= MAX_PINS:
                # A joiner that asks for it hears so, and has other donors or gets a newer version.
                log.warning("can't pin step %d, part %d; holding %d", step, part, self._step())
                continue
            writing = asyncio.create_task(self._write(step, part))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
            writing.add_done_callback(_note)
            expiry = asyncio.get_running_loop().call_later(MAX_AGE_S, self._drop, version)
            self._pins[version] = _Pin(writing, expiry, urgent)
        await asyncio.sleep(0)  # lets the new tasks queue their copies
        async with self._changed:
            self._changed.notify_all()

    async def get(self, step: int, part: Part) -> PinnedState:
        """Raises `WrongStepError` for a version that isn't pinned, `StorageError`."""
        version = (step, part)
        try:
            async with asyncio.timeout(PIN_LAG_S), self._changed:
                await self._changed.wait_for(lambda: version in self._pins)
        except TimeoutError:
            raise WrongStepError(
                f"the state of step {step} is not pinned here; this node is at {self._step()}"
            ) from None
        pin = self._pins[version]
        path, description = await asyncio.shield(pin.writing)
        return PinnedState(path, description, pin.urgent)

    async def close(self) -> None:
        for version in list(self._pins):
            self._drop(version)
        await asyncio.gather(*self._writing, return_exceptions=True)
        await asyncio.sleep(0)  # lets their files go

    async def _write(self, step: int, part: Part) -> Written:
        path = self._folder / f"pin-{step}-{part}-{uuid.uuid4().hex}.safetensors"
        saved, digest = await self._save(path, part)
        try:
            if saved != step:
                raise WrongStepError(f"step {step} was to be pinned; {saved} came first")
            description = await asyncio.to_thread(describe, path, weights_digest=digest)
            if (step, part) not in self._pins:
                raise CapacityError(f"the pin of step {step} was dropped meanwhile")
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path, description

    def _drop(self, version: tuple[int, Part]) -> None:
        """Whoever reads the file goes on reading it to the end of the request."""
        pin = self._pins.pop(version, None)
        if pin is None:
            return
        pin.expiry.cancel()
        pin.writing.add_done_callback(_unlink)


def _unlink(writing: "asyncio.Task[Written]") -> None:
    if not writing.cancelled() and writing.exception() is None:
        writing.result()[0].unlink(missing_ok=True)


def _note(writing: "asyncio.Task[Written]") -> None:
    """A version that can't be written (the disk is full) costs the joiner a donor, no more."""
    if not writing.cancelled() and isinstance(writing.exception(), ShoalError):
        log.warning("could not pin a version of the state: %s", writing.exception())
