# SPDX-License-Identifier: Apache-2.0
"""A node's session with the coordinator: attached, and attached again whenever it breaks.

The coordinator may restart, move to another address, or be out of reach for hours; the stage's
state stays in memory meanwhile and is offered at the next Hello.
"""

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import grpc
import psutil

from shoal.node.admission import Membership
from shoal.node.coordinator_addresses import CoordinatorAddresses
from shoal.node.finder import Finder
from shoal.node.hardware import Device
from shoal.node.promises import Promises
from shoal.node.stage_holder import Report, StageHolder
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import (
    AdmissionError,
    MalformedFrameError,
    ShoalError,
    TermError,
    UnreachableError,
    VersionError,
)
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.faults import Moment
from shoal.protocol.proto import coordinator_pb2, coordinator_pb2_grpc
from shoal.protocol.rpc import backoff, error_from_rpc
from shoal.version import PROTOCOL_VERSION, __version__

if TYPE_CHECKING:
    from shoal.protocol.proto.coordinator_pb2_grpc import CoordinatorAsyncStub

log = logging.getLogger(__name__)

RETRY_LIMIT_S = 3.0

_MAX_UNSENT = 1000
"""With so many events unsent the coordinator doesn't read; more signs of life help nobody."""

AWAY_LIMIT_S = 10.0
"""How much of its grace a leaving node that holds state waits for a coordinator that is away."""

LEAD_S = 15.0
"""How long a coordinator may let a node wait for its first word."""

_LEAST_LEAD_S = 1.0
"""The same for a node that leaves: for longer than its patience, if it has none left."""

_MAX_REASONS = 16
"""Why the coordinator can't be had is logged once each, and only so many."""

_REFUSAL_S = 2.0

Commands = AsyncIterable[coordinator_pb2.Command]


class _Dismissed(Exception):
    """The node is let go; `args[0]` says why."""


