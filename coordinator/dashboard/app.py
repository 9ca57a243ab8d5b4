# SPDX-License-Identifier: Apache-2.0
"""The run's HTTP side: page, JSON, event stream, metrics, and the operator's few levers.

Reading needs no secret but a local-looking `Host`; changing anything needs the operator token. No
route reads a request body. The page gets its data from the same routes as everybody else.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from importlib import resources
from typing import Annotated, Any, Protocol

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from shoal.coordinator.dashboard.guard import Guard
from shoal.coordinator.dashboard.metrics import exposition, new_registry
from shoal.coordinator.dashboard.server import serve
from shoal.coordinator.dashboard.views import RunView, bounded, public, update_after
from shoal.protocol.errors import ShoalError
from shoal.protocol.ids import PeerId
from shoal.version import __version__

__all__ = ["ViewSource", "create_app", "serve", "stream_views"]

UPDATE_INTERVAL_S = 0.2
HEARTBEAT_S = 10.0
MAX_VIEWERS = 64


class ViewSource(Protocol):
    """What the coordinator gives to look at and to operate. All on the app's event loop."""

    def view(self) -> RunView:
        """The run now. Called at most five times a second for each viewer."""

    async def changed(self, after_version: int) -> int:
        """The current version, as soon as it is above `after_version`. -1 never waits."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def stop(self) -> None: ...
    async def snapshot(self) -> None: ...
    async def join_link(self) -> str: ...
    async def dismiss(self, peer_id: PeerId) -> None: ...


def create_app(
    source: ViewSource, *, operator_token: str, allowed_hosts: Collection[str] = ()
) -> FastAPI:
    """`allowed_hosts` are further names under which the page may be asked for (a reverse proxy's),
    beside loopback and the host that `serve` binds."""
    if not operator_token:
        raise ValueError("operator_token is empty")
    app = FastAPI(
        title="Shoal", version=__version__, docs_url=None, redoc_url=None,
        openapi_url="/api/openapi.json",
    )  # fmt: skip
    closing = asyncio.Event()
    guard_hosts = set(allowed_hosts)
    app.state.closing = closing
    app.state.allowed_hosts = guard_hosts
    app.add_middleware(Guard, allowed_hosts=guard_hosts)
    registry = new_registry(source.view)
    static = resources.files("shoal.coordinator.dashboard") / "static"
    viewers = 0

    def is_operator(request: Request) -> bool:
        """False without a token; 401 for a wrong one."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if not scheme:
            return False
        good = hmac.compare_digest(token.strip().encode(), operator_token.encode())
        if scheme.lower() != "bearer" or not good:
            raise _unauthorized("That is not the operator token.")
        return True

    def operator(request: Request) -> None:
        if not is_operator(request):
            raise _unauthorized("This needs the operator token.")

    only_operator = [Depends(operator)]

    @app.exception_handler(ShoalError)
    async def refused(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": type(error).__name__, "detail": str(error)}, status_code=409)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(str(static / "index.html"), media_type="text/html")

    app.mount("/static", StaticFiles(directory=str(static)), name="static")

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get("/api/run")
    async def run(shows_all: Annotated[bool, Depends(is_operator)]) -> RunView:
        view = bounded(source.view())
        return view if shows_all else public(view)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(exposition(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/api/events", include_in_schema=False)
    async def events() -> StreamingResponse:
        if viewers >= MAX_VIEWERS:
            raise HTTPException(
                503, f"{MAX_VIEWERS} viewers are connected already. Close some, or poll /api/run."
            )

        async def counted() -> AsyncIterator[bytes]:
            nonlocal viewers
            viewers += 1
            try:
                async for message in stream_views(source, closing):
                    yield message
            finally:
                viewers -= 1

        return StreamingResponse(counted(), media_type="text/event-stream")

    def lever(name: str, pull: Callable[[], Awaitable[None]]) -> None:
        @app.post(f"/api/run/{name}", dependencies=only_operator, name=name)
        async def handler() -> dict[str, str]:
            await pull()
            return {"state": source.view().state}

    for name in ("pause", "resume", "stop", "snapshot"):
        lever(name, getattr(source, name))

    @app.post("/api/nodes/{peer_id}/dismiss", dependencies=only_operator)
    async def dismiss(peer_id: str) -> dict[str, str]:
        if all(node.peer_id != peer_id for node in source.view().live_nodes):
            raise HTTPException(404, f"{peer_id[:64]} is not a node of this run now.")
        await source.dismiss(PeerId(peer_id))
        return {"dismissed": peer_id}

    @app.get("/api/join-link", dependencies=only_operator)
    async def join_link() -> dict[str, str]:
        return {"join_link": await source.join_link()}

    return app


async def stream_views(
    source: ViewSource,
    closing: asyncio.Event,
    *,
    interval_s: float = UPDATE_INTERVAL_S,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[bytes]:
    """Server-sent events: `view` (all of it), then an `update` per change (history: new points
    only), at most one per `interval_s`; a comment when nothing changed for `heartbeat_s`. Ends
    when `closing` is set."""
    version, last_step, sent = -1, -1, False
    shut = asyncio.ensure_future(closing.wait())
    change: asyncio.Future[int] | None = None
    yield b"retry: 2000\n\n"
    try:
        while not shut.done():
            change = change or asyncio.ensure_future(source.changed(version))
            either: set[asyncio.Future[Any]] = {change, shut}
            await asyncio.wait(either, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if shut.done():
                return
            if not change.done():
                yield b": still here\n\n"
                continue
            version, change = change.result(), None
            view = public(bounded(source.view()))
            shown = update_after(view, last_step) if sent else view
            yield _message("update" if sent else "view", shown.model_dump_json())
            sent = True
            last_step = view.history[-1].step if view.history else -1
            await asyncio.wait({shut}, timeout=interval_s)
    finally:
        shut.cancel()
        if change is not None:
            change.cancel()


def _message(event: str, data: str) -> bytes:
    return f"event: {event}\ndata: {data}\n\n".encode()


def _unauthorized(cause: str) -> HTTPException:
    return HTTPException(
        401,
        f"{cause} It lies in the run folder's file operator.token, on the coordinator's machine; "
        "send it as `Authorization: Bearer TOKEN`.",
        headers={"WWW-Authenticate": "Bearer"},
    )
