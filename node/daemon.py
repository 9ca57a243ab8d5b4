# SPDX-License-Identifier: Apache-2.0
"""The node daemon: joins a run, serves its peers, and stays attached until the run is over."""

import asyncio
import contextlib
import fcntl
import logging
import shutil
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shoal.node.admission import Membership, join
from shoal.node.certificate import keep_renewed
from shoal.node.config import NodeConfig
from shoal.node.daemon_file import LOCK_FILE, own_record, take_request, write_record
from shoal.node.finder import Finder
from shoal.node.hardware import Device, probe
from shoal.node.logged_boundaries import LoggedBoundaries
from shoal.node.member_reports import trouble_event
from shoal.node.pace import Pace
from shoal.node.peer_service import PeerService
from shoal.node.promises import Promises
from shoal.node.session import NodeSession
from shoal.node.shares import SharedOut
from shoal.node.stage_holder import Report, StageHolder
from shoal.node.state_transfer import StateTransfer
from shoal.node.swarm_view import SwarmView
from shoal.protocol.atomic_file import remove_leftovers, storage_error
from shoal.protocol.errors import CapacityError, ProtocolError, StorageError
from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.identity import NodeIdentity
from shoal.protocol.ids import PeerId, display_name
from shoal.protocol.join_link import JoinLink, join_address
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.rpc import create_server, serve_secure
from shoal.protocol.task_scope import TaskScope
from shoal.protocol.wire import add_peer_servicer

log = logging.getLogger(__name__)

_GOODBYE_S = 0.2
_SAY_S = 0.5


