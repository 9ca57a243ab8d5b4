# SPDX-License-Identifier: Apache-2.0
"""`shoal status` and `shoal top`: the run's public view in one terminal screen.

Reads the same JSON as the dashboard. Texts of peers are drawn as plain `Text`, never as markup.
"""

import asyncio
from collections.abc import AsyncIterator

import httpx
from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.coordinator.dashboard.views import RunView, seconds_left
from shoal.node_table import NodeTable
from shoal.protocol.errors import ProtocolError, UnreachableError
from shoal.status_lines import boundary_lines, safeguard_lines
from shoal.units import human_bytes, human_count, human_seconds

MAX_VIEW_BYTES = 16 * 2**20
RECENT_EVENTS = 5

_RUN_STYLE = {
    "waiting": "yellow", "training": "cyan", "paused": "yellow", "draining": "yellow",
    "finished": "green", "failed": "red",
}  # fmt: skip


def render_status(view: RunView) -> RenderableType:
    """The run in one screen."""
    parts: list[RenderableType] = [_headline(view), _progress(view), _numbers(view)]
    if view.waiting_for:
        parts.append(Text(f"Waiting: {view.waiting_for}", style="bold yellow"))
    parts.append(Padding(NodeTable(view), (1, 0, 0, 0)))
    notes = [*boundary_lines(view.boundaries), *safeguard_lines(view)]
    if notes:
        grid = Table.grid(padding=(0, 2))
        for label, text in notes:
            grid.add_row(Text(label), Text(text, style="bright_black"))
        parts.append(Padding(grid, (1, 0, 0, 0)))
    if view.events:
        log = Table.grid(padding=(0, 2))
        for line in view.events[-RECENT_EVENTS:]:
            log.add_row(
                Text(f"{human_seconds(view.now_s - line.time_s)} ago", style="bright_black"),
                Text(line.text),
            )
        parts.append(Padding(log, (1, 0, 0, 0)))
    return Group(*parts)


def plain_line(view: RunView) -> str:
    """One line for logs and pipes."""
    fields = [f"{view.name} {view.state}", f"step {view.step}/{view.total_steps}"]
    if view.receipts_total:
        fields.append(f"receipts {view.receipts_done}/{view.receipts_total}")
    if view.loss is not None:
        fields.append(f"loss {view.loss:.4f}")
    if view.validation_loss is not None:
        fields.append(f"validation {view.validation_loss:.4f}")
    fields.append(f"{view.tokens_per_s:,.0f} tokens/s")
    fields.append(f"{len(view.live_nodes)} nodes")
    if view.waiting_for:
        fields.append(f"waiting: {view.waiting_for}")
    return " · ".join(fields)


def _headline(view: RunView) -> Text:
    spec = view.spec_summary
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(view.name, style="bold")
    text.append("  ")
    text.append(view.state, style=f"bold {_RUN_STYLE[view.state]}")
    text.append(
        f"  {human_count(spec.num_params)} parameters · {spec.num_layers} layers in "
        f"{spec.num_stages} stages · {spec.tokens_per_step:,} tokens a step · {spec.boundary}",
        style="bright_black",
    )
    return text


def _progress(view: RunView) -> RenderableType:
    note = f"step {view.step:,} of {view.total_steps:,}"
    if view.state == "training" and view.receipts_total:
        note += f", {view.receipts_done} of {view.receipts_total} receipts"
    if view.attempt > 1:
        note += f", attempt {view.attempt}"
    left = seconds_left(view)
    note += f" · {human_seconds(view.now_s - view.started_s)}"
    if left is not None:
        note += f", about {human_seconds(left)} left"
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column()
    row.add_row(
        ProgressBar(total=max(1, view.total_steps), completed=view.step, complete_style="cyan"),
        Text(note),
    )
    return row


