# SPDX-License-Identifier: Apache-2.0
"""Discovery over the distributed table, between real processes that end in several ways.

This file is also the peers' program: run as a script, it answers one JSON command per line.
"""

import asyncio
import datetime
import hashlib
import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from shoal.protocol.authority import Authority
from shoal.protocol.discovery import PeerRecord, coordinator_record, node_record, sign_record
from shoal.protocol.discovery_dht import DhtDiscovery
from shoal.protocol.errors import ConfigError, ShoalError
from shoal.protocol.ids import RunId, Stage

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(150)]

RUN = RunId("tiny-0a1b2c3d")
HELPER_GONE_S = 3.0


def key_of(seed: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def node_of(seed: int, address: str, now_s: float) -> PeerRecord:
    return node_record(
        run_id=RUN,
        public_key=key_of(seed).public_key().public_bytes_raw(),
        address=address,
        stage=Stage(0),
        protocol_version=1,
        now_s=now_s,
    )


def authority_certificate(seed: int) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "run authority")])
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key_of(seed).public_key(), 1)
    builder = builder.not_valid_before(start).not_valid_after(start + datetime.timedelta(3650))
    return builder.sign(key_of(seed), None).public_bytes(Encoding.DER)


def authority_of(seed: int) -> Authority:
    certificate = x509.load_der_x509_certificate(authority_certificate(seed))
    return Authority(key_of(seed), certificate)


# ---- the peer's side ---------------------------------------------------------------------


async def answer(discovery: DhtDiscovery, command: dict[str, Any]) -> dict[str, Any]:
    do, now_s = command["do"], time.time()
    if do == "publish":
        record = node_of(command["seed"], command["address"], now_s)
        await discovery.publish(sign_record(record, key_of(command["seed"]).sign), record)
        return {"ok": True}
    if do == "publish_coordinator":
        record = coordinator_record(
            run_id=RUN,
            authority_der=authority_certificate(command["seed"]),
            address=command["address"],
            protocol_version=1,
            now_s=now_s,
        )
        await discovery.publish(sign_record(record, authority_of(command["seed"]).sign), record)
        return {"ok": True}
    if do == "records":
        return {"addresses": sorted(record.address for record in await discovery.records(RUN))}
    if do == "coordinator":
        fingerprint = hashlib.sha256(authority_certificate(command["seed"])).digest()
        found = await discovery.coordinator(RUN, fingerprint)
        return {"address": None if found is None else found.address}
    if do == "forge":
        return await forge(discovery, **command["as"])
    if do == "logging":
        hivemind_logger = logging.getLogger("hivemind")
        return {
            "warning": logging.getLevelName(logging.WARNING),
            "handlers": len(hivemind_logger.handlers) + len(logging.getLogger().handlers),
            "level": hivemind_logger.level,
        }
    if do == "close":
        await discovery.close()
        await discovery.close()
        return {"threads": [t.name for t in threading.enumerate()]}
    raise AssertionError(do)


async def forge(discovery: DhtDiscovery, *, victim: int, seed: int, hide: bool) -> dict[str, Any]:
    """A modified peer: puts its record in the victim's place, at home and at all others'.

    Its own table claims to be valid for ever, so that a trusting reader would stop searching there.
    With `hide` it is also empty, so that there is nothing to refuse.
    """
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils import MSGPackSerializer

    victim_id = str(node_of(victim, "203.0.113.1:1", 0.0).peer_id)
    record = node_of(seed, "203.0.113.66:66", time.time() + 30)
    data = MSGPackSerializer.dumps(sign_record(record, key_of(seed).sign))
    node, key = discovery._peer._node, DHTID.generate(f"shoal/{RUN}/node")

    async def work() -> dict[str, Any]:
        table = DictionaryDHTValue()
        if not hide:
            table.store(victim_id, data, record.expires_s)
        del node.protocol.storage[key]
        node.protocol.storage.store(key, table, float("inf"))
        accepted: list[bool] = []
        for other in list(node.protocol.routing_table.peer_id_to_uid):
            stored = await node.protocol.call_store(
                other, [key], [data], record.expires_s, subkeys=[victim_id]
            )
            accepted += stored or []
        return {"accepted": accepted}

    return await discovery._thread.call(work, deadline_s=10.0)


async def serve(options: dict[str, Any]) -> None:
    path = options["identity_path"]
    try:
        discovery = await DhtDiscovery.start(
            options["bootstrap"],
            identity_path=None if path is None else Path(path),
            client_mode=options["client_mode"],
        )
    except ShoalError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        return
    print(json.dumps({"addresses": discovery.addresses()}), flush=True)
    commands = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(commands)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await commands.readline():
        print(json.dumps(await answer(discovery, json.loads(line))), flush=True)


# ---- the test's side ---------------------------------------------------------------------


