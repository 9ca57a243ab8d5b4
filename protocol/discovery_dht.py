# SPDX-License-Identifier: Apache-2.0
"""Discovery on a hivemind Kademlia table (libp2p).

hivemind's `DHTNode` runs in this process, in its own daemon thread with its own event loop, so that
it can't stall the loop that serves gRPC. (`hivemind.DHT` forks a child that outlives a killed
parent; never use it.) hivemind, and with it torch, is imported in that thread: seconds, but off the
caller's path.

One helper process belongs to each instance: libp2p's Go daemon `p2pd`. It ends when its persistent
control connection to us closes, which the kernel does however we die. If we die before that
connection exists, SIGPIPE on its first output ends it, or else its idle timeout of 2 s. This holds
on Linux and macOS alike and needs no parent-death signal.

Keys are `shoal/<run>/node` and `shoal/<run>/coordinator/<fingerprint>`, subkeys are peer ids.
Peers neither store nor return a record that isn't its subkey's own, and only the authority can
write under its fingerprint, so a flood of impostors can't hide the coordinator.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.protocol.discovery import (
    CLOCK_SKEW_S,
    MAX_LIFETIME_S,
    MAX_RECORD_BYTES,
    PeerRecord,
    check_published,
    fingerprint_of,
    newest,
    open_record,
    verify_record,
)
from shoal.protocol.discovery_peers import (
    MAX_PEERS_KEPT,
    check_port_free,
    ensure_identity,
    is_dialable,
    listen_multiaddr,
    read_peers,
    split_multiaddr,
    write_peers,
)
from shoal.protocol.errors import CapacityError, ProtocolError, StorageError, UnreachableError
from shoal.protocol.ids import PeerId, RunId

logger = logging.getLogger(__name__)

_IMPORT_AND_START_S = 90.0  # torch from a cold disk
_CONNECT_S = 6.0  # libp2p gives up on a silent address after 5 s
_CALL_S = 15.0
_CLOSE_S = 5.0

T = TypeVar("T")


class DhtDiscovery:
    """`Discovery` on the distributed table. Make one with `await DhtDiscovery.start(...)`."""

    def __init__(self, peer: "_DhtPeer", thread: "_LoopThread") -> None:
        self._peer = peer
        self._thread = thread

    @classmethod
    async def start(
        cls,
        bootstrap: Sequence[str] = (),
        *,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
        identity_path: Path | None = None,
        announce: Sequence[str] = (),
        client_mode: bool = False,
        alone_is_fine: bool = False,
    ) -> "DhtDiscovery":
        """Join the table through any of `bootstrap` (multiaddrs ending in /p2p/<id>).

        `identity_path` is this peer's libp2p key, made if missing; `peers.json` beside it remembers
        peers, which are tried as well at the next start. With no peer to try, a new table begins.
        `listen_port` 0 takes any. `announce` (/ip4/HOST/tcp/PORT) replaces the addresses of the
        local interfaces, for forwarded ports. `client_mode` asks but doesn't answer: for peers
        that nobody can dial. Raises `ConfigError` for a malformed address, `CapacityError` for a
        port in use, `UnreachableError` if peers are known but none answers; not with
        `alone_is_fine`, which goes on alone and tries them again at every later call.
        """
        for address in bootstrap:
            split_multiaddr(address)
        listen = listen_multiaddr(listen_host, listen_port)
        if listen_port:
            check_port_free(listen_host, listen_port)
        peer = _DhtPeer(
            list(bootstrap), listen, list(announce), identity_path, client_mode, alone_is_fine
        )
        thread = _LoopThread()
        discovery = cls(peer, thread)
        try:
            await thread.call(peer.open, deadline_s=_IMPORT_AND_START_S)
        except BaseException:  # also when cancelled: no helper process may stay behind
            await asyncio.shield(discovery.close())
            raise
        return discovery

    async def publish(self, record_bytes: bytes, record: PeerRecord) -> None:
        check_published(record_bytes, record, time.time())
        await self._thread.call(lambda: self._peer.store(record_bytes, record), deadline_s=_CALL_S)

    async def records(self, run_id: RunId) -> list[PeerRecord]:
        found = await self._lookup(f"shoal/{run_id}/node")
        valid = [r for r in found if r.role == "node" and r.run_id == run_id]
        return sorted(valid, key=lambda record: record.peer_id)

    async def coordinator(self, run_id: RunId, fingerprint: bytes) -> PeerRecord | None:
        found = await self._lookup(f"shoal/{run_id}/coordinator/{fingerprint.hex()}", fingerprint)
        return newest(r for r in found if r.role == "coordinator" and r.run_id == run_id)

    def addresses(self) -> list[str]:
        return list(self._peer.addresses)

    async def close(self) -> None:
        await self._thread.stop(self._peer.shutdown)

    async def _lookup(self, key: str, fingerprint: bytes | None = None) -> list[PeerRecord]:
        table = await self._thread.call(lambda: self._peer.lookup(key), deadline_s=_CALL_S)
        records = []
        for peer_id, data in table.items():
            try:
                record = open_record(data, time.time(), fingerprint=fingerprint)
            except ProtocolError as error:
                logger.debug("ignored a record: %s", error)
                continue
            if record.peer_id == peer_id:
                records.append(record)
        return records


def table_key(record: PeerRecord) -> str:
    """The key under which a record is stored."""
    if record.role == "coordinator":
        return f"shoal/{record.run_id}/coordinator/{fingerprint_of(record).hex()}"
    return f"shoal/{record.run_id}/node"


class _LoopThread:
    """A daemon thread with an event loop. Every call from outside has a deadline."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report_unretrieved)
        self._thread = threading.Thread(target=self._run, name="shoal-dht", daemon=True)
        self._stopped = False
        self._thread.start()

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]], *, deadline_s: float) -> T:
        """Run `work()` over there. A cancelled or late caller cancels it."""
        if self._stopped:
            raise UnreachableError("discovery is closed; start a new one")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), deadline_s)
        except TimeoutError as error:
            raise UnreachableError(
                f"the peers' table did not answer within {deadline_s:.0f} s; "
                "check the network, or give another bootstrap address"
            ) from error

    async def stop(self, last_work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._stopped:
            return
        self._stopped = True
        future = asyncio.run_coroutine_threadsafe(last_work(), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), _CLOSE_S + _IMPORT_AND_START_S)
        except Exception:
            logger.warning("discovery did not close cleanly", exc_info=True)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


