# SPDX-License-Identifier: Apache-2.0
"""Asks the coordinator that serves a run to store the newest committed weights, and waits."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from shoal.coordinator.dashboard.views import RunView
from shoal.coordinator.run_folder import operator_token
from shoal.protocol.errors import ProtocolError, RunFailedError, UnreachableError

_CALL_S = 10.0
_POLL_S = 0.2

Progress = Callable[[str, float], None]


def store_newest(
    run_folder: Path,
    dashboard: str,
    progress: Progress,
    *,
    deadline_s: float,
    transport: httpx.BaseTransport | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Returns the step of a stored snapshot that is as new as the run was when this was called.

    Raises `UnreachableError` when the coordinator doesn't answer, or stores none within
    `deadline_s` (it says why), `RunFailedError` for a run that has failed.
    """
    headers = {"Authorization": f"Bearer {operator_token(run_folder)}"}
    with httpx.Client(
        base_url=dashboard, headers=headers, timeout=_CALL_S, trust_env=False, transport=transport
    ) as client:
        view = _view(client)
        wanted = view.step
        if wanted == 0:
            raise UnreachableError(
                f"run {view.run_id} has committed no step yet, so there are no weights to export"
            )
        if (view.snapshot_step or 0) < wanted and view.state != "failed":
            _call(client, "POST", "/api/run/snapshot")
        ends = clock() + deadline_s
        while (view.snapshot_step or 0) < wanted:
            if view.state == "failed":
                raise RunFailedError(
                    f"run {view.run_id} has failed and stores no snapshot any more; "
                    "--stored exports the newest one that it has"
                )
            left = ends - clock()
            if left <= 0:
                why = view.waiting_for or f"step {view.step + 1} is still being computed"
                raise UnreachableError(
                    f"the coordinator stored no snapshot of step {wanted} within {deadline_s:g} s "
                    f"({view.state}: {why}); wait longer with --wait, or take the newest that is "
                    "there with --stored"
                )
            progress(f"waiting for the snapshot of step {wanted} or later", 1 - left / deadline_s)
            sleep(_POLL_S)
            view = _view(client)
        assert view.snapshot_step is not None
        return view.snapshot_step


def _view(client: httpx.Client) -> RunView:
    try:
        return RunView.model_validate_json(_call(client, "GET", "/api/run"))
    except ValueError as error:
        raise ProtocolError(
            f"{client.base_url} doesn't speak as a dashboard of this release: {error}"
        ) from None


def _call(client: httpx.Client, method: str, path: str) -> bytes:
    try:
        reply = client.request(method, path)
    except httpx.HTTPError as error:
        raise UnreachableError(
            f"the coordinator at {client.base_url} doesn't answer ({error or type(error).__name__})"
            "; --stored exports the newest snapshot without it"
        ) from None
    if reply.status_code != 200:
        raise ProtocolError(
            f"{client.base_url}{path.lstrip('/')} answered {reply.status_code}: "
            f"{reply.text[:200]!a}"
        )
    return reply.content
