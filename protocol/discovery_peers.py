# SPDX-License-Identifier: Apache-2.0
"""What a discovery peer keeps on disk, and the multiaddrs it dials: its libp2p key, its peers.

`peers.json` is a list of multiaddrs, the most recently seen first. Losing or damaging it costs
nothing but the way back in without a join link.
"""

import ipaddress
import json
import socket
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.protocol.atomic_file import AtomicFile
from shoal.protocol.errors import CapacityError, ConfigError
from shoal.protocol.identity import load_or_create_secret

MAX_PEERS_KEPT = 32
_MAX_MULTIADDR_CHARS = 256
_MAX_PEERS_FILE_BYTES = 64 * 1024


def listen_multiaddr(host: str, port: int) -> str:
    """`/ip4/…/tcp/…` or `/ip6/…/tcp/…` of a literal address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(
            f"discovery listen_host {host!r} is no IP address; use 0.0.0.0 for all interfaces"
        ) from error
    return f"/ip{address.version}/{address}/tcp/{port}"


def check_port_free(host: str, port: int) -> None:
    """Raise `CapacityError` if somebody listens there.

    libp2p itself wouldn't notice: it shares ports (SO_REUSEPORT), and two peers on one port get
    each other's connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a closed port lingers
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CapacityError(
                f"discovery can't listen on {host} port {port}: {error.strerror}; "
                "stop the other program or choose another port"
            ) from error


def read_peers(path: Path) -> list[str]:
    """The remembered multiaddrs; what can't be read or dialled is left out."""
    try:
        if path.stat().st_size > _MAX_PEERS_FILE_BYTES:
            return []
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    if not isinstance(entries, list):
        return []
    return [e for e in entries if isinstance(e, str) and is_dialable(e)][:MAX_PEERS_KEPT]


def write_peers(path: Path, addresses: list[str]) -> None:
    """Replace the remembered multiaddrs. Raises `StorageError`; the old file stays then."""
    with AtomicFile(path) as file:
        file.write(json.dumps(addresses, indent=1).encode())


def split_multiaddr(address: str) -> tuple[str, str]:
    """(transport part, libp2p id). Raises `ConfigError` for anything but ip or dns over tcp."""
    parts = address.split("/")
    if (
        len(address) > _MAX_MULTIADDR_CHARS
        or not address.isascii()
        or len(parts) != 7
        or parts[0] != ""
        or parts[1] not in ("ip4", "ip6", "dns", "dns4", "dns6")
        or not parts[2]
        or parts[3] != "tcp"
        or not parts[4].isdigit()
        or parts[5] != "p2p"
        or not parts[6].isalnum()
    ):
        raise ConfigError(
            f"discovery address {address[:80]!r} is not of the form /ip4/HOST/tcp/PORT/p2p/ID; "
            "copy it from the join link"
        )
    return "/".join(parts[:5]), parts[6]


def is_dialable(address: str) -> bool:
    try:
        split_multiaddr(address)
    except ConfigError:
        return False
    return True


def ensure_identity(path: Path) -> None:
    """A libp2p Ed25519 key file: protobuf PrivateKey{type: Ed25519, data: seed + public key}."""
    if path.exists():
        return
    key = Ed25519PrivateKey.generate()
    raw = key.private_bytes_raw() + key.public_key().public_bytes_raw()
    load_or_create_secret(path, lambda: b"\x08\x01\x12\x40" + raw)
