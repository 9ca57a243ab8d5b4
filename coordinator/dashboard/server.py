# SPDX-License-Identifier: Apache-2.0
"""Serves the dashboard inside the coordinator's event loop."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from shoal.protocol.errors import CapacityError, ConfigError

logger = logging.getLogger(__name__)

GRACE_S = 3


class _Server(uvicorn.Server):
    """uvicorn, without its own signal handlers, that ends event streams before it waits for
    connections to close."""

    def __init__(self, config: uvicorn.Config, closing: asyncio.Event) -> None:
        super().__init__(config)
        self._closing = closing

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._closing.set()
        await super().shutdown(sockets)


async def serve(app: FastAPI, host: str, port: int) -> tuple[asyncio.Task[None], int]:
    """Serve `app` (of `create_app`) until the returned task is cancelled; returns the task and
    the port, which port 0 lets the system choose. Connections queue from the moment of return.

    Raises `CapacityError` when the port is taken, `ConfigError` when the host isn't this
    machine's."""
    listener = _listen(host, port)
    bound: int = listener.getsockname()[1]
    app.state.allowed_hosts.add(host.lower())
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        limit_concurrency=256,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
    )
    server = _Server(config, app.state.closing)
    return asyncio.create_task(_run(server, listener), name="dashboard"), bound


async def _run(server: _Server, listener: socket.socket) -> None:
    inner = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(inner)
    except asyncio.CancelledError:
        server.should_exit = True
        await inner
        raise
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"dashboard host = {host!r}: {error}. Use an address of this machine, or 127.0.0.1."
        ) from None
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"dashboard host = {host!r} is not an address of this machine. Use 127.0.0.1."
            ) from None
        raise CapacityError(
            f"dashboard port {port} on {host}: {error.strerror}. "
            "Choose another one, or 0 for any free one."
        ) from None
    return listener
