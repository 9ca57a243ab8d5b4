# SPDX-License-Identifier: Apache-2.0
"""The demo's ordinary trouble: one node killed in the middle of a step, and another brought in."""

import signal
from collections.abc import Callable

from shoal.coordinator.dashboard.views import RunView
from shoal.demo_summary import Churn
from shoal.demo_swarm import Process, Swarm
from shoal.protocol.errors import ConfigError


def parse_kill(text: str, steps: int) -> int | None:
    """ "never", a step number, or "middle"."""
    if text == "never":
        return None
    if text == "middle":
        return max(1, steps // 3)
    if not text.isdecimal() or not 1 <= int(text) <= steps:
        raise ConfigError(f"--kill {text!r}: give never, or a step from 1 to {steps}")
    return int(text)


class Kill:
    """Kills a node in step `step`, and starts a replacement once the run has gone on without."""

    def __init__(self, swarm: Swarm, link: str, step: int, say: Callable[[str], None]) -> None:
        self._swarm = swarm
        self._link = link
        self._step = step
        self._say = say
        self._victim: Process | None = None
        self._replacement: Process | None = None
        self.churn = Churn()

    def observe(self, view: RunView) -> None:
        if self._victim is None:
            if _in_the_middle(view, self._step):
                self._kill_one(view)
        elif self._replacement is None:
            if view.step >= self.churn.first_step or view.waiting_for:
                self._say("starting a replacement")
                self._replacement = self._swarm.start_node(self._link)
        elif not self.churn.nodes_joined_late:
            self._note_replacement(view, self._replacement.pid)

    def _kill_one(self, view: RunView) -> None:
        """SIGKILL a node of the stage with the most nodes."""
        stage = max(view.stages, key=lambda stage: (len(stage.nodes), stage.stage))
        by_pid = {process.pid: process for process in self._swarm.nodes}
        node = next((node for node in stage.nodes if node.pid in by_pid), None)
        if node is None:  # nobody is there yet
            return
        self._victim = by_pid[node.pid]
        self._victim.signal(signal.SIGKILL)
        self.churn.first_step = view.step + 1
        self.churn.nodes_killed = 1
        self._say(
            f"killed {node.name} (pid {node.pid}, stage {stage.stage}) with SIGKILL in step "
            f"{view.step + 1}, {view.receipts_done} of {view.receipts_total} receipts in"
        )

    def _note_replacement(self, view: RunView, pid: int) -> None:
        for node in view.live_nodes:
            if node.pid == pid and node.state in ("ready", "training"):
                self.churn.settled_step = max(view.step + 1, self.churn.first_step)
                self.churn.nodes_joined_late = 1
                self._say(f"{node.name} took its place in stage {node.stage}")


def _in_the_middle(view: RunView, step: int) -> bool:
    """The step is open and at least a quarter of its receipts are in, or it has just passed."""
    if view.step >= step:
        return True
    some = max(1, view.receipts_total // 4)
    return view.step == step - 1 and view.state == "training" and view.receipts_done >= some
