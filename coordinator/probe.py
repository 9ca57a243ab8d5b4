# SPDX-License-Identifier: Apache-2.0
"""Tells a dead process from a broken connection, so that nobody waits for who can't come back.

A killed node and one whose network broke look alike: the session ends. But a living one listens at
its address. Where the connection is refused, its process has ended.
"""

import asyncio

from shoal.coordinator.conductor import Conductor
from shoal.protocol.join_link import split_address

_ROUND_S = 0.2
_CONNECT_S = 1.0


async def watch_missing(conductor: Conductor) -> None:
    """Ask after the last holders of lost stages while the run waits for them."""
    while not conductor.ended:
        missing = conductor.missing_holders()
        refused = await asyncio.gather(*(refuses(address) for address in missing.values()))
        for peer_id, is_refused in zip(missing, refused, strict=True):
            if is_refused:
                conductor.process_gone(peer_id)
        await asyncio.sleep(_ROUND_S)


async def refuses(address: str) -> bool:
    """Whether the machine answers that nobody listens there. No answer says nothing."""
    try:
        host, port = split_address(address)
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return False
