# SPDX-License-Identifier: Apache-2.0
"""The peers file and the multiaddrs in it."""

import json
import socket
from pathlib import Path

import pytest

from shoal.protocol.discovery_peers import (
    MAX_PEERS_KEPT,
    check_port_free,
    ensure_identity,
    listen_multiaddr,
    read_peers,
    split_multiaddr,
    write_peers,
)
from shoal.protocol.errors import CapacityError, ConfigError


def test_damaged_peers_file_is_read_as_far_as_it_makes_sense(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    good = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWabc"
    assert read_peers(path) == []
    path.write_text('["/ip4/127.0.')
    assert read_peers(path) == []
    path.write_text(json.dumps([good, 7, "/unix/tmp/x", "-flag", good * 9]))
    assert read_peers(path) == [good]
    path.write_text(json.dumps([f"{good}{i}" for i in range(100)]))
    assert len(read_peers(path)) == MAX_PEERS_KEPT


def test_peers_written_are_read_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    addresses = ["/ip4/127.0.0.1/tcp/1/p2p/abc", "/ip6/::1/tcp/2/p2p/def"]
    write_peers(tmp_path / "peers.json", addresses)
    assert read_peers(tmp_path / "peers.json") == addresses
    assert [path.name for path in tmp_path.iterdir()] == ["peers.json"]


def test_identity_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "libp2p.key"
    ensure_identity(path)
    first = path.read_bytes()
    ensure_identity(path)
    assert path.read_bytes() == first
    assert len(first) == 68
    assert path.stat().st_mode & 0o077 == 0


def test_listen_addresses_are_literal() -> None:
    assert listen_multiaddr("0.0.0.0", 4001) == "/ip4/0.0.0.0/tcp/4001"
    assert listen_multiaddr("::", 0) == "/ip6/::/tcp/0"
    with pytest.raises(ConfigError, match="localhost"):
        listen_multiaddr("localhost", 0)


def test_port_that_another_peer_shares_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        with pytest.raises(CapacityError, match="another port"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", port)


def test_multiaddr_is_split_into_transport_and_peer() -> None:
    assert split_multiaddr("/dns4/a.example/tcp/1/p2p/Qm1") == ("/dns4/a.example/tcp/1", "Qm1")
    for wrong in ("", "127.0.0.1:1", "/ip4/127.0.0.1/udp/1/p2p/Qm1", "/ip4/127.0.0.1/tcp/1"):
        with pytest.raises(ConfigError):
            split_multiaddr(wrong)