class NodeSession:
    def __init__(
        self,
        membership: Membership,
        *,
        device: Device,
        address: str,
        swarm: SwarmView,
        finder: Finder,
        bytes_received: Callable[[], int],
        rejoin: Callable[[], Awaitable[None]],
        report: Report,
        grace_s: float,
        faults: Faults = NO_FAULTS,
        promises: Promises,
    ) -> None:
        """`address` is where other nodes reach this one; `rejoin` gets a new certificate through
        the join link, when the old one has expired before it could be renewed."""
        self._membership = membership
        self._device = device
        self._address = address
        self._swarm = swarm
        self._finder = finder
        self._bytes_received = bytes_received
        self._rejoin = rejoin
        self._report = report
        self._grace_s = grace_s
        self._faults = faults
        self._leave_by_s = 0.0
        self._away_since_s: float | None = None
        self.handed_over = True
        """Whether everything that was held when the node ended is kept somewhere else."""
        self._promises = promises
        self._term = 0  # promised in this session; 0 before Lead
        self._led = asyncio.Event()
        self._outbox: asyncio.Queue[coordinator_pb2.NodeEvent] = asyncio.Queue()
        self._stub: CoordinatorAsyncStub | None = None
        self._answered = False
        self._leaving = asyncio.Event()
        self.waiting_for = ""
        """What the coordinator says this node waits for."""

    @property
    def stub(self) -> "CoordinatorAsyncStub":
        if self._stub is None:
            raise UnreachableError("the coordinator is away; this node attaches again by itself")
        return self._stub

    def send(self, event: coordinator_pb2.NodeEvent) -> None:
        if event.HasField("prepared"):
            event.prepared.term = self._term
        self._outbox.put_nowait(event)

    @property
    def is_leaving(self) -> bool:
        return self._leaving.is_set()

    async def leaving(self) -> None:
        """Returns once the node leaves."""
        await self._leaving.wait()

    def leave(self, grace_s: float | None = None) -> None:
        """Hand over what is held, and end, within `grace_s`; by default the configured one. Said
        again it changes nothing. A coordinator that is away gets a part of that time to return,
        when this node holds state."""
        if not self._leaving.is_set():
            if grace_s is not None:
                self._grace_s = grace_s
            self._leave_by_s = time.monotonic() + self._grace_s
            self._leaving.set()

    @property
    def grace_left_s(self) -> float:
        return max(0.0, self._leave_by_s - time.monotonic())

    async def keep(self, holder: StageHolder) -> str:
        """Stay attached until the coordinator or the owner ends it; returns why it ended.

        Raises `VersionError` when the coordinator speaks another protocol, `AdmissionError` when
        it admits this node no more.
        """
        addresses = CoordinatorAddresses(self._membership.session_address)
        lookup: asyncio.Task[list[str]] | None = None
        failures, rng = 0, random.Random()
        said: set[str] = set()
        try:
            while True:
                reason = await self._attend_once(addresses.current, holder)
                if self._answered:
                    addresses.answered()
                    failures = 0
                    said.clear()
                else:
                    addresses.failed()
                failures += 1
                if self._leaving.is_set() and self._may_leave(holder):
                    return "left while the coordinator was away; it fences this node by itself"
                self._say_away(reason, said)
                wait_s = backoff(failures, rng, limit_s=RETRY_LIMIT_S)
                if self._leaving.is_set():
                    await asyncio.sleep(min(wait_s, self._away_left_s))
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._leaving.wait()
                        continue
                # Beside the retries, not between them: a table without live peers answers slowly.
                known = [self._membership.session_address, *self._promises.session_addresses]
                if lookup is not None and lookup.done():
                    known = [*lookup.result(), *known]
                    lookup = None
                addresses.learn(known)
                lookup = lookup or asyncio.create_task(self._finder.session_addresses())
        except _Dismissed as dismissed:
            return str(dismissed)
        finally:
            if lookup is not None:
                lookup.cancel()
                await asyncio.gather(lookup, return_exceptions=True)

    def _say_away(self, reason: str, said: set[str]) -> None:
        """To the owner once that the node waits, to the log each new reason. `said` are those of
        this time."""
        self.waiting_for = "the coordinator"
        if self._leaving.is_set():
            self.waiting_for += ", which may take over what this node holds"
        if not said:
            self._report(f"waiting for the coordinator: {reason}; trying again")
        elif reason not in said and len(said) < _MAX_REASONS:
            log.info("still waiting for the coordinator: %s", reason)
        if len(said) < _MAX_REASONS:
            said.add(reason)

    def _may_leave(self, holder: StageHolder) -> bool:
        """Whether to end without the coordinator. What only this node holds would be lost with it,
        and a coordinator that restarts is back in seconds."""
        if holder.held() is None:
            return True
        self.handed_over = False
        self._away_since_s = self._away_since_s or time.monotonic()
        return not self._away_left_s

    @property
    def _away_left_s(self) -> float:
        """For how long a leaving node that holds state still waits for the coordinator."""
        limit_s = min(AWAY_LIMIT_S, self._grace_s / 2)
        if self._away_since_s is not None:
            limit_s -= time.monotonic() - self._away_since_s
        return min(max(0.0, limit_s), self.grace_left_s)

    async def _attend_once(self, address: str, holder: StageHolder) -> str:
        """One session; returns why it broke."""
        self._answered = False
        try:
            if time.time() >= self._membership.certificate_expires_s:
                await self._rejoin()
            await self._attend(address, holder)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if isinstance(error, VersionError):
                raise error from None
            return str(error)
        except (VersionError, AdmissionError):
            raise
        except ShoalError as error:
            return str(error)
        return "the coordinator ended the session"

    async def _attend(self, address: str, holder: StageHolder) -> None:
        """One session, from Hello to its end."""
        membership = self._membership
        # A queue of its own: the broken session's call may still wait for an event, and take it.
        self._outbox = outbox = asyncio.Queue[coordinator_pb2.NodeEvent]()
        self._term = 0
        self._led.clear()
        async with membership.credentials.channel(address, membership.coordinator) as channel:
            self._stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            call = self._stub.Session(_events(self._hello(holder), outbox, self._faults))
            parts = [
                asyncio.create_task(self._obey_all(call, holder, address)),
                asyncio.create_task(self._once_led(lambda: self._heartbeat(holder))),
                asyncio.create_task(self._say_farewell(holder)),
            ]
            try:
                done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for task in (part for part in parts if part in done):
                    task.result()
            finally:
                self._stub = None
                for task in parts:
                    task.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
                call.cancel()
                await holder.detach()  # a session's end is its incarnation's end

    def _hello(self, holder: StageHolder) -> coordinator_pb2.NodeEvent:
        hello = coordinator_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            release=__version__,
            address=self._address,
            hardware=self._device.to_proto(),
            pid=os.getpid(),
            discovery_addresses=self._finder.addresses(),
        )
        held = holder.held()
        if held is not None:
            hello.held.CopyFrom(held)
        return coordinator_pb2.NodeEvent(hello=hello)

    async def _heartbeat(self, holder: StageHolder) -> None:
        interval = self._membership.run.spec.fault.heartbeat_s
        process = psutil.Process()
        while True:
            await asyncio.sleep(interval)
            member = holder.member
            heartbeat = coordinator_pb2.Heartbeat(
                queue_depth=member.queue_depth() if member else 0,
                microbatches_per_s=holder.microbatches_per_s,
                memory_bytes=int(process.memory_info().rss),
                bytes_sent=member.links.bytes_sent if member else 0,
                bytes_received=self._bytes_received(),
                waiting_for=holder.waiting_for(),
                discovered_peers=self._finder.num_discovered,
                progress=holder.progress(),
                log_bytes=holder.boundary_log.num_bytes,
                log_oldest_step=holder.boundary_log.oldest_step,
            )
            if self._outbox.qsize() < _MAX_UNSENT:
                self.send(coordinator_pb2.NodeEvent(heartbeat=heartbeat))

    async def _say_farewell(self, holder: StageHolder) -> None:
        await self._leaving.wait()
        patience_s = self._away_left_s if holder.held() is not None else 0.0
        try:
            async with asyncio.timeout(max(patience_s, _LEAST_LEAD_S)):
                await self._led.wait()
        except TimeoutError:
            raise UnreachableError(
                "the coordinator has not said in time that it leads; this node leaves"
            ) from None
        farewell = coordinator_pb2.Farewell(
            reason="its owner stopped it", grace_s=self.grace_left_s
        )
        self.send(coordinator_pb2.NodeEvent(farewell=farewell))
        holder.release()
        await asyncio.sleep(self.grace_left_s)
        self.handed_over = False
        raise _Dismissed(f"nobody took over within {self._grace_s:g} s; left without handing over")

    # ---- commands ------------------------------------------------------------------------

    async def _obey_all(self, call: Commands, holder: StageHolder, address: str) -> None:
        commands = aiter(call)
        try:
            async with asyncio.timeout(LEAD_S):
                first = await anext(commands)
        except TimeoutError:
            raise UnreachableError(f"the coordinator at {address} doesn't lead") from None
        except StopAsyncIteration:
            return
        await self._promise(first, address)
        self._answered = self.handed_over = True
        self._away_since_s = None
        async for command in commands:
            if command.HasField("lead"):
                await self._promise(command, address)
            else:
                await self._obey(command, holder)

    async def _promise(self, command: coordinator_pb2.Command, address: str) -> None:
        """Answer a coordinator's Lead. Raises `TermError` when another one was promised to."""
        if not command.HasField("lead"):
            raise MalformedFrameError(f"the first command of {address} isn't Lead")
        promise = await asyncio.to_thread(self._promises.answer, command.lead, address)
        self.send(coordinator_pb2.NodeEvent(promise=promise))
        if promise.refused:
            await asyncio.sleep(_REFUSAL_S)  # it is told why, and ends the session
            raise TermError(
                f"the coordinator at {address} claims term {command.lead.term}; "
                f"this node follows that of term {promise.term}"
            )
        self._term = promise.term
        self._led.set()

    async def _once_led(self, work: Callable[[], Awaitable[None]]) -> None:
        """A session's second event is Promise; the rest follows."""
        await self._led.wait()
        await work()

    async def _obey(self, command: coordinator_pb2.Command, holder: StageHolder) -> None:
        kind = command.WhichOneof("command")
        if kind == "plan":
            gone = await self._swarm.update(command.plan)
            if holder.member is not None:
                await holder.member.members_gone(gone)
        elif kind == "assign":
            await holder.take(command.assign)
        elif kind == "dismiss":
            if not command.dismiss.come_back:
                raise _Dismissed(command.dismiss.reason)
            self._report(f"taken out of the swarm: {command.dismiss.reason}; joining again")
            await holder.detach()
        elif kind == "wait":
            self.waiting_for = command.wait.reason
            self._report(command.wait.reason)
        elif kind == "truncate":
            holder.boundary_log.truncate(command.truncate.through_step)
        elif kind == "standbys":
            await asyncio.to_thread(self._promises.know_standbys, command.standbys)
        elif kind is not None:
            if kind == "commit":
                await asyncio.to_thread(self._promises.keep, command.commit)
            if kind == "step_open":
                self.waiting_for = ""
            await holder.obey(command, kind)


async def _events(
    hello: coordinator_pb2.NodeEvent,
    outbox: "asyncio.Queue[coordinator_pb2.NodeEvent]",
    faults: Faults,
) -> AsyncIterator[coordinator_pb2.NodeEvent]:
    yield hello
    while True:
        event = await outbox.get()
        yield event
        if event.HasField("prepared"):  # gRPC has written it, else it wouldn't ask for more
            faults.reach(Moment.PREPARED, event.prepared.step)
