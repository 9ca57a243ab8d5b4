# SPDX-License-Identifier: Apache-2.0
"""What the demo shows while it runs: lines for events, and the run's progress."""

import contextlib

from shoal.coordinator.dashboard.views import RunView
from shoal.protocol.terminal import Terminal
from shoal.units import human_bytes


class Display:
    """Progress is a live line on a terminal, and a line a step elsewhere."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._line = "starting"
        self._shown: tuple[int, str] | None = None

    def live(self) -> contextlib.AbstractContextManager[None]:
        return self._terminal.live(lambda: self._line)

    def say(self, text: str) -> None:
        self._terminal.line(text)

    def progress(self, view: RunView, last_fault: str = "") -> None:
        self._line = progress_line(view)
        news = (view.step, view.waiting_for)
        if news != self._shown and not self._terminal.console.is_terminal:
            self._shown = news
            self.say(self._line)
        if last_fault:  # elsewhere it has a line of its own
            self._line += f"  last fault: {last_fault}"

    def coordinator_is_away(self) -> None:
        self._line = "the coordinator is away; the nodes wait for it"


def progress_line(view: RunView) -> str:
    """ "step 5/20  loss 4.312  3,912 tok/s  1.0 MB/step  nodes 2+2"."""
    nodes = "+".join(
        str(sum(n.state in ("training", "ready") for n in stage.nodes)) for stage in view.stages
    )
    loss = f"{view.loss:.3f}" if view.loss is not None else "–"
    moved = view.boundary_bytes_per_step + view.reduce_bytes_per_step
    line = (
        f"step {view.step}/{view.total_steps}  loss {loss}  {view.tokens_per_s:,.0f} tok/s  "
        f"{human_bytes(moved)}/step  nodes {nodes}"
    )
    return f"{line}  waiting: {view.waiting_for}" if view.waiting_for else line
