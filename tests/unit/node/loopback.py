# SPDX-License-Identifier: Apache-2.0
"""Peers of one run on loopback, with real mutual TLS."""

import time
from pathlib import Path

import grpc
import grpc.aio

from shoal.protocol.authority import Authority
from shoal.protocol.identity import TlsKey
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import peer_pb2_grpc, types_pb2
from shoal.protocol.rpc import Credentials, create_server, serve_secure
from shoal.protocol.wire import add_peer_servicer


class Loopback:
    """One run's authority, and the servers that were started under it."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority.load_or_create(folder)
        self._servers: list[grpc.aio.Server] = []

    def credentials(self, peer_id: PeerId) -> Credentials:
        key = TlsKey.generate()
        leaf, _ = self._authority.issue_leaf(key.spki_der, peer_id, 3600, time.time())
        return Credentials(
            private_key_pem=key.private_pem,
            leaf_pem=leaf,
            authority_pem=self._authority.certificate_pem,
        )

    async def serve(
        self, servicer: peer_pb2_grpc.PeerServicer, peer_id: PeerId, *, port: int = 0
    ) -> tuple[grpc.aio.Server, int]:
        """A started server and its port."""
        server = create_server()
        add_peer_servicer(servicer, server)
        credentials = self.credentials(peer_id).server_credentials()
        port = serve_secure(server, f"127.0.0.1:{port}", credentials)
        await server.start()
        self._servers.append(server)
        return server, port

    async def close(self) -> None:
        for server in self._servers:
            await server.stop(None)


def member(incarnation: int, peer_id: PeerId, *, port: int = 1, stage: int = 0) -> types_pb2.Member:
    return types_pb2.Member(
        incarnation=incarnation,
        peer_id=peer_id,
        name=f"node-{incarnation}",
        address=f"127.0.0.1:{port}",
        stage=stage,
    )
