# SPDX-License-Identifier: Apache-2.0
"""Launches a run, or resumes it: folder, data, event log, then the service until it is over."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from shoal.coordinator.check import check_boundary
from shoal.coordinator.conductor import Conductor
from shoal.coordinator.log_identity import log_identity
from shoal.coordinator.rivals import discovered, find_leader, led_elsewhere, require_own_log
from shoal.coordinator.run_folder import Live, Progress, open_run, read_previous, remove_live
from shoal.coordinator.serving import Coordinator, LaunchConfig
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.sqlite_store import SqliteEventStore
from shoal.coordinator.state import replay
from shoal.coordinator.terms import Claim
from shoal.protocol.atomic_file import remove_leftovers
from shoal.protocol.authority import Authority
from shoal.protocol.discovery import Discovery
from shoal.protocol.errors import CapacityError, ShoalError, TermError
from shoal.protocol.fault_injector import faults_from
from shoal.protocol.spec import ResolvedRun, RunSpec
from shoal.protocol.terminal import STOP_SIGNALS, Terminal, quit_now

log = logging.getLogger(__name__)

_CLAIM_AGAIN_S = 1.0
"""About: two claimants don't outbid each other in step for ever."""


def launch(
    spec: RunSpec, config: LaunchConfig, terminal: Terminal, progress: Progress
) -> Conductor:
    """Serve the run until it is finished or stopped. Blocks.

    The first signal while it is served finishes the open step, stores a snapshot and lets the
    nodes go; the second quits the process. Before that a signal's KeyboardInterrupt unwinds.
    Raises `ConfigError` before anything is written, `RunFailedError` and other `ShoalError`s.
    """
    check_boundary(spec)
    check_ports(config)
    previous = read_previous(config.folder)
    # The log first: it keeps a second coordinator away from the folder.
    with SqliteEventStore(config.folder / "events.sqlite") as store:
        remove_leftovers(config.folder)
        discovery = EarlyDiscovery(config, previous) if config.discovery else None
        try:
            # In the main thread, where a signal interrupts it.
            run = open_run(spec, config.folder, progress)
            return asyncio.run(_serve(run, store, config, discovery, previous, terminal))
        finally:
            remove_live(os.getpid())
            if discovery is not None:
                asyncio.run(discovery.close())


def check_ports(config: LaunchConfig) -> None:
    """Raises `CapacityError` for a wanted port that is taken: preparing data may take hours, and
    the ports are bound after that."""
    wanted = [(config.host, config.port), (config.http_host, config.http_port)]
    if config.port:
        wanted.append((config.host, config.port + 1))
    for host, port in wanted:
        if not port:
            continue
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed ports linger
            try:
                probe.bind((host, port))
            except OSError as error:
                raise CapacityError(
                    f"can't listen on {host} port {port}: {error.strerror or error}; stop the "
                    "other program, or choose another port (sessions take the one after --port)"
                ) from None


async def _serve(
    run: ResolvedRun,
    store: SqliteEventStore,
    config: LaunchConfig,
    early: "EarlyDiscovery | None",
    previous: Live | None,
    terminal: Terminal,
) -> Conductor:
    discovery = await early.get() if early is not None else None
    folder = config.folder
    authority = Authority.load_or_create(folder / "keys")
    claim = Claim(log_identity(folder), forced=config.force_term, authority=authority)
    state = replay((event.kind, event.payload) for event in store.read())

    async def require_no_leader() -> None:
        """Raises `TermError` naming the coordinator that leads."""
        places = [previous.admission] if previous is not None else []
        places += [standby.admission for standby in state.standbys.values()]
        if state.term and not (state.is_alone and claim.log_id == state.council.log_id):
            places += await discovered(discovery, run.run_id, authority.fingerprint)
        rival = await find_leader(
            places, run.run_id, authority.fingerprint, own_log_id=claim.log_id
        )
        if rival is not None:
            raise led_elsewhere(rival, run.run_id, folder)

    await require_no_leader()
    if not config.force_term:
        require_own_log(state, claim.log_id, folder)
    conductor: Conductor | None = None

    def stop() -> None:
        terminal.line("stopping after this step; Ctrl-C again quits at once")
        if conductor is not None:
            conductor.stop()

    signals = Signals(stop)
    while True:
        snapshots, faults = SnapshotStore(folder, run), faults_from(config.faults)
        conductor = Conductor(run, store, snapshots, claim, faults=faults)
        coordinator = Coordinator(conductor, config, discovery, previous, terminal, store)
        try:
            await coordinator.serve(signals.any)
        except TermError as error:
            # A node has promised itself elsewhere. If nobody leads there, claim a higher term.
            await require_no_leader()
            if signals.any.is_set():
                raise
            terminal.line(f"{error}; nobody leads there, so this one claims the next term")
            claim = replace(claim, least_term=error.term + 1)
            previous = read_previous(folder)
            await asyncio.sleep(_CLAIM_AGAIN_S * random.uniform(0.5, 1.5))
        else:
            return conductor


class Signals:
    """The first Ctrl-C (or SIGTERM) calls back, the second quits the process."""

    def __init__(self, on_first: Callable[[], object]) -> None:
        self.any = asyncio.Event()
        self._on_first = on_first
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        log.info("got %s", number.name)
        if self.any.is_set():
            # Everything that counts is in the log; helper processes end with this one.
            quit_now()
        self.any.set()
        self._on_first()


class EarlyDiscovery:
    """Discovery that starts on a thread of its own: it imports for seconds, while the run's data
    is prepared."""

    def __init__(
        self, config: LaunchConfig, previous: Live | None, bootstrap: Sequence[str] = ()
    ) -> None:
        self._future: Future[Discovery | None] = Future()
        self._bootstrap = bootstrap
        threading.Thread(
            target=self._start, args=(config, previous), name="early-discovery", daemon=True
        ).start()

    async def get(self) -> Discovery | None:
        """None when it could not start; nodes can still join by address."""
        return await asyncio.wrap_future(self._future)

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            discovery = await self.get()
            if discovery is not None:
                await discovery.close()

    def _start(self, config: LaunchConfig, previous: Live | None) -> None:
        try:
            self._future.set_result(
                asyncio.run(_start_discovery(config, previous, self._bootstrap))
            )
        except BaseException as error:
            self._future.set_exception(error)


async def _start_discovery(
    config: LaunchConfig, previous: Live | None, bootstrap: Sequence[str]
) -> Discovery | None:
    from shoal.protocol.discovery_dht import DhtDiscovery

    # Nodes remember where they have found this peer: the same port keeps that true.
    ports = [previous.discovery_port] if previous is not None and previous.discovery_port else []
    for port in (*ports, 0):
        try:
            return await DhtDiscovery.start(
                bootstrap,
                listen_host=config.host,
                listen_port=port,
                identity_path=config.folder / "keys" / "libp2p.key",
                alone_is_fine=True,
            )
        except (ShoalError, TimeoutError, OSError) as error:
            if port and isinstance(error, CapacityError):
                continue
            log.warning("no discovery: %s. Nodes can still join by address.", error)
            return None
    return None
