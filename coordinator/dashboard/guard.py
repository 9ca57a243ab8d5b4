# SPDX-License-Identifier: Apache-2.0
"""Who may speak to the dashboard through a browser, and what its answers allow a browser to do.

A page of another site could point its own name at this machine (DNS rebinding) or send requests
across origins. Both show in the `Host` and `Origin` headers, and are refused here.
"""

import ipaddress
import re
from collections.abc import Set as AbstractSet
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+))(?::\d{1,5})?", re.ASCII)
WILDCARDS = frozenset({"0.0.0.0", "::"})


def host_of(value: str) -> str:
    """The name in a Host header, lower case, without port and brackets; "" when malformed."""
    match = _HOST.fullmatch(value)
    return (match[1] or match[2]).lower().rstrip(".") if match else ""


def host_is_allowed(value: str, allowed: AbstractSet[str]) -> bool:
    """Loopback, or one of `allowed`. Bound to every interface, any literal address will do:
    rebinding needs a name."""
    host = host_of(value)
    if host in allowed or host == "localhost":
        return bool(host)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or bool(allowed & WILDCARDS)


def origin_is_allowed(origin: str | None, host: str) -> bool:
    """No Origin (not a browser, or a plain navigation), or the page's own."""
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and parts.netloc.lower() == host.lower()


class Guard:
    """ASGI middleware. `allowed_hosts` is read at every request: `serve` adds what it binds."""

    def __init__(self, app: ASGIApp, *, allowed_hosts: AbstractSet[str]) -> None:
        self._app = app
        self._allowed = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    answer[name] = value
                is_static = scope["path"].startswith("/static/")
                answer["Cache-Control"] = "no-cache" if is_static else "no-store"
            await send(message)

        app = self._app
        if not host_is_allowed(host, self._allowed):
            app = JSONResponse(
                {
                    "error": "HostRefused",
                    "detail": f"Host {host[:100]!r} is not this dashboard's. Use its address as "
                    "the coordinator printed it, or allow the name at launch.",
                },
                status_code=421,
            )
        elif not origin_is_allowed(headers.get("origin"), host):
            app = JSONResponse(
                {"error": "OriginRefused", "detail": "Another site's page may not use this."},
                status_code=403,
            )
        await app(scope, receive, guarded)