def _report_unretrieved(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A reader task of hivemind's ends with its helper process, and nobody awaits it.

    Ctrl-C in a terminal reaches the helper as well, often before us.
    """
    if isinstance(context.get("exception"), ConnectionError):
        logger.debug("lost the discovery helper: %r", context["exception"])
    else:
        loop.default_exception_handler(context)


class _DhtPeer:
    """hivemind's side. Every coroutine runs on the `_LoopThread`; untyped, as hivemind is."""

    def __init__(
        self,
        bootstrap: list[str],
        listen: str,
        announce: list[str],
        identity_path: Path | None,
        client_mode: bool,
        alone_is_fine: bool,
    ) -> None:
        self.addresses: list[str] = []
        self._bootstrap = bootstrap
        self._listen = listen
        self._announce = announce
        self._identity_path = identity_path
        self._client_mode = client_mode
        self._alone_is_fine = alone_is_fine
        self._peers_path = None if identity_path is None else identity_path.with_name("peers.json")
        self._remembered = [] if self._peers_path is None else read_peers(self._peers_path)
        self._p2p: Any = None
        self._node: Any = None
        self._opening: asyncio.Task[Any] | None = None

    async def open(self) -> None:
        hivemind = _import_hivemind()
        if self._identity_path is not None:
            ensure_identity(self._identity_path)
        # A task of its own, so that cancelling us can't lose the process.
        self._opening = asyncio.ensure_future(self._start_p2pd(hivemind))
        self._p2p = await asyncio.shield(self._opening)
        # No caches and no shared requests: what this peer answers was looked up now.
        self._node = await hivemind.dht.DHTNode.create(
            p2p=self._p2p,
            client_mode=self._client_mode,
            record_validator=_record_validator(),
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )
        if not self._client_mode:
            self.addresses = [str(address) for address in await self._p2p.get_visible_maddrs()]
        known = self._known_addresses()
        if known and not await self._join(known) and not self._alone_is_fine:
            raise UnreachableError(
                f"none of {len(known)} known discovery peers answers, first {known[0]}; "
                "ask for a fresh join link, or check that outgoing TCP is allowed"
            )
        await self._remember()

    async def _start_p2pd(self, hivemind: Any) -> Any:
        # A parent killed after p2pd's first output but before the control connection leaves p2pd
        # waiting for idle_timeout. So it is short, and long only where that was too short to start.
        for idle_timeout_s in (2.0, 15.0):
            try:
                return await hivemind.p2p.P2P.create(
                    # p2pd would dial bootstrap peers in turn, a minute each; _join dials them.
                    initial_peers=None,
                    host_maddrs=[self._listen],
                    announce_maddrs=self._announce or None,
                    identity_path=None if self._identity_path is None else str(self._identity_path),
                    check_if_identity_free=False,
                    dht_mode="client" if self._client_mode else "server",
                    no_listen=self._client_mode,
                    nat_port_map=False,
                    auto_nat=False,
                    use_relay=False,
                    use_auto_relay=False,
                    idle_timeout=idle_timeout_s,
                )
            except Exception as error:  # hivemind's own, and whatever a closing socket raises
                cause = error
                logger.debug("p2pd did not start: %r", error)
        raise CapacityError(
            f"the discovery helper p2pd did not start at {self._listen}: {cause}; "
            "check that the port is free, or reinstall hivemind"
        )

    async def store(self, data: bytes, record: PeerRecord) -> None:
        await self._rejoin_if_alone()
        key = table_key(record)
        stored = await self._node.store(
            key, data, expiration_time=float(record.expires_s), subkey=str(record.peer_id)
        )
        # False also when one of several peers refused, or already has it: so look.
        if not stored and (await self.lookup(key)).get(record.peer_id) != data:
            raise UnreachableError(
                f"no discovery peer keeps the record of {record.peer_id}; "
                "one that expires later is already published, or no peer is reachable"
            )
        await self._remember()

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        await self._rejoin_if_alone()
        # A search ends at the first answer whose expiration is "sufficient". NaN compares false
        # with everything, so that no single peer can end it with a huge number and an empty table.
        found = await self._node.get_many([key], sufficient_expiration_time=float("nan"))
        item = found[key]
        if item is None or not isinstance(item.value, dict):
            return {}
        return {
            PeerId(subkey): entry.value
            for subkey, entry in item.value.items()
            if isinstance(subkey, str) and isinstance(entry.value, bytes)
        }

    async def shutdown(self) -> None:
        if self._opening is not None and self._p2p is None:
            try:
                self._p2p = await self._opening
            except Exception:
                return  # hivemind has ended the process itself
        if self._p2p is None:
            return
        child = self._p2p._child
        try:
            async with asyncio.timeout(_CLOSE_S / 2):
                await self._remember()
                await self._p2p.shutdown()
        except (TimeoutError, OSError) as error:
            logger.debug("p2pd did not end in time: %r", error)
        finally:
            if child is not None and child.returncode is None:
                child.kill()
                await child.wait()

    def _known_addresses(self) -> list[str]:
        own = set(self.addresses)
        return [a for a in dict.fromkeys([*self._bootstrap, *self._remembered]) if a not in own]

    async def _join(self, addresses: list[str]) -> bool:
        """Dial all at once; true as soon as one answers, the others go on behind."""
        pending = {asyncio.create_task(self._greet(address)) for address in addresses}
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() for task in done):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CONNECT_S):
                        await self._node.find_nearest_nodes([self._node.node_id])
                return True
        return False

    async def _greet(self, address: str) -> bool:
        hivemind = _import_hivemind()
        base, libp2p_id = split_multiaddr(address)
        peer_id = hivemind.p2p.PeerID.from_base58(libp2p_id)
        multiaddr = hivemind.utils.multiaddr.Multiaddr(base)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._p2p._client.connect(peer_id, [multiaddr])
                answer = await self._node.protocol.call_ping(peer_id, validate=True, strict=False)
        except Exception as error:  # a dead or hostile address is an ordinary event
            logger.debug("discovery peer %s does not answer: %r", address, error)
            return False
        return answer is not None

    async def _rejoin_if_alone(self) -> None:
        if await self._p2p.list_peers():
            return
        known = self._known_addresses()
        if known and not await self._join(known):
            logger.debug("no discovery peer answers; going on alone")

    async def _remember(self) -> None:
        """Keep the addresses of the peers that we are connected to, newest first."""
        if self._peers_path is None:
            return
        seen = []
        for info in await self._p2p.list_peers():
            seen += [f"{address}/p2p/{info.peer_id.to_base58()}" for address in info.addrs]
        merged = list(dict.fromkeys([*filter(is_dialable, seen), *self._remembered]))
        merged = merged[:MAX_PEERS_KEPT]
        if merged != self._remembered:
            self._remembered = merged
            try:
                write_peers(self._peers_path, merged)
            except StorageError as error:
                logger.warning("cannot remember discovery peers: %s", error)


