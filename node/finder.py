# SPDX-License-Identifier: Apache-2.0
"""A node's part in discovery: announces itself, and finds a coordinator that moved.

The DHT adapter imports a heavy library; it starts when first needed, or once the node is busy.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.protocol.discovery import (
    DISCOVERY_CAPABILITY,
    SESSION_CAPABILITY,
    Discovery,
    PeerRecord,
    node_record,
    sign_record,
)
from shoal.protocol.errors import ShoalError
from shoal.protocol.identity import NodeIdentity
from shoal.protocol.ids import RunId, Stage
from shoal.protocol.join_link import JoinLink
from shoal.version import PROTOCOL_VERSION

log = logging.getLogger(__name__)

_REFRESH_S = 60.0
_EARLY_REFRESH_S = 3.0
_LEAST_PEERS = 2


class Finder:
    def __init__(
        self, identity: NodeIdentity, link: JoinLink, *, folder: Path, host: str, enabled: bool
    ) -> None:
        self._identity = identity
        self._link = link
        self._folder = folder
        self._host = host
        self._enabled = enabled
        self._bootstrap: tuple[str, ...] = link.discovery
        self._discovery: Discovery | None = None
        self._starting = asyncio.Lock()
        self._changed = asyncio.Event()
        self.num_discovered = 0

    def addresses(self) -> list[str]:
        return self._discovery.addresses() if self._discovery else []

    def changed(self) -> None:
        """What `announce` publishes is another stage now."""
        self._changed.set()

    async def announce(
        self,
        run_id: RunId,
        address: str,
        stage: Callable[[], int | None],
        bootstrap: Sequence[str],
    ) -> None:
        """Publish this node's record again and again, and count whom the DHT knows."""
        self._bootstrap = tuple(dict.fromkeys((*self._bootstrap, *bootstrap)))
        while self._enabled:
            self._changed.clear()
            try:
                discovery = await self._started()
                if discovery is None:
                    return
                await self._publish(discovery, run_id, address, stage())
                self.num_discovered = len(await discovery.records(run_id))
            except (ShoalError, TimeoutError, OSError) as error:
                log.info("discovery: %s", error)
            # Early on others come up too; later nothing changes quickly.
            pause_s = _EARLY_REFRESH_S if self.num_discovered < _LEAST_PEERS else _REFRESH_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    async def _publish(
        self, discovery: Discovery, run_id: RunId, address: str, stage: int | None
    ) -> None:
        own = discovery.addresses()[:1]
        record = node_record(
            run_id=run_id,
            public_key=self._identity.public_bytes,
            address=address,
            stage=None if stage is None else Stage(stage),
            protocol_version=PROTOCOL_VERSION,
            now_s=time.time(),
            capabilities={DISCOVERY_CAPABILITY: own[0]} if own else None,
        )
        await discovery.publish(sign_record(record, self._identity.sign), record)

    async def admission_addresses(self) -> list[str]:
        record = await self._coordinator()
        return [record.address] if record else []

    async def session_addresses(self) -> list[str]:
        record = await self._coordinator()
        session = record.capabilities.get(SESSION_CAPABILITY) if record else None
        return [session] if session else []

    async def close(self) -> None:
        async with self._starting:
            discovery, self._discovery, self._enabled = self._discovery, None, False
        if discovery is not None:
            await discovery.close()

    async def _coordinator(self) -> PeerRecord | None:
        try:
            discovery = await self._started()
            if discovery is None:
                return None
            fingerprint = bytes.fromhex(self._link.fingerprint)
            return await discovery.coordinator(self._link.run_id, fingerprint)
        except (ShoalError, TimeoutError, OSError) as error:
            log.info("discovery: %s", error)
            return None

    async def _started(self) -> Discovery | None:
        async with self._starting:
            if self._discovery is None and self._enabled:
                from shoal.protocol.discovery_dht import DhtDiscovery

                self._discovery = await DhtDiscovery.start(
                    self._bootstrap,
                    listen_host=self._host,
                    identity_path=self._folder / "discovery" / "libp2p.key",
                    alone_is_fine=True,
                )
            return self._discovery