class Peer:
    """A process with a `DhtDiscovery`; use `ready()` before anything else."""

    def __init__(
        self,
        *bootstrap: str,
        identity_path: Path | None = None,
        client_mode: bool = False,
    ) -> None:
        options = {
            "bootstrap": bootstrap,
            "identity_path": None if identity_path is None else str(identity_path),
            "client_mode": client_mode,
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by dispose
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.first: dict[str, Any] = {}
        self.helpers: list[psutil.Process] = []

    def ready(self) -> "Peer":
        self.first = self._read()
        if "addresses" in self.first:
            self.helpers = psutil.Process(self.process.pid).children(recursive=True)
        return self

    @property
    def address(self) -> str:
        return str(self.first["addresses"][0])

    @property
    def stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def do(self, name: str, **arguments: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def end(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait(20)

    def dispose(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the peer ended: {self.stderr[-3000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone(processes: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + HELPER_GONE_S
    while time.monotonic() < deadline:
        if all(is_gone(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


class Swarm:
    """Keeps every peer it starts, so that none outlives the test."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    def start(self, *bootstrap: str, **options: Any) -> Peer:
        self.peers.append(Peer(*bootstrap, **options))
        return self.peers[-1]


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    swarm = Swarm()
    yield swarm
    helpers = [helper for peer in swarm.peers for helper in peer.helpers]
    for peer in swarm.peers:
        peer.dispose()
    assert all_gone(helpers)


def test_peers_find_each_other_and_survive_their_bootstrap(swarm: Swarm, tmp_path: Path) -> None:
    first = swarm.start().ready()
    second = swarm.start(first.address)
    third = swarm.start(first.address, identity_path=tmp_path / "third" / "libp2p.key")
    second.ready()
    third.ready()

    first.do("publish", seed=1, address="203.0.113.1:1")
    second.do("publish", seed=2, address="203.0.113.2:2")
    first.do("publish_coordinator", seed=9, address="203.0.113.9:9")
    assert third.do("records")["addresses"] == ["203.0.113.1:1", "203.0.113.2:2"]
    assert third.do("coordinator", seed=9)["address"] == "203.0.113.9:9"
    assert third.do("coordinator", seed=8)["address"] is None

    # hivemind's logging does not leak into ours.
    assert third.do("logging") == {"warning": "WARNING", "handlers": 0, "level": logging.WARNING}

    first.end(signal.SIGKILL)
    assert len(first.helpers) == 1
    assert all_gone(first.helpers)

    third.do("publish", seed=3, address="203.0.113.3:3")
    second.do("publish_coordinator", seed=9, address="198.51.100.9:9")
    expected = ["203.0.113.1:1", "203.0.113.2:2", "203.0.113.3:3"]
    assert second.do("records")["addresses"] == expected
    assert third.do("coordinator", seed=9)["address"] == "198.51.100.9:9"

    # The dead one first, a silent one next: the live one still gets us in. A peer that knows only
    # the dead one is told so. The third comes back by itself, from the peers that it remembers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{first.address.split('/')[-1]}"
        newcomer = swarm.start(first.address, mute, second.address, client_mode=True)
        stranded = swarm.start(first.address)
        third.end(signal.SIGINT)
        assert all_gone(third.helpers)
        back = swarm.start(identity_path=tmp_path / "third" / "libp2p.key")
        assert newcomer.ready().do("records")["addresses"] == expected
        assert newcomer.do("coordinator", seed=9)["address"] == "198.51.100.9:9"
    assert stranded.ready().first["error"] == "UnreachableError"
    assert back.ready().do("records")["addresses"] == expected
    assert back.address.split("/")[-1] == third.address.split("/")[-1]

    second.end(signal.SIGTERM)
    assert all_gone(second.helpers)
    assert "shoal-dht" not in back.do("close")["threads"]
    assert all_gone(back.helpers)
    assert [peer.stderr for peer in (first, second, newcomer, stranded, back)] == [""] * 5


def test_forged_record_is_neither_kept_nor_returned(swarm: Swarm) -> None:
    honest = swarm.start().ready()
    forger = swarm.start(honest.address)
    reader = swarm.start(honest.address, client_mode=True)
    forger.ready()
    reader.ready()
    honest.do("publish", seed=1, address="203.0.113.1:1")

    for hide in (False, True):
        accepted = forger.do("forge", **{"as": {"victim": 1, "seed": 6, "hide": hide}})["accepted"]
        assert accepted
        assert not any(accepted)
        # A client keeps nothing itself: each of its lookups asks both, in parallel.
        for _ in range(5):
            assert reader.do("records")["addresses"] == ["203.0.113.1:1"]
        assert honest.do("records")["addresses"] == ["203.0.113.1:1"]


async def test_malformed_addresses_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="join link"):
        await DhtDiscovery.start(["127.0.0.1:4001"])
    with pytest.raises(ConfigError, match="listen_host"):
        await DhtDiscovery.start(listen_host="localhost")


if __name__ == "__main__":
    # A shell that starts the tests in the background has them ignore it, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(serve(json.loads(sys.argv[1])))
