# SPDX-License-Identifier: Apache-2.0
"""Starts processes of a swarm again that have ended, as a service manager would."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from shoal.coordinator.dashboard.views import RunView
from shoal.demo_swarm import Process, Swarm
from shoal.protocol.errors import RunFailedError, UnreachableError

RESTART_AFTER_S = 1.0
MAX_CRASHES = 5
"""Of one process, that no fault explains."""


@dataclass
class Restarter:
    """Starts what has ended again, a little later, for as long as the run goes on. A node needs a
    coordinator to join; until one answers it is not started."""

    swarm: Swarm
    say: Callable[[str], None]
    ended_on_order: Callable[[Process], bool]
    """Whether a fault has ended the process."""
    restarts: int = 0
    nodes_joined_late: int = 0
    """Nodes that were started again and have got a stage since."""
    _joining_pids: set[int] = field(default_factory=set)

    @property
    def crashes(self) -> int:
        """How many ends no fault explains."""
        return sum(process.crashes for process in self.swarm.processes)

    def mend(self, view: RunView | None) -> None:
        """Call it often; `view` is None while the coordinator is away. Raises `RunFailedError`
        for a process that ends again and again of itself."""
        now_s = monotonic()
        if view is not None:
            self._note_joined(view)
        for process in self.swarm.processes:
            if process.alive:
                continue
            if process.ended_s is None:
                process.ended_s = now_s
                self._note_end(process)
            elif now_s - process.ended_s >= RESTART_AFTER_S and (
                view is not None or process is self.swarm.coordinator
            ):
                process.start()
                self.restarts += 1
                if process is not self.swarm.coordinator:
                    self._joining_pids.add(process.pid)
                self.say(f"starting {process.name} again")

    def _note_joined(self, view: RunView) -> None:
        for node in view.live_nodes:
            if node.pid in self._joining_pids and node.state in ("ready", "training"):
                self._joining_pids.remove(node.pid)
                self.nodes_joined_late += 1

    def _note_end(self, process: Process) -> None:
        # 0: the run was stopped, and let it go. Unreachable: the coordinator went meanwhile.
        if self.ended_on_order(process) or process.code in (0, UnreachableError.exit_code):
            return
        process.crashes += 1
        words = f"{process.name} ended with code {process.code}: {process.last_words()}"
        if process.crashes > MAX_CRASHES:
            raise RunFailedError(f"{words} (log: {process.log}); that was once too often")
        self.say(words)
