# SPDX-License-Identifier: Apache-2.0
"""Serves a run: ports, discovery, dashboard and the conductor's clock, until the run is over."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.dashboard.app import create_app
from shoal.coordinator.dashboard.server import serve
from shoal.coordinator.run_folder import (
    LIVE_FILE,
    Live,
    Progress,
    open_run,
    operator_token,
    write_file,
    write_live,
)
from shoal.coordinator.run_view import ConductorView
from shoal.coordinator.service import LEAF_LIFETIME_S, CoordinatorService
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.store import SqliteEventStore
from shoal.protocol.authority import Authority
from shoal.protocol.discovery import Discovery, coordinator_record, sign_record
from shoal.protocol.errors import CapacityError, RunFailedError, ShoalError
from shoal.protocol.identity import NodeIdentity, TlsKey
from shoal.protocol.join_link import JoinLink
from shoal.protocol.proto import coordinator_pb2_grpc
from shoal.protocol.rpc import Credentials, create_server, serve_secure
from shoal.protocol.spec import ResolvedRun, RunSpec
from shoal.version import PROTOCOL_VERSION

log = logging.getLogger(__name__)

LINK_LIFETIME_S = 7 * 24 * 3600
SESSION_CAPABILITY = "session"
"""Where the discovery record names the mutual-TLS port; `address` is the admission port."""

_TICK_S = 0.2
_FLUSH_TICKS = 25
_PUBLISH_S = 60.0
_GOODBYE_S = 5.0

Report = Callable[[str], None]


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
    allowed_hosts: tuple[str, ...] = field(default=())


async def launch(
    spec: RunSpec, config: LaunchConfig, report: Report, progress: Progress
) -> Conductor:
    """Serve the run until it is finished, stopped or failed. Raises `RunFailedError`."""
    signals = _Signals()
    folder = config.folder
    previous = read_previous(folder)
    dht = asyncio.create_task(_start_discovery(config)) if config.discovery else None
    try:
        # The log first: it keeps a second coordinator away from the folder.
        with SqliteEventStore(folder / "events.sqlite") as store:
            run = await asyncio.to_thread(open_run, spec, folder, progress)
            conductor = Conductor(run, store, SnapshotStore(folder, run))
            discovery = await dht if dht is not None else None
            coordinator = _Coordinator(run, conductor, config, discovery, previous)
            async with coordinator.serving(report):
                signals.on_first(lambda: (report("stopping after this step"), conductor.stop()))
                await coordinator.until_over(signals)
            return conductor
    finally:
        signals.restore()
        if dht is not None:
            if not dht.done():
                dht.cancel()
            with contextlib.suppress(asyncio.CancelledError, ShoalError):
                discovery = await dht
                if discovery is not None:
                    await discovery.close()


async def _start_discovery(config: LaunchConfig) -> Discovery | None:
    from shoal.protocol.discovery_dht import DhtDiscovery

    try:
        return await DhtDiscovery.start(
            listen_host=config.host,
            identity_path=config.folder / "keys" / "libp2p.key",
        )
    except (ShoalError, TimeoutError, OSError) as error:
        log.warning("no discovery: %s. Nodes can still join by address.", error)
        return None


def read_previous(folder: Path) -> Live | None:
    """Where the last coordinator of this run was, whether it lives or not."""
    try:
        return Live.model_validate(json.loads((folder / LIVE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


class _Coordinator:
    def __init__(
        self,
        run: ResolvedRun,
        conductor: Conductor,
        config: LaunchConfig,
        discovery: Discovery | None,
        previous: Live | None,
    ) -> None:
        self._run = run
        self._conductor = conductor
        self._config = config
        self._discovery = discovery
        self._previous = previous
        keys = config.folder / "keys"
        self._authority = Authority.load_or_create(keys)
        self._identity = NodeIdentity.load_or_create(keys)
        self._admission = self._session = ""

    @contextlib.asynccontextmanager
    async def serving(self, report: Report):  # type: ignore[no-untyped-def]
        config = self._config
        credentials = self._credentials()
        server = create_server()
        service = CoordinatorService(
            self._conductor,
            self._authority,
            run_folder=config.folder,
            session_address=lambda: self._session,
            discovery_addresses=self._discovery_addresses,
        )
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
        self._bind(server, credentials)
        await server.start()
        view = ConductorView(self._conductor, lambda: str(self._link()))
        app = create_app(
            view,
            operator_token=operator_token(config.folder),
            allowed_hosts=config.allowed_hosts,
        )
        http, http_port = await serve(app, config.http_host, config.http_port)
        ticker = asyncio.create_task(self._tick())
        publisher = asyncio.create_task(self._publish())
        try:
            link = str(self._link())
            dashboard = f"http://{_bracketed(config.http_host)}:{http_port}/"
            write_live(
                config.folder,
                Live(
                    run_id=self._run.run_id,
                    pid=os.getpid(),
                    dashboard=dashboard,
                    admission=self._admission,
                    session=self._session,
                    link=link,
                ),
            )
            if config.link_file is not None:
                write_file(config.link_file, link.encode() + b"\n")
            report(f"dashboard  {dashboard}")
            report(f"join       shoal join '{link}'")
            yield
        finally:
            for task in (ticker, publisher):
                task.cancel()
            await asyncio.gather(ticker, publisher, return_exceptions=True)
            await server.stop(grace=_GOODBYE_S)
            http.cancel()
            await asyncio.gather(http, return_exceptions=True)

    def _bind(self, server: grpc.aio.Server, credentials: Credentials) -> None:
        """Admission and session ports: those asked for, else those of last time, else any."""
        config = self._config
        wanted = [(config.port, config.port + 1 if config.port else 0)]
        if not config.port and self._previous is not None:
            last = self._previous
            wanted.insert(0, (_port(last.admission), _port(last.session)))
        for admission, session in wanted:
            try:
                bound = (
                    serve_secure(
                        server,
                        f"{_bracketed(config.host)}:{admission}",
                        credentials.admission_server_credentials(),
                    ),
                    serve_secure(
                        server,
                        f"{_bracketed(config.host)}:{session}",
                        credentials.server_credentials(),
                    ),
                )
            except CapacityError:
                if (admission, session) == wanted[-1]:
                    raise
                continue
            host = _bracketed(config.advertise or config.host)
            self._admission, self._session = f"{host}:{bound[0]}", f"{host}:{bound[1]}"
            return

    def _credentials(self) -> Credentials:
        tls_key = TlsKey.generate()
        leaf, _ = self._authority.issue_leaf(
            tls_key.spki_der,
            self._identity.peer_id,
            LEAF_LIFETIME_S,
            time.time(),
            embed_authority=True,
        )
        return Credentials(
            private_key_pem=tls_key.private_pem,
            leaf_pem=leaf,
            authority_pem=self._authority.certificate_pem,
        )

    def _discovery_addresses(self) -> list[str]:
        """This coordinator's discovery peer and a few nodes', so that no single one is needed."""
        own = self._discovery.addresses() if self._discovery else []
        others = [
            address
            for session in self._conductor.sessions.values()
            for address in list(session.hello.discovery_addresses)[:1]
        ]
        return [*own, *others][:8]

    def _link(self) -> JoinLink:
        expires_s = int(time.time()) + LINK_LIFETIME_S
        return JoinLink(
            addresses=(self._admission,),
            run_id=self._run.run_id,
            fingerprint=self._authority.fingerprint,
            token=self._authority.issue_token(self._run.run_id, expires_s),
            expires_s=expires_s,
            discovery=tuple(self._discovery_addresses()[:2]),
        )

    async def _tick(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(_TICK_S)
            self._conductor.tick()
            ticks += 1
            if ticks % _FLUSH_TICKS == 0:
                await asyncio.to_thread(self._conductor.flush)

    async def _publish(self) -> None:
        while self._discovery is not None:
            record = coordinator_record(
                run_id=self._run.run_id,
                authority_der=self._authority.certificate_der,
                address=self._admission,
                protocol_version=PROTOCOL_VERSION,
                now_s=time.time(),
                capabilities={SESSION_CAPABILITY: self._session},
            )
            try:
                await self._discovery.publish(sign_record(record, self._authority.sign), record)
                await asyncio.sleep(_PUBLISH_S)
            except (ShoalError, TimeoutError, OSError) as error:
                log.warning("discovery record not published: %s", error)
                await asyncio.sleep(5.0)

    async def until_over(self, signals: "_Signals") -> None:
        conductor = self._conductor
        while not conductor.ended and not signals.quit.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(signals.quit.wait(), _TICK_S)
        if conductor.failed:
            raise RunFailedError(conductor.failed)
        deadline = time.monotonic() + _GOODBYE_S
        while conductor.sessions and time.monotonic() < deadline and not signals.quit.is_set():
            await asyncio.sleep(0.05)
        if self._config.keep_running:
            await signals.any.wait()


class _Signals:
    """The first Ctrl-C (or SIGTERM) asks to stop, the second quits."""

    def __init__(self) -> None:
        self.any = asyncio.Event()
        self.quit = asyncio.Event()
        self._callback: Callable[[], object] | None = None
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._received)

    def on_first(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        if self.any.is_set():
            callback()

    def _received(self) -> None:
        if self.any.is_set():
            self.quit.set()
        self.any.set()
        if self._callback is not None and not self.quit.is_set():
            self._callback()
        elif self._callback is None:
            raise KeyboardInterrupt

    def restore(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


def _port(address: str) -> int:
    tail = address.rpartition(":")[2]
    return int(tail) if tail.isdecimal() else 0


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
