# SPDX-License-Identifier: Apache-2.0
"""A standby coordinator: follows the leader, and leads the run when the leader is gone.

It takes over only with the promises of a quorum, so it may try whenever it can't reach the leader:
if the leader lives, its nodes stay with it, and the standby follows again.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.launch import EarlyDiscovery, Signals
from shoal.coordinator.ports import ReservedPorts, wanted_ports
from shoal.coordinator.rivals import ask, discovered
from shoal.coordinator.run_folder import Live, read_previous, remove_live
from shoal.coordinator.serving import Coordinator, LaunchConfig, report_plainly
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.standby_bulk import KEPT_SNAPSHOTS, BulkCopy
from shoal.coordinator.standby_copy import StandbyCopy
from shoal.coordinator.terms import Claim
from shoal.protocol.authority import fetch_authority
from shoal.protocol.discovery import Discovery
from shoal.protocol.errors import (
    AdmissionError,
    MalformedFrameError,
    ShoalError,
    TermError,
    UnreachableError,
    VersionError,
)
from shoal.protocol.fault_injector import faults_from
from shoal.protocol.join_link import JoinLink, split_address
from shoal.protocol.proto import coordinator_pb2, coordinator_pb2_grpc
from shoal.protocol.rpc import (
    CONNECT_DEADLINE_S,
    admission_channel,
    backoff,
    error_from_rpc,
)
from shoal.protocol.task_scope import TaskScope
from shoal.protocol.terminal import Terminal
from shoal.version import PROTOCOL_VERSION, __version__

log = logging.getLogger(__name__)

SILENT_S = 5.0
"""A leader's stream without a beat for so long is broken; it beats every second."""

_RETRY_LIMIT_S = 2.0
_WATCH_S = 2.0


def stand_by(link: JoinLink, config: LaunchConfig, terminal: Terminal) -> Conductor | None:
    """Stand by until the run is over; the conductor, if this coordinator has led it. Blocks.

    Raises `AdmissionError` for a bad link, `UnreachableError` when nobody answers at first,
    `ConfigError`, `CapacityError` and other `ShoalError`s.
    """
    with StandbyCopy(config.folder, link) as copy:
        if not copy.has_files:
            link.require_fresh(time.time())
        previous = read_previous(config.folder)
        discovery = None
        if config.discovery:
            discovery = EarlyDiscovery(config, previous, bootstrap=link.discovery)
        try:
            standby = Standby(copy, link, config, previous, terminal)
            return asyncio.run(standby.run(discovery))
        finally:
            remove_live(os.getpid())
            if discovery is not None:
                asyncio.run(discovery.close())