def _numbers(view: RunView) -> Text:
    fields = []
    if view.loss is not None:
        first = "" if view.loss_first is None else f" (from {view.loss_first:.3f})"
        fields.append(f"loss {view.loss:.3f}{first}")
    if view.validation_loss is not None:
        fields.append(f"validation {view.validation_loss:.3f}")
    fields.append(f"{view.tokens_per_s:,.0f} tokens/s")
    first_line = " · ".join(fields)
    fields = [
        f"{human_bytes(view.boundary_bytes_per_step)} boundary + "
        f"{human_bytes(view.reduce_bytes_per_step)} reduce a step",
        f"lost {view.steps_lost} steps, missing {view.microbatches_missing}, "
        f"double {view.microbatches_double}",
    ]
    if view.snapshot_step is not None:
        fields.append(f"snapshot at step {view.snapshot_step}")
    return Text(f"{first_line}\n{' · '.join(fields)}")


async def fetch_view(
    url: str,
    *,
    timeout_s: float = 5.0,
    transport: httpx.AsyncBaseTransport | None = None,
    client: httpx.AsyncClient | None = None,
) -> RunView:
    """The view of the coordinator whose dashboard is at `url`. Whoever asks often keeps a
    `client`: making one takes longer than asking.

    Raises `UnreachableError` when nobody answers there, `ProtocolError` when what answers isn't
    a Shoal dashboard."""
    if client is not None:
        return await _fetch(client, url)
    async with _client(timeout_s, transport) as client:
        return await _fetch(client, url)


async def watch(
    url: str,
    *,
    console: Console | None = None,
    interval_s: float = 1.0,
    transport: httpx.AsyncBaseTransport | None = None,
) -> RunView:
    """`shoal top`: follow the run until it ends; returns its last view. Without a terminal,
    prints a line whenever something changed. A coordinator that is away for a while is waited
    for once it was seen; raises as `fetch_view` when it never was."""
    console = console or Console()
    last: RunView | None = None
    if not console.is_terminal:
        printed = ""
        async for view, trouble in _views(url, interval_s, transport):
            line = trouble if view is None else plain_line(view)
            if line != printed:
                console.print(Text(line), soft_wrap=True)
                printed = line
            last = view or last
    else:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            async for view, trouble in _views(url, interval_s, transport):
                last = view or last
                assert last is not None
                screen = render_status(last)
                if trouble:
                    screen = Group(screen, Text(f"\n{trouble}", style="bold red"))
                live.update(screen, refresh=True)
    assert last is not None
    return last


async def _views(
    url: str, interval_s: float, transport: httpx.AsyncBaseTransport | None
) -> AsyncIterator[tuple[RunView | None, str]]:
    """(view, "") or (None, why there is none now), until the run has ended."""
    seen = False
    async with _client(5.0, transport) as client:
        while True:
            try:
                view = await _fetch(client, url)
            except UnreachableError as error:
                if not seen:
                    raise
                yield None, f"{error} Still trying; Ctrl-C ends this."
            else:
                seen = True
                yield view, ""
                if view.state in {"finished", "failed"}:
                    return
            await asyncio.sleep(interval_s)


def _client(timeout_s: float, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    # No proxy or netrc from the environment: the dashboard is here or on a named machine.
    return httpx.AsyncClient(trust_env=False, timeout=timeout_s, transport=transport)


async def _fetch(client: httpx.AsyncClient, url: str) -> RunView:
    address = f"{url.rstrip('/')}/api/run"
    try:
        async with client.stream("GET", address) as reply:
            body = bytearray()
            async for chunk in reply.aiter_bytes():
                body += chunk
                if len(body) > MAX_VIEW_BYTES:
                    raise ProtocolError(f"{address} sent more than {MAX_VIEW_BYTES:,} bytes.")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise UnreachableError(
            f"No coordinator answers at {url}: {why}. Is the run launched, and the address the "
            "one it printed?"
        ) from None
    if reply.status_code != 200:
        raise ProtocolError(
            f"{address} answered {reply.status_code}: "
            f"{bytes(body[:200]).decode(errors='replace')!a}. "
            "Use the dashboard's address as the coordinator printed it."
        )
    try:
        return RunView.model_validate_json(bytes(body))
    except ValidationError as error:
        raise ProtocolError(
            f"{address} does not speak as a Shoal dashboard of this release "
            f"({error.error_count()} fields differ). Check address and releases."
        ) from None
