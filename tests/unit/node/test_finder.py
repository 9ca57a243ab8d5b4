# SPDX-License-Identifier: Apache-2.0
"""What a node publishes of itself, and how it finds a coordinator."""

import asyncio
import time
from pathlib import Path

import pytest

from shoal.node.finder import Finder
from shoal.protocol.authority import Authority
from shoal.protocol.discovery import (
    DISCOVERY_CAPABILITY,
    SESSION_CAPABILITY,
    InMemoryDiscovery,
    coordinator_record,
    sign_record,
)
from shoal.protocol.identity import NodeIdentity
from shoal.protocol.ids import RunId
from shoal.protocol.join_link import JoinLink

RUN = RunId("run-00000000")


class Table(InMemoryDiscovery):
    """Tells when something is published."""

    def __init__(self) -> None:
        super().__init__()
        self.published = asyncio.Event()

    async def publish(self, record_bytes: bytes, record: object) -> None:
        await super().publish(record_bytes, record)  # type: ignore[arg-type]
        self.published.set()

    def addresses(self) -> list[str]:
        return ["/ip4/127.0.0.1/tcp/4001/p2p/abc"]

    async def once(self) -> None:
        await self.published.wait()
        self.published.clear()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.load_or_create(tmp_path / "keys")


def make_finder(folder: Path, authority: Authority, table: InMemoryDiscovery) -> Finder:
    link = JoinLink(
        addresses=("127.0.0.1:1",), run_id=RUN, fingerprint=authority.fingerprint, token="t",
        expires_s=0,
    )  # fmt: skip
    finder = Finder(
        NodeIdentity.load_or_create(folder), link, folder=folder, host="127.0.0.1", enabled=True
    )
    finder._discovery = table
    return finder


async def test_a_new_stage_is_published_at_once(tmp_path: Path, authority: Authority) -> None:
    table = Table()
    finder = make_finder(tmp_path / "node", authority, table)
    stage: list[int | None] = [None]
    announcing = asyncio.create_task(finder.announce(RUN, "127.0.0.1:7", lambda: stage[0], ()))
    await table.once()
    (record,) = await table.records(RUN)
    assert record.stage is None
    assert record.capabilities == {DISCOVERY_CAPABILITY: table.addresses()[0]}
    stage[0] = 3
    finder.changed()
    await table.once()
    (record,) = await table.records(RUN)
    assert (record.stage, record.address) == (3, "127.0.0.1:7")
    announcing.cancel()


async def test_the_coordinators_record_gives_both_addresses(
    tmp_path: Path, authority: Authority
) -> None:
    table = Table()
    finder = make_finder(tmp_path / "node", authority, table)
    assert await finder.admission_addresses() == []
    record = coordinator_record(
        run_id=RUN, authority_der=authority.certificate_der, address="127.0.0.1:8",
        protocol_version=1, now_s=time.time(), capabilities={SESSION_CAPABILITY: "127.0.0.1:9"},
    )  # fmt: skip
    await table.publish(sign_record(record, authority.sign), record)
    assert await finder.admission_addresses() == ["127.0.0.1:8"]
    assert await finder.session_addresses() == ["127.0.0.1:9"]
