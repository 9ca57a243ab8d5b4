# SPDX-License-Identifier: Apache-2.0
"""Routes, secrets and the event stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from shoal.coordinator.dashboard.app import create_app, serve, stream_views
from shoal.coordinator.dashboard.views import RunView
from shoal.protocol.errors import CapacityError, ConfigError

from .fake_view import REFUSAL, FakeSource, one_more_step, peer, training_view

TOKEN = "correct-horse"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def app(source: FakeSource) -> FastAPI:
    return create_app(source, operator_token=TOKEN)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
        yield client


# ---- reading -----------------------------------------------------------------------------


async def test_run_is_served_whole_but_for_the_join_link(client: httpx.AsyncClient) -> None:
    view = RunView.model_validate_json((await client.get("/api/run")).content)
    assert view == training_view(join_link=None)


async def test_operator_also_sees_the_join_link(client: httpx.AsyncClient) -> None:
    assert (await client.get("/api/run", headers=AUTH)).json()["join_link"]
    link = (await client.get("/api/join-link", headers=AUTH)).json()["join_link"]
    assert link.startswith("shoal://")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/static/app.js", "javascript"),
        ("/static/style.css", "text/css"),
        ("/static/vendor/uplot/uPlot.iife.min.js", "javascript"),
        ("/metrics", "text/plain"),
        ("/healthz", "application/json"),
    ],
)
async def test_everything_the_page_needs_is_served(
    client: httpx.AsyncClient, path: str, kind: str
) -> None:
    reply = await client.get(path)
    assert reply.status_code == 200
    assert kind in reply.headers["content-type"]


async def test_answers_carry_strict_headers_also_errors(client: httpx.AsyncClient) -> None:
    for path in ("/", "/api/run", "/nothing", "/api/join-link"):
        headers = (await client.get(path)).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


async def test_page_has_nothing_inline_and_asks_no_other_host(client: httpx.AsyncClient) -> None:
    page = (await client.get("/")).text
    assert "<style" not in page
    assert "style=" not in page
    assert "onclick" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    for name in ("app.js", "render.js", "charts.js", "format.js"):
        script = (await client.get(f"/static/{name}")).text
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write"):
            assert unsafe not in script


async def test_static_files_do_not_lead_out_of_their_folder(client: httpx.AsyncClient) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd"):
        assert (await client.get(path)).status_code == 404


# ---- operating ---------------------------------------------------------------------------


@pytest.mark.parametrize("lever", ["pause", "resume", "stop", "snapshot"])
async def test_levers_need_the_token(
    client: httpx.AsyncClient, source: FakeSource, lever: str
) -> None:
    path = f"/api/run/{lever}"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        reply = await client.post(path, headers=headers)
        assert reply.status_code == 401
        assert "operator.token" in reply.json()["detail"]
        assert TOKEN not in reply.text
    assert source.pulled == []
    assert (await client.post(path, headers=AUTH)).json() == {"state": "training"}
    assert source.pulled == [lever]
    assert (await client.get(path, headers=AUTH)).status_code == 405


async def test_join_link_and_wrong_tokens_are_refused(client: httpx.AsyncClient) -> None:
    assert (await client.get("/api/join-link")).status_code == 401
    wrong = {"Authorization": "Bearer café".encode()}
    assert (await client.get("/api/run", headers=wrong)).status_code == 401


async def test_dismiss_takes_only_nodes_that_are_here(
    client: httpx.AsyncClient, source: FakeSource
) -> None:
    assert (await client.post(f"/api/nodes/{peer(0)}/dismiss")).status_code == 401
    assert (await client.post(f"/api/nodes/{peer(6)}/dismiss", headers=AUTH)).status_code == 404
    assert (await client.post("/api/nodes/nobody/dismiss", headers=AUTH)).status_code == 404
    assert (await client.post(f"/api/nodes/{peer(0)}/dismiss", headers=AUTH)).status_code == 200
    assert source.pulled == [f"dismiss {peer(0)}"]


async def test_a_refusal_says_why(client: httpx.AsyncClient, source: FakeSource) -> None:
    source.refusal = REFUSAL
    reply = await client.post("/api/run/pause", headers=AUTH)
    assert reply.status_code == 409
    assert reply.json() == {"error": "ConfigError", "detail": str(REFUSAL)}


async def test_other_hosts_and_origins_are_refused_even_with_the_token(
    client: httpx.AsyncClient, source: FakeSource
) -> None:
    rebound = {**AUTH, "Host": "evil.example"}
    assert (await client.get("/api/run", headers=rebound)).status_code == 421
    foreign = {**AUTH, "Origin": "http://evil.example"}
    assert (await client.post("/api/run/stop", headers=foreign)).status_code == 403
    own = {**AUTH, "Origin": "http://127.0.0.1:8080"}
    assert (await client.post("/api/run/stop", headers=own)).status_code == 200
    assert source.pulled == ["stop"]


def test_an_empty_operator_token_is_never_accepted(source: FakeSource) -> None:
    with pytest.raises(ValueError, match="operator_token"):
        create_app(source, operator_token="")


# ---- the stream --------------------------------------------------------------------------


def parsed(message: bytes) -> tuple[str, dict[str, Any]]:
    event, data = message.decode().removesuffix("\n\n").split("\n", 1)
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_stream_shows_all_then_only_what_is_new(source: FakeSource) -> None:
    stream = stream_views(source, asyncio.Event(), interval_s=0)
    assert (await anext(stream)).startswith(b"retry:")
    kind, first = parsed(await anext(stream))
    assert kind == "view"
    assert len(first["history"]) == 132
    assert first["join_link"] is None
    await source.show(one_more_step)
    kind, second = parsed(await anext(stream))
    assert kind == "update"
    assert second["step"] == 133
    assert second["history"][-1]["step"] == 133
    assert len(second["history"]) < 20
    await stream.aclose()
    assert source.waiters == 0


async def test_changes_within_the_interval_arrive_as_one(source: FakeSource) -> None:
    closing = asyncio.Event()
    stream = stream_views(source, closing, interval_s=3600)
    await anext(stream)
    await anext(stream)
    following = asyncio.ensure_future(anext(stream, None))
    for _ in range(3):
        await source.show(one_more_step)
        await asyncio.sleep(0)
    assert not following.done()
    closing.set()
    assert await following is None


async def test_quiet_stream_beats_and_still_notices_the_next_change(source: FakeSource) -> None:
    stream = stream_views(source, asyncio.Event(), interval_s=0, heartbeat_s=0.001)
    await anext(stream)
    await anext(stream)
    assert await anext(stream) == b": still here\n\n"
    await source.show(one_more_step)
    messages = [await anext(stream) for _ in range(2)]
    assert any(b"event: update" in message for message in messages)
    await stream.aclose()


async def test_closing_ends_the_stream_and_leaves_no_waiter(source: FakeSource) -> None:
    closing = asyncio.Event()
    stream = stream_views(source, closing, interval_s=0)
    await anext(stream)
    await anext(stream)
    rest = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    closing.set()
    assert await rest is None
    await asyncio.sleep(0)
    assert source.waiters == 0


# ---- the server --------------------------------------------------------------------------


async def test_server_ends_open_streams_when_it_is_cancelled(
    app: FastAPI, source: FakeSource
) -> None:
    task, port = await serve(app, "127.0.0.1", 0)
    assert port > 0
    async with httpx.AsyncClient(trust_env=False) as client:
        async with client.stream("GET", f"http://127.0.0.1:{port}/api/events") as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = reply.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass
            task.cancel()
            rest = [line async for line in lines]  # raises if the connection were torn
            assert all(not line.startswith("event") for line in rest)
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_viewer_who_leaves_is_forgotten(app: FastAPI, source: FakeSource) -> None:
    task, port = await serve(app, "127.0.0.1", 0)
    async with httpx.AsyncClient(trust_env=False) as client:
        async with client.stream("GET", f"http://127.0.0.1:{port}/api/events") as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    break
    async with asyncio.timeout(10):
        while source.waiters:
            await source.show(one_more_step)
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_taken_port_says_what_to_do(app: FastAPI) -> None:
    task, port = await serve(app, "127.0.0.1", 0)
    with pytest.raises(CapacityError, match=f"{port}.*or 0 for any free one"):
        await serve(app, "127.0.0.1", port)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_foreign_address_says_what_to_do(app: FastAPI) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        await serve(app, "192.0.2.1", 0)
