# SPDX-License-Identifier: Apache-2.0
"""Where a coordinator is found: its join link, live.json, and its record in discovery."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.coordinator import standby_link
from shoal.coordinator.run_folder import Live, write_file, write_live
from shoal.protocol.authority import Authority, TokenRole
from shoal.protocol.discovery import (
    DISCOVERY_CAPABILITY,
    SESSION_CAPABILITY,
    Discovery,
    coordinator_record,
    sign_record,
)
from shoal.protocol.errors import ShoalError
from shoal.protocol.ids import RunId
from shoal.protocol.join_link import JoinLink
from shoal.version import PROTOCOL_VERSION

log = logging.getLogger(__name__)

LINK_LIFETIME_S = 7 * 24 * 3600

_PUBLISH_S = 60.0
_EARLY_PUBLISH_S = 3.0
_MAX_PEERS = 8
_LINK_PEERS = 3


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of the two gRPC ports, and the dashboard's URL."""

    admission: str
    session: str
    dashboard: str


class Presence:
    def __init__(
        self,
        run_id: RunId,
        authority: Authority,
        discovery: Discovery | None,
        *,
        folder: Path,
        link_file: Path | None,
        said_by_nodes: Callable[[], Sequence[str]],
    ) -> None:
        """`said_by_nodes` gives the discovery addresses that attached nodes told."""
        self._run_id = run_id
        self._authority = authority
        self._discovery = discovery
        self._folder = folder
        self._link_file = link_file
        self._said_by_nodes = said_by_nodes
        self._node_peers: tuple[str, ...] = ()
        self._at: Addresses | None = None

    @property
    def at(self) -> Addresses:
        assert self._at is not None, "announced once the ports are bound"
        return self._at

    def announce(self, addresses: Addresses) -> None:
        """Write live.json and the link file. Raises `StorageError`."""
        self._at = addresses
        live = Live(
            run_id=self._run_id,
            pid=os.getpid(),
            dashboard=addresses.dashboard,
            admission=addresses.admission,
            session=addresses.session,
            link=str(self.link()),
            discovery_port=_port_of(self._discovery),
            folder=str(self._folder.absolute()),
        )
        write_live(self._folder, live)
        standby_link.write(self._folder, self.link("standby"))
        if self._link_file is not None:
            write_file(self._link_file, live.link.encode() + b"\n")

    def discovery_addresses(self) -> list[str]:
        """This coordinator's discovery peer and a few nodes', so that no single one is needed."""
        own = self._discovery.addresses() if self._discovery else []
        found = dict.fromkeys([*own[:1], *self._node_peers, *self._said_by_nodes()])
        return [address for address in found if address][:_MAX_PEERS]

    def link(self, role: TokenRole = "join") -> JoinLink:
        """A fresh link. A standby's carries a token of its own kind: write it to nowhere else."""
        expires_s = int(time.time()) + LINK_LIFETIME_S
        return JoinLink(
            addresses=(self.at.admission,),
            run_id=self._run_id,
            fingerprint=self._authority.fingerprint,
            token=self._authority.issue_token(self._run_id, expires_s, role),
            expires_s=expires_s,
            discovery=tuple(self.discovery_addresses()[:_LINK_PEERS]),
        )

    async def keep_published(self) -> None:
        """Be found; and learn nodes' discovery addresses, for links that outlive this address."""
        discovery = self._discovery
        if discovery is None:
            return
        while True:
            record = coordinator_record(
                run_id=self._run_id,
                authority_der=self._authority.certificate_der,
                address=self.at.admission,
                protocol_version=PROTOCOL_VERSION,
                now_s=time.time(),
                capabilities={SESSION_CAPABILITY: self.at.session},
            )
            try:
                await discovery.publish(sign_record(record, self._authority.sign), record)
                await self._learn_peers(discovery)
            except (ShoalError, TimeoutError, OSError) as error:
                log.info("discovery: %s", error)
            alone = len(self._node_peers) < _LINK_PEERS - 1
            await asyncio.sleep(_EARLY_PUBLISH_S if alone else _PUBLISH_S)

    async def _learn_peers(self, discovery: Discovery) -> None:
        records = await discovery.records(self._run_id)
        newest = sorted(records, key=lambda record: record.issued_s, reverse=True)
        found = (record.capabilities.get(DISCOVERY_CAPABILITY) for record in newest)
        peers = tuple(dict.fromkeys(address for address in found if address))[: _MAX_PEERS - 1]
        if set(peers) != set(self._node_peers):
            self._node_peers = peers
            self.announce(self.at)


def _port_of(discovery: Discovery | None) -> int:
    """Of /ip4/HOST/tcp/PORT/p2p/ID; 0 when there is none."""
    for address in discovery.addresses() if discovery else ():
        parts = address.split("/")
        if len(parts) > 4 and parts[4].isdecimal():
            return int(parts[4])
    return 0