class Standby:
    def __init__(
        self,
        copy: StandbyCopy,
        link: JoinLink,
        config: LaunchConfig,
        previous: Live | None,
        terminal: Terminal,
    ) -> None:
        self._copy = copy
        self._link = link
        self._config = config
        self._terminal = terminal
        self._ports = ReservedPorts(
            config.host, config.advertise or config.host, wanted_ports(config.port, previous)
        )
        self._discovery: Discovery | None = None
        self._leader = ""  # admission address of whom it follows, or followed last
        self._heard_s = 0.0
        self._leaders_step = 0
        self._least_term = 1
        self._conductor: Conductor | None = None
        self._status = "connecting"
        self._bulk = BulkCopy(copy, say=terminal.line)

    def status_line(self) -> str:
        trouble = f"; not copied yet: {self._bulk.trouble}" if self._bulk.trouble else ""
        return f"standing by for {self._link.run_id}: {self._status}{trouble}"

    async def run(self, early: EarlyDiscovery | None) -> Conductor | None:
        def stop() -> None:
            if self._conductor is not None and self._conductor.terms.leads:
                self._terminal.line("stopping after this step; Ctrl-C again quits at once")
            if self._conductor is not None:
                self._conductor.stop()

        signals = Signals(stop)
        stopped = asyncio.create_task(signals.any.wait())
        async with TaskScope() as tasks:
            tasks.spawn(self._start_discovery(early))
            try:
                while True:
                    with self._terminal.live(self.status_line):
                        following = asyncio.create_task(self._follow())
                        await asyncio.wait(
                            {following, stopped}, return_when=asyncio.FIRST_COMPLETED
                        )
                        if stopped.done():
                            following.cancel()
                            await asyncio.gather(following, return_exceptions=True)
                            self._terminal.line("stopped standing by; the run goes on without it")
                            return None
                        over = following.result()
                    if over:
                        self._terminal.line(f"the leader has ended: {over}; nothing to take over")
                        return None
                    if await self._take_over(signals):
                        return self._conductor
                    if stopped.done():
                        return None
            finally:
                stopped.cancel()
                self._ports.release()

    async def _start_discovery(self, early: EarlyDiscovery | None) -> None:
        if early is not None:
            self._discovery = await early.get()

    # ---- following -----------------------------------------------------------------------

    async def _follow(self) -> str:
        """Until the leader says that the run is over (returns its words), or has been out of
        reach for `takeover_s` (returns nothing). Raises `ShoalError` when it can't be followed."""
        async with TaskScope() as tasks:
            # A coordinator keeps its snapshots itself: this ends before one is made.
            tasks.spawn(self._bulk.keep_up())
            tasks.spawn(report_plainly(self._terminal, self.status_line))
            return await self._follow_anybody()

    async def _follow_anybody(self) -> str:
        """As `_follow`."""
        self._heard_s = time.monotonic()
        rng, failures, said = random.Random(), 0, False
        failure: ShoalError | None = None
        while True:
            for address in await self._places():
                try:
                    return await self._follow_at(address)
                except (AdmissionError, VersionError):
                    raise
                except ShoalError as error:
                    log.info("not following %s: %s", address, error)
                    failure = error
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self._config.takeover_s:
                if await asyncio.to_thread(lambda: self._copy.is_whole):  # may read shards
                    return ""
                raise UnreachableError(
                    f"no coordinator of run {self._link.run_id} could be followed for "
                    f"{silent_s:.0f} s ({failure}), and {self._copy.folder} isn't a whole copy yet"
                )
            if self._leader and not said:
                said = True
                self._terminal.line(f"the leader at {self._leader} is out of reach: {failure}")
            self._status = f"the leader has been out of reach for {silent_s:.0f} s"
            failures += 1
            await asyncio.sleep(backoff(failures, rng, limit_s=_RETRY_LIMIT_S))

    async def _places(self) -> list[str]:
        """Admission addresses at which a leader may be."""
        found = [self._leader, *self._link.addresses]
        others = self._copy.state.standbys.values()
        found += [s.admission for s in others if s.log_id != self._copy.log_id]
        found += await discovered(self._discovery, self._link.run_id, self._link.fingerprint)
        own = self._ports.addresses().admission
        return [a for a in dict.fromkeys(found) if a and a != own]

    async def _follow_at(self, address: str) -> str:
        host, port = split_address(address)
        proof = await asyncio.to_thread(
            fetch_authority, host, port, self._link.fingerprint, CONNECT_DEADLINE_S
        )
        last_sequence, last_digest = self._copy.newest_event()
        request = coordinator_pb2.FollowRequest(
            protocol_version=PROTOCOL_VERSION,
            release=__version__,
            run_id=self._link.run_id,
            token=self._copy.token(),
            standby_id=self._copy.log_id,
            addresses=self._ports.addresses(),
            last_sequence=last_sequence,
            last_digest=last_digest,
            has_files=self._copy.has_files,
            snapshots=self._copy.snapshots(),
        )
        async with admission_channel(address, proof) as channel:
            call = coordinator_pb2_grpc.CoordinatorStub(channel).Follow(request)
            try:
                return await self._take_all(aiter(call), address)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None
            finally:
                call.cancel()

    async def _take_all(
        self, events: AsyncIterator[coordinator_pb2.FollowEvent], address: str
    ) -> str:
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    event = await anext(events)
            except TimeoutError:
                raise UnreachableError(f"no word for {SILENT_S:g} s") from None
            except StopAsyncIteration:
                raise UnreachableError("the leader ended the stream") from None
            match event.WhichOneof("event"):
                case "begin":
                    self._begin(event.begin, address)
                case "file":
                    await asyncio.to_thread(self._copy.take, event.file)
                case "log":
                    await asyncio.to_thread(self._copy.append, event.log)
                case "beat":
                    self._leaders_step = event.beat.step
                    self._bulk.wanted_snapshots = tuple(event.beat.snapshots)[-KEPT_SNAPSHOTS:]
                    self._show()
                case "end":
                    return event.end.reason[:200] or "the run is over"
                case unexpected:
                    raise MalformedFrameError(f"unexpected event {unexpected}")
            self._heard_s = time.monotonic()

    def _begin(self, begin: coordinator_pb2.FollowBegin, address: str) -> None:
        own_term = self._copy.state.term
        if begin.term < own_term:
            raise TermError(
                f"the coordinator at {address} leads in term {begin.term}; this log is of term "
                f"{own_term}, so that one has been replaced",
                term=own_term,
            )
        self._copy.begin()
        if address != self._leader:
            self._terminal.line(f"following the coordinator at {address}, term {begin.term}")
        self._leader, self._bulk.leader = address, begin.session_address
        self._status = "copying the run's files" if begin.anew else "following"

    def _show(self) -> None:
        step = self._copy.state.step
        behind = "" if step >= self._leaders_step else f" of {self._leaders_step}"
        count = len(self._copy.snapshots())
        self._status = (
            f"step {step}{behind}, {count} snapshot{'s' * (count != 1)}, leader at {self._leader}"
        )

    # ---- taking over ---------------------------------------------------------------------

    async def _take_over(self, signals: Signals) -> bool:
        """Claim the next term and lead the run to its end. False when the leader is back, or
        another coordinator leads."""
        copy, config = self._copy, self._config
        assert copy.store is not None, "only a whole copy takes over"
        claim = Claim(copy.log_id, least_term=self._least_term, authority=copy.authority)
        snapshots, faults = SnapshotStore(copy.folder, copy.run), faults_from(config.faults)
        conductor = Conductor(copy.run, copy.store, snapshots, claim, faults=faults)
        self._conductor = conductor
        self._terminal.line(
            f"the leader is gone; asking the nodes for promises of term {conductor.terms.term}"
        )
        live = self._ports.as_live(self._link.run_id)
        self._ports.release()
        config = replace(config, port=0)
        coordinator = Coordinator(
            conductor, config, self._discovery, live, self._terminal, copy.store
        )
        watching = asyncio.create_task(self._withdraw_if_needless(conductor))
        try:
            await coordinator.serve(signals.any)
        except TermError as error:
            self._least_term = max(self._least_term, error.term + 1)
            self._terminal.line(str(error))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if conductor.terms.leads and conductor.deposed is None:
            return True
        self._conductor = None
        await asyncio.to_thread(copy.refresh)
        self._ports.reserve()
        return False

    async def _withdraw_if_needless(self, conductor: Conductor) -> None:
        """While this coordinator doesn't lead: whether the leader, or another one, is back."""
        while not conductor.terms.leads and not conductor.ended:
            for address in await self._places():
                rival = await ask(address, self._link.run_id, self._link.fingerprint)
                if rival is None or rival.log_id == self._copy.log_id:
                    continue
                if rival.leads or rival.address == self._leader:
                    conductor.withdraw(f"the coordinator at {address} is back")
                    self._terminal.line(f"the coordinator at {address} is back; following again")
                    return
            await asyncio.sleep(_WATCH_S)
