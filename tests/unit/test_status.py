# SPDX-License-Identifier: Apache-2.0
"""`shoal status` in a terminal and without one."""

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from rich.console import Console

from shoal.protocol.errors import ProtocolError, UnreachableError
from shoal.status import (
    MAX_VIEW_BYTES,
    fetch_view,
    plain_line,
    render_status,
    watch,
)

URL = "http://127.0.0.1:8080"


def _load_fake() -> ModuleType:
    # By path, so that it doesn't matter how pytest was started.
    path = Path(__file__).parent / "coordinator" / "fake_view.py"
    spec = importlib.util.spec_from_file_location("status_fake_view", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["status_fake_view"] = module
    spec.loader.exec_module(module)
    return module


fake = _load_fake()


def drawn(view: object, *, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render_status(view))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_one_screen_shows_stages_nodes_and_progress() -> None:
    view = fake.training_view()
    screen = drawn(view)
    for text in ("stdlib-small", "training", "step 132 of 200", "29 of 48 receipts", "loss 3.450",
                 "embedding + layers 0–1", "no stage yet", "16.8 MB boundary", "left",
                 "lost 0 steps, missing 0, double 0", "boundary 1–2",
                 "2.23 MB a step forward (bf16 4.19 MB), 4.19 MB backward"):  # fmt: skip
        assert text in screen
    for node in view.live_nodes:
        assert node.name in screen
    assert view.nodes[6].name not in screen  # it left
    assert len(screen.splitlines()) <= 24


def test_a_quiet_run_says_nothing_of_losses() -> None:
    screen = drawn(fake.training_view())
    for absent in ("replay", "rollback", "boundary logs", "numbers", "coordinator", "grace"):
        assert absent not in screen


def test_losses_and_who_stands_by_are_told_in_plain_words() -> None:
    screen = drawn(fake.troubled_view(), width=160)
    for text in (
        "10.0.0.5:7600 leads in term 3 · standby 10.0.0.7:7601 (2 events behind)",
        "standby 10.0.0.9:7601 (away)",
        "at most 1.02 GB at each node",
        "swift-tern computes stage 1 again: 17 of 31 steps, up to step 131, for 9 s",
        "2 min 40 s ago: stage 1 was replayed from step 60 to 84, 12.4 s, 96.0 MB of logs",
        "the run went back from step 130 to 100; not caught up yet: a replay gave other bits",
        "2 back-offs, the last in step 90: microbatch 3 of step 90 overflows at stage 1",
        "21 s of its grace left",
    ):
        assert text in screen
    tiers = {"worker", "holder", "warming"}
    assert tiers <= set(screen.split())


def test_the_term_is_told_from_the_second_one_on() -> None:
    view = fake.training_view(coordinator="10.0.0.5:7600", term=1)
    assert "leads" not in drawn(view)
    assert "10.0.0.5:7600 leads in term 2" in drawn(view.model_copy(update={"term": 2}))


def test_a_narrow_terminal_cuts_no_name_and_no_state() -> None:
    view = fake.troubled_view()
    screen = drawn(view, width=80)
    for node in view.live_nodes:
        assert any(
            node.name in line and node.state in line and node.tier in line
            for line in screen.splitlines()
        )


def test_waiting_says_why_and_names_the_empty_stage() -> None:
    screen = drawn(fake.waiting_view())
    assert "Waiting: 2 of 3 stages are held." in screen
    assert "nobody" in screen


def test_peer_texts_are_neither_markup_nor_escapes() -> None:
    node = fake.node(0, name="[bold red]fox[/]\x1b[2J", stage=None)
    screen = drawn(fake.training_view(nodes=[node], stages=[]))
    assert "[bold red]fox[/]" in screen
    assert "\x1b" not in screen


def test_a_crowd_is_cut_short() -> None:
    nodes = [fake.node(i % 12, stage=None) for i in range(200)]
    assert "and 136 more" in drawn(fake.training_view(nodes=nodes, stages=[]))


def test_plain_line_tells_the_same() -> None:
    line = plain_line(fake.waiting_view())
    assert line.startswith("stdlib-small waiting · step 0/200")
    assert "waiting: 2 of 3 stages" in line


# ---- fetching ----------------------------------------------------------------------------


def answering(*replies: httpx.Response | Exception) -> httpx.MockTransport:
    """Each request takes the next reply; the last one stays."""
    left = list(replies)

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/api/run"
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply.status_code, content=reply.content)

    return httpx.MockTransport(handle)


def page(view: object) -> httpx.Response:
    return httpx.Response(200, content=view.model_dump_json())  # type: ignore[attr-defined]


async def test_fetched_view_equals_the_served_one() -> None:
    view = fake.training_view(join_link=None)
    assert await fetch_view(URL + "/", transport=answering(page(view))) == view


async def test_silence_names_address_and_remedy() -> None:
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:8080.*launched"):
        await fetch_view(URL, transport=answering(httpx.ConnectError("refused")))


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(404, content=b"\x1b[2J not here"),
        httpx.Response(200, content=b"<html>"),
        httpx.Response(200, content=json.dumps({"run_id": 1})),
    ],
)
async def test_anything_else_than_a_dashboard_is_refused(reply: httpx.Response) -> None:
    with pytest.raises(ProtocolError) as caught:
        await fetch_view(URL, transport=answering(reply))
    assert "\x1b" not in str(caught.value)


async def test_a_view_that_never_ends_is_cut_off() -> None:
    padded = fake.training_view().model_dump_json().encode() + b" " * MAX_VIEW_BYTES
    with pytest.raises(ProtocolError, match="sent more than"):
        await fetch_view(URL, transport=answering(httpx.Response(200, content=padded)))


async def test_watch_prints_changes_only_and_outlives_an_absence() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=80)
    transport = answering(
        page(fake.training_view(10)),
        page(fake.training_view(10)),
        httpx.ConnectError("refused"),
        page(fake.training_view(200, state="finished")),
    )
    last = await watch(URL, console=console, interval_s=0, transport=transport)
    lines = out.getvalue().splitlines()
    assert last.state == "finished"
    assert len(lines) == 3
    assert "step 10/200" in lines[0]
    assert "Still trying" in lines[1]
    assert "finished · step 200/200" in lines[2]


async def test_watch_redraws_in_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=50)
    transport = answering(
        page(fake.training_view(10)), page(fake.training_view(200, state="finished"))
    )
    await watch(URL, console=console, interval_s=0, transport=transport)
    assert "step 10 of 200" in out.getvalue()
    assert "step 200 of 200" in out.getvalue()


async def test_watch_gives_up_at_once_where_nobody_ever_answered() -> None:
    with pytest.raises(UnreachableError):
        await watch(URL, console=Console(file=io.StringIO()),
                    transport=answering(httpx.ConnectError("refused")))  # fmt: skip
