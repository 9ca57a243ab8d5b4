# SPDX-License-Identifier: Apache-2.0
"""Asking a running coordinator for the newest weights, on a fake clock and transport."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.coordinator.dashboard.views import RunView, SpecSummary
from shoal.coordinator.fresh_snapshot import store_newest
from shoal.coordinator.run_folder import operator_token
from shoal.protocol.errors import ProtocolError, RunFailedError, UnreachableError
from shoal.protocol.ids import RunId

SUMMARY = SpecSummary(
    num_params=1, num_layers=1, dim=1, seq_len=1, vocab_size=1, num_stages=1, microbatches=1,
    tokens_per_step=1, boundary="bf16",
)  # fmt: skip


class Coordinator:
    """Answers with `views` in turn, the last one again and again."""

    def __init__(self, folder: Path, *views: dict[str, Any]) -> None:
        self.folder = folder
        self.token = operator_token(folder)
        self.views = list(views)
        self.asked = 0
        self.now_s = 0.0

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return httpx.Response(401, text="no token")
        if request.method == "POST":
            assert request.url.path == "/api/run/snapshot"
            self.asked += 1
            return httpx.Response(200, json={"state": "training"})
        fields = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        view = RunView(
            run_id=RunId("run-00000000"), name="run", spec_summary=SUMMARY, total_steps=9,
            **({"state": "training"} | fields),
        )  # fmt: skip
        return httpx.Response(200, text=view.model_dump_json())

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def newest(self, deadline_s: float = 5.0) -> int:
        return store_newest(
            self.folder, "http://127.0.0.1:1/", lambda phase, share: None, deadline_s=deadline_s,
            transport=httpx.MockTransport(self.answer), sleep=self.sleep,
            clock=lambda: self.now_s,
        )  # fmt: skip


def test_it_waits_for_a_snapshot_as_new_as_the_run_was(tmp_path: Path) -> None:
    coordinator = Coordinator(
        tmp_path,
        {"step": 5, "snapshot_step": 3},
        {"step": 6, "snapshot_step": 3},
        {"step": 7, "snapshot_step": 6},
    )
    assert coordinator.newest() == 6
    assert coordinator.asked == 1


def test_it_asks_for_nothing_that_is_there(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, {"step": 5, "snapshot_step": 5, "state": "finished"})
    assert coordinator.newest() == 5
    assert coordinator.asked == 0


def test_it_says_why_none_came_in_time(tmp_path: Path) -> None:
    coordinator = Coordinator(
        tmp_path, {"step": 5, "snapshot_step": 3, "waiting_for": "stage 1 needs a node"}
    )
    with pytest.raises(UnreachableError, match=r"step 5 within 5 s .*stage 1 needs a node"):
        coordinator.newest()


def test_a_failed_run_stores_none(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, {"step": 5, "snapshot_step": 3, "state": "failed"})
    with pytest.raises(RunFailedError, match="--stored"):
        coordinator.newest()
    assert coordinator.asked == 0


def test_a_run_without_a_step_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="no step yet"):
        Coordinator(tmp_path, {"step": 0}).newest()


def test_a_refusal_is_passed_on(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, {"step": 5})
    coordinator.token = "another"
    with pytest.raises(ProtocolError, match="401"):
        coordinator.newest()
