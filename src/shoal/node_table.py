# SPDX-License-Identifier: Apache-2.0
"""The nodes of a run as a table for the terminal. Texts of peers are never markup."""

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from shoal.coordinator.dashboard.views import NodeView, RunView
from shoal.units import human_bytes

MAX_SHOWN_NODES = 64

WIDE = 100
"""Columns from which on every column of the table of nodes is shown."""

_NODE_STYLE = {
    "joining": "yellow", "copying": "yellow", "warming": "yellow", "training": "cyan",
    "ready": "green", "paused": "bright_black", "leaving": "yellow", "left": "bright_black",
    "fenced": "red",
}  # fmt: skip


class NodeTable:
    """The table of nodes, with fewer columns where the terminal is narrow."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield _table(self._view, is_wide=options.max_width >= WIDE)


def _table(view: RunView, *, is_wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bright_black", expand=True)
    table.add_column("stage", no_wrap=True, overflow="ellipsis")
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    for name in ("queue", "speed", "done", *(("share", "log") if is_wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    rows: list[tuple[str, NodeView | None]] = []
    for stage in view.stages:
        label = f"{stage.stage}  {stage.parts}" if is_wide else str(stage.stage)
        rows.extend((label if i == 0 else "", node) for i, node in enumerate(stage.nodes))
        if not stage.nodes:
            rows.append((label, None))
    staged = {node.peer_id for stage in view.stages for node in stage.nodes}
    others = [n for n in view.live_nodes if n.peer_id not in staged]
    none = "no stage yet" if is_wide else "none"
    rows.extend((none if i == 0 else "", node) for i, node in enumerate(others))
    for label, node in rows[:MAX_SHOWN_NODES]:
        if node is None:
            table.add_row(Text(label), Text("nobody", style="yellow"))
            continue
        share = f"{node.contributed_share:.0%}"
        kept = human_bytes(node.log_bytes) if node.log_bytes else ""
        table.add_row(
            Text(label),
            Text(node.name),
            Text(node.state, style=_NODE_STYLE[node.state]),
            node.tier,
            str(node.queue_depth),
            f"{node.microbatches_per_s:.2f}/s" if node.microbatches_per_s else "–",
            f"{node.contributed_microbatches:,}",
            *((share, kept) if is_wide else ()),
            Text(_note(node), style="bright_black"),
        )
    if len(rows) > MAX_SHOWN_NODES:
        table.add_row("", Text(f"and {len(rows) - MAX_SHOWN_NODES} more"))
    return table


def _note(node: NodeView) -> str:
    parts = []
    if node.leaves_within_s is not None:
        parts.append(f"{node.leaves_within_s:.0f} s of its grace left")
    if node.marks:
        parts.append(f"{node.marks} refused messages")
    return " · ".join([*parts, node.waiting_for or node.device_name])
