# SPDX-License-Identifier: Apache-2.0
"""What a supervisor on the same machine sees of a run, across restarts of the coordinator."""

import time

import httpx

from shoal.coordinator.dashboard.views import RunView
from shoal.coordinator.run_folder import Live, read_live
from shoal.demo_swarm import Swarm
from shoal.protocol.errors import ProtocolError, UnreachableError
from shoal.status import fetch_view

AWAY_LIMIT_S = 90.0
"""A coordinator that was away for so long, though it is started again, won't come back."""

_VIEW_DEADLINE_S = 3.0


class RunWatch:
    """The run's view, across restarts of its coordinator. Close it."""

    def __init__(self, swarm: Swarm, *, may_restart: bool) -> None:
        """`may_restart`: somebody starts the coordinator again when it has ended."""
        self._swarm = swarm
        self._may_restart = may_restart
        self._client = httpx.AsyncClient(trust_env=False, timeout=_VIEW_DEADLINE_S)
        self._answered_s = time.monotonic()
        self._live: Live | None = None

    async def close(self) -> None:
        await self._client.aclose()

    async def look(self) -> RunView | None:
        """The view now; None while the coordinator is away.

        Raises `RunFailedError` when it has ended for good, `UnreachableError` when it was away for
        `AWAY_LIMIT_S`."""
        self._live = self._live or read_live(self._swarm.run_folder)
        trouble = "it is being started"
        if self._live is not None:
            try:
                view = await fetch_view(self._live.dashboard, client=self._client)
            except (UnreachableError, ProtocolError) as error:
                self._live, trouble = None, str(error)
            else:
                self._answered_s = time.monotonic()
                return view
        if not self._may_restart:
            self._swarm.require_coordinator()
        if time.monotonic() - self._answered_s > AWAY_LIMIT_S:
            assert self._swarm.coordinator is not None
            raise UnreachableError(
                f"the coordinator has not answered for {AWAY_LIMIT_S:.0f} s: {trouble} "
                f"(log: {self._swarm.coordinator.log})"
            )
        return None
