# SPDX-License-Identifier: Apache-2.0
"""Serves a run: ports, discovery, dashboard and the conductor's clock, until the run is over."""

import asyncio
import contextlib
import shlex
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.dashboard.app import create_app
from shoal.coordinator.dashboard.server import serve
from shoal.coordinator.follow import FollowDesk
from shoal.coordinator.ports import wanted_ports
from shoal.coordinator.presence import Addresses, Presence
from shoal.coordinator.probe import watch_missing
from shoal.coordinator.run_folder import Live, operator_token
from shoal.coordinator.run_view import ConductorView, tokens_per_s
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.sqlite_store import SqliteEventStore
from shoal.coordinator.standby_link import LINK_FILE
from shoal.coordinator.timeline import Timeline
from shoal.protocol.authority import LEAF_LIFETIME_S, Authority
from shoal.protocol.discovery import Discovery
from shoal.protocol.errors import CapacityError, RunFailedError
from shoal.protocol.identity import NodeIdentity, TlsKey
from shoal.protocol.join_link import join_address
from shoal.protocol.proto import coordinator_pb2_grpc
from shoal.protocol.rpc import Credentials, create_server, serve_secure
from shoal.protocol.task_scope import TaskScope
from shoal.protocol.terminal import Terminal

_TICK_S = 0.2
_FLUSH_TICKS = 25
_GOODBYE_S = 5.0
_LINE_S = 10.0


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    folder: Path
    host: str = "127.0.0.1"
    advertise: str = ""
    """Host at which nodes reach the coordinator; empty means `host`."""
    port: int = 0
    """Admission port; sessions take the next one. 0: those of the last launch, or free ones."""
    http_host: str = "127.0.0.1"
    http_port: int = 0
    link_file: Path | None = None
    keep_running: bool = False
    """Go on serving the dashboard when the run is over."""
    discovery: bool = True
    allowed_hosts: tuple[str, ...] = ()
    faults: Path | None = None
    """Faults on order, for tests (protocol/faults.py)."""
    force_term: bool = False
    """Lead without asking: the operator knows that no other coordinator of the run lives."""
    takeover_s: float = 10.0
    """How long the leader may be out of reach before a standby takes over."""
    leaf_lifetime_s: float = LEAF_LIFETIME_S
    """Of nodes' and coordinator's certificates, which are renewed after a third of it."""


