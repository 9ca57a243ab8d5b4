# SPDX-License-Identifier: Apache-2.0
"""A process that has ended refuses connections; one that lives, or can't be reached, doesn't."""

import asyncio
import socket

from shoal.coordinator.probe import refuses


async def test_an_address_where_somebody_listens_refuses_nothing() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert not await refuses(f"127.0.0.1:{port}")


async def test_an_address_where_nobody_listens_any_more_refuses() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert await refuses(f"127.0.0.1:{held.getsockname()[1]}")


async def test_what_is_no_address_says_nothing() -> None:
    assert not await refuses("unix:/tmp/x")
    assert not await refuses("")
    assert not await refuses("no..host:80")