def _is_rightful(key: bytes, subkey: bytes, value: bytes, expires_s: float) -> bool:
    """Whether a table entry is a valid record of the peer that its subkey names, in its place.

    Not checked: whether it has expired. The table drops such entries itself, and one refused entry
    makes hivemind refuse the whole answer, so clocks that differ a little must not matter.
    """
    hivemind = _import_hivemind()
    dumps = hivemind.utils.MSGPackSerializer.dumps
    if len(value) > MAX_RECORD_BYTES + 8 or len(subkey) > 64:
        return False
    try:
        data = hivemind.utils.MSGPackSerializer.loads(value)
        record = verify_record(data) if isinstance(data, bytes) else None
    except Exception:  # msgpack's and our own: a stranger's bytes are wrong in many ways
        return False
    return (
        record is not None
        and subkey == dumps(str(record.peer_id))
        and value == dumps(data)
        and expires_s == record.expires_s
        and expires_s <= time.time() + MAX_LIFETIME_S + CLOCK_SKEW_S
        and key == hivemind.dht.routing.DHTID.generate(table_key(record)).to_bytes()
    )


def _record_validator() -> Any:
    hivemind = _import_hivemind()

    base: Any = hivemind.dht.crypto.RecordValidatorBase

    class SignedRecordValidator(base):  # type: ignore[misc]  # hivemind has no types
        def validate(self, record: Any) -> bool:
            return _is_rightful(record.key, record.subkey, record.value, record.expiration_time)

    return SignedRecordValidator()


def _is_news(record: logging.LogRecord) -> bool:
    """p2pd calls it an error that its listener is closed, each time that it is told to end."""
    return "use of closed network connection" not in record.getMessage()


def _import_hivemind() -> Any:
    """hivemind with its logging undone: no handler of its own, no renamed level, warnings only."""
    import hivemind
    import hivemind.dht.crypto
    import hivemind.dht.routing
    import hivemind.utils.multiaddr
    from hivemind.utils.logging import use_hivemind_log_handler

    hivemind_logger = logging.getLogger("hivemind")
    if hivemind_logger.level != logging.WARNING:
        use_hivemind_log_handler("nowhere")
        hivemind_logger.setLevel(logging.WARNING)
        logging.addLevelName(logging.WARNING, "WARNING")
        logging.getLogger("hivemind.p2p.p2p_daemon").addFilter(_is_news)
    return hivemind