class Coordinator:
    def __init__(
        self,
        conductor: Conductor,
        config: LaunchConfig,
        discovery: Discovery | None,
        previous: Live | None,
        terminal: Terminal,
        store: SqliteEventStore,
    ) -> None:
        """`previous` is where the last coordinator of this run was."""
        self._store = store
        self._run = conductor.run
        self._conductor = conductor
        self._config = config
        self._previous = previous
        self._terminal = terminal
        keys = config.folder / "keys"
        self._authority = Authority.load_or_create(keys)
        self._identity = NodeIdentity.load_or_create(keys)
        self._presence = Presence(
            self._run.run_id,
            self._authority,
            discovery,
            folder=config.folder,
            link_file=config.link_file,
            said_by_nodes=self._said_by_nodes,
        )
        self._view = ConductorView(conductor, lambda: str(self._presence.link()))

    async def serve(self, stop: asyncio.Event) -> None:
        """Until the run is over; with `keep_running` until `stop` after that.

        Raises `RunFailedError`, `CapacityError` for a taken port, and `TermError` when another
        coordinator leads by now.
        """
        async with TaskScope() as tasks, self._ports(tasks) as addresses:
            self._presence.announce(addresses)
            self._terminal.line(f"dashboard  {addresses.dashboard}")
            self._terminal.line(f"join       shoal join '{self._presence.link()}'")
            hint = shlex.quote(str(self._config.folder / LINK_FILE))
            self._terminal.line(f"standby    shoal launch --standby {hint}")
            tasks.spawn(self._tick())
            tasks.spawn(watch_missing(self._conductor))
            tasks.spawn(self._presence.keep_published())
            tasks.spawn(report_plainly(self._terminal, self.status_line))
            with self._terminal.live(self.status_line):
                await self._until_over()
            leads = self._conductor.terms.leads
            if self._config.keep_running and leads and not stop.is_set():
                self._terminal.line("the run is over; Ctrl-C ends the dashboard")
                await stop.wait()

    @contextlib.asynccontextmanager
    async def _ports(self, tasks: TaskScope) -> AsyncIterator[Addresses]:
        config = self._config
        credentials = self._credentials()
        server = create_server()
        service = CoordinatorService(
            self._conductor,
            self._authority,
            run_folder=config.folder,
            session_address=lambda: self._presence.at.session,
            discovery_addresses=self._presence.discovery_addresses,
            leaf_lifetime_s=config.leaf_lifetime_s,
            follow=FollowDesk(
                self._conductor,
                self._authority,
                self._store,
                folder=config.folder,
                session_address=lambda: self._presence.at.session,
            ),
        )
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
        admission, session = self._bind(server, credentials)
        app = create_app(
            self._view,
            operator_token=operator_token(config.folder),
            allowed_hosts=config.allowed_hosts,
        )
        http, http_port = await serve(app, config.http_host, config.http_port)
        try:
            await server.start()
            tasks.spawn(self._renew_leaf(credentials))
            yield Addresses(
                admission, session, f"http://{join_address(config.http_host, http_port)}/"
            )
        finally:
            await server.stop(grace=_GOODBYE_S)
            http.cancel()
            await asyncio.gather(http, return_exceptions=True)

    def _bind(self, server: grpc.aio.Server, credentials: Credentials) -> tuple[str, str]:
        """Raises `CapacityError`."""
        wanted = wanted_ports(self._config.port, self._previous)
        for ports in wanted[:-1]:
            with contextlib.suppress(CapacityError):
                return self._listen(server, credentials, *ports)
        return self._listen(server, credentials, *wanted[-1])

    def _listen(
        self, server: grpc.aio.Server, credentials: Credentials, admission: int, session: int
    ) -> tuple[str, str]:
        host = self._config.host
        advertised = self._config.advertise or host
        admission = serve_secure(
            server, join_address(host, admission), credentials.admission_server_credentials()
        )
        session = serve_secure(
            server, join_address(host, session), credentials.server_credentials()
        )
        return join_address(advertised, admission), join_address(advertised, session)

    # ---- identity ------------------------------------------------------------------------

    def _credentials(self) -> Credentials:
        tls_key = TlsKey.generate()
        return Credentials(
            private_key_pem=tls_key.private_pem,
            leaf_pem=self._leaf(tls_key),
            authority_pem=self._authority.certificate_pem,
        )

    def _leaf(self, tls_key: TlsKey) -> bytes:
        leaf, _ = self._authority.issue_leaf(
            tls_key.spki_der,
            self._identity.peer_id,
            self._config.leaf_lifetime_s,
            time.time(),
            embed_authority=True,
        )
        return leaf

    async def _renew_leaf(self, credentials: Credentials) -> None:
        """A coordinator may serve for weeks; whoever connects gets a leaf that is valid."""
        while True:
            await asyncio.sleep(self._config.leaf_lifetime_s / 3)
            tls_key = TlsKey.generate()
            credentials.replace(leaf_pem=self._leaf(tls_key), private_key_pem=tls_key.private_pem)

    def _said_by_nodes(self) -> list[str]:
        sessions = self._conductor.sessions.values()
        return [next(iter(s.hello.discovery_addresses), "") for s in sessions]

    # ---- what goes on meanwhile ----------------------------------------------------------

    async def _tick(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(_TICK_S)
            self._conductor.tick()
            ticks += 1
            if ticks % _FLUSH_TICKS == 0:
                await asyncio.to_thread(self._conductor.flush)

    def status_line(self) -> str:
        """The run in a line for a terminal."""
        conductor = self._conductor
        state, spec = conductor.state, self._run.spec
        parts = [f"{spec.name}: step {state.step} of {spec.steps}"]
        records = Timeline.of(state.records).last(5)
        if records:
            parts += [f"loss {records[-1].loss:.4f}", f"{tokens_per_s(records):,.0f} tokens/s"]
        holders = [0] * spec.pipeline.stages
        for session in list(conductor.sessions.values()):
            if session.stage is not None and session.state != "copying":
                holders[session.stage] += 1
        parts.append("nodes per stage " + "+".join(str(count) for count in holders))
        if conductor.waiting_for:
            parts.append(f"waiting: {conductor.waiting_for}")
        return " · ".join(parts)

    async def _until_over(self) -> None:
        conductor, version = self._conductor, -1
        while not conductor.ended:
            version = await self._view.changed(version)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                while conductor.sessions:
                    version = await self._view.changed(version)
        if conductor.deposed is not None:
            raise conductor.deposed
        if conductor.failed:
            raise RunFailedError(conductor.failed)


async def report_plainly(terminal: Terminal, status_line: Callable[[], str]) -> None:
    """Without a terminal that shows it live: the line now and then, when it has changed."""
    if terminal.console.is_terminal:
        return
    said = ""
    while True:
        await asyncio.sleep(_LINE_S)
        line = status_line()
        if line != said:
            terminal.line(line)
            said = line