class NodeDaemon:
    """`run` returns when the run is over or the owner leaves."""

    def __init__(
        self, config: NodeConfig, link: JoinLink, report: Report, faults: Faults = NO_FAULTS
    ) -> None:
        self._config = config
        self._faults = faults
        self._link = link
        self._report = report
        self._identity = NodeIdentity.load_or_create(config.folder)
        self._finder = Finder(
            self._identity, link, folder=config.folder, host=config.host, enabled=config.discovery
        )
        self._promises = Promises(config.folder, link.run_id, link.fingerprint)
        self._session: NodeSession | None = None
        self._holder: StageHolder | None = None
        self._num_steps = 0
        self._record = own_record(self.name)

    @property
    def name(self) -> str:
        return display_name(self._identity.peer_id)

    @property
    def is_attached(self) -> bool:
        """Whether there is anything to hand over: the node was admitted."""
        return self._session is not None

    def status_line(self) -> str:
        """What the node does now, in a line for a terminal."""
        session, holder = self._session, self._holder
        if session is None or holder is None:
            return f"{self.name}: joining {self._link.run_id}"
        parts = [self.name]
        if session.is_leaving:
            parts.append(f"leaving, at most {session.grace_left_s:.0f} s more")
        if holder.stage is not None:
            parts += [f"stage {holder.stage}", f"step {holder.committed_step} of {self._num_steps}"]
        if holder.microbatches_per_s:
            parts.append(f"{holder.microbatches_per_s:.3g} microbatches/s")
        if session.waiting_for:
            parts.append(session.waiting_for)
        elif holder.member is not None and (waits := holder.member.waiting_for()):
            parts.append(f"waits for {waits}")
        return " · ".join(parts)

    @property
    def handed_over(self) -> bool:
        """Once it has ended: whether all that it held is kept elsewhere."""
        return self._session is None or self._session.handed_over

    def leave(self, grace_s: float | None = None) -> None:
        """Hand over what is held within the grace, and end. Call once it `is_attached`."""
        assert self._session is not None
        if not self._session.is_leaving:
            self._session.leave(grace_s)
            self._report(
                f"leaving: handing over first, for {self._session.grace_left_s:g} s at most; "
                "press Ctrl-C again to quit at once"
            )

    def finish(self) -> bool:
        """`shoal node finish` asks. Returns whether it `is_attached`, so that it leaves now."""
        request = take_request(self._config.folder, self._record)
        if self.is_attached:
            self.leave(request.grace_s if request else None)
        return self.is_attached

    async def _tell_while_leaving(self, session: NodeSession) -> None:
        """For whoever waits in another terminal for this daemon to end."""
        await session.leaving()
        leave_by_s, said = time.time() + session.grace_left_s, ""
        while True:
            if (doing := self.status_line()) != said:
                said = doing
                self._record = self._record.model_copy(
                    update={"doing": doing, "leave_by_s": leave_by_s}
                )
                await asyncio.to_thread(self._write_record)
            await asyncio.sleep(_SAY_S)

    def _write_record(self) -> None:
        try:
            write_record(self._config.folder, self._record)
        except StorageError as error:  # a full disk: only `shoal node finish` knows less
            log.warning("%s", error)

    async def run(self) -> None:
        """Raises `ShoalError` when the node can't take part."""
        config = self._config
        with (
            _one_daemon(config.folder),
            _scratch(config.folder) as scratch,
            self._recorded(),
        ):
            try:
                async with TaskScope() as tasks:
                    probing = tasks.spawn(
                        asyncio.to_thread(
                            probe,
                            config.device,
                            num_threads=config.threads,
                            max_memory_bytes=int(config.max_memory_gb * 1e9),
                        )
                    )
                    membership = await self._join()
                    await self._serve(membership, await probing, scratch, tasks)
            finally:
                await self._finder.close()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Says in the folder who this is, and at the end whether it has handed over."""
        self._write_record()
        handed_over = False
        try:
            yield
            handed_over = self.handed_over
        finally:
            # One that never attached had nothing to hand over, whatever ended it.
            handed_over = handed_over or not self.is_attached
            self._record = self._record.model_copy(update={"handed_over": handed_over})
            self._write_record()

    async def _join(self) -> Membership:
        membership = await join(self._link, self._identity, self._elsewhere)
        authority = ssl.PEM_cert_to_DER_cert(membership.credentials.authority_pem.decode())
        self._promises.trust(authority)
        return membership

    async def _elsewhere(self) -> list[str]:
        """Admission addresses to try when the link's don't answer."""
        found = self._promises.admission_addresses
        return list(dict.fromkeys([*found, *await self._finder.admission_addresses()]))

    async def _serve(
        self, membership: Membership, device: Device, scratch: Path, tasks: TaskScope
    ) -> None:
        run, config = membership.run, self._config
        swarm = SwarmView()
        transfer = StateTransfer(
            membership,
            config.folder,
            lambda: session.stub,
            on_bad=lambda peer, error: session.send(_bad_peer(holder, peer, error)),
        )
        holder = StageHolder(
            membership,
            device,
            folder=config.folder,
            max_cache_bytes=int(config.cache_gb * 1e9),
            scratch=scratch,
            transfer=transfer,
            swarm=swarm,
            tasks=tasks,
            send=lambda event: session.send(event),
            report=self._report,
            faults=self._faults,
        )
        service = PeerService(
            run.run_id,
            swarm,
            holder,
            lambda peer, error, key: session.send(_bad_peer(holder, peer, error, key)),
            self._faults,
            pace=Pace(config.donate_mb_per_s * 1e6),
            logged=LoggedBoundaries(run, holder.boundary_log),
            shared=SharedOut(run, holder.boundary_log),
        )
        server = create_server()
        add_peer_servicer(service, server)
        port = serve_secure(
            server,
            join_address(config.host, config.port),
            membership.credentials.server_credentials(),
        )
        address = join_address(config.advertise or config.host, port)

        async def rejoin() -> None:
            membership.take_over(await self._join())

        session = NodeSession(
            membership,
            device=device,
            address=address,
            swarm=swarm,
            finder=self._finder,
            bytes_received=lambda: service.bytes_received,
            rejoin=rejoin,
            report=self._report,
            grace_s=config.grace_s,
            faults=self._faults,
            promises=self._promises,
        )
        await server.start()
        self._report(f"{self.name} joined run {run.run_id}, listening on {address}, {device.name}")
        holder.on_stage = self._finder.changed
        self._session, self._holder, self._num_steps = session, holder, run.spec.steps
        # Discovery imports a heavy library: off the way to the first microbatch.
        tasks.spawn(
            self._finder.announce(
                run.run_id, address, lambda: holder.stage, membership.discovery_peers
            )
        )
        tasks.spawn(keep_renewed(membership, lambda: session.stub))
        tasks.spawn(self._tell_while_leaving(session))
        try:
            self._report(f"done: {await session.keep(holder)}")
        finally:
            await server.stop(grace=_GOODBYE_S)
            await holder.close()


def _bad_peer(
    holder: StageHolder,
    peer_id: PeerId,
    error: ProtocolError,
    key: types_pb2.TensorKey | None = None,
) -> coordinator_pb2.NodeEvent:
    event = trouble_event(
        coordinator_pb2.TROUBLE_KIND_BAD_PEER,
        error,
        incarnation=holder.member.incarnation if holder.member else 0,
        peer_id=peer_id,
    )
    if key is not None:
        trouble = event.trouble
        trouble.peer_incarnation = key.incarnation
        trouble.step, trouble.attempt, trouble.microbatch = key.step, key.attempt, key.microbatch
    return event


@contextlib.contextmanager
def _one_daemon(folder: Path) -> Iterator[None]:
    """Raises `CapacityError` when another daemon uses the folder."""
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock: IO[str] = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise storage_error(path, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CapacityError(
                f"{folder} is used by another node daemon; stop it, or give each its own --folder"
            ) from None
        except OSError as error:
            raise storage_error(path, error) from None
        yield


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """For state files on their way; removed at the end. What a killed daemon left goes first."""
    try:
        for left in folder.glob("state-*"):
            shutil.rmtree(left, ignore_errors=True)
        remove_leftovers(folder)
        scratch = tempfile.TemporaryDirectory(
            prefix="state-", dir=folder, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise storage_error(folder, error) from None
    with scratch as path:
        yield Path(path)
