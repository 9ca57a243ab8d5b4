# SPDX-License-Identifier: Apache-2.0
"""A made-up run: plausible numbers, scripted changes, nothing random."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from shoal.coordinator.dashboard.views import (
    BackOffView,
    BoundaryView,
    EventLine,
    NodeView,
    RecoveryView,
    ReplayView,
    RunView,
    SpecSummary,
    StageView,
    StandbyView,
    StepPoint,
    TrafficView,
)
from shoal.protocol.errors import ConfigError
from shoal.protocol.ids import PeerId, RunId, display_name

START_S = 1_760_000_000.0
SPEC = SpecSummary(
    num_params=6_520_000,
    num_layers=6,
    dim=256,
    seq_len=128,
    vocab_size=2048,
    num_stages=3,
    microbatches=16,
    tokens_per_step=8192,
    boundary="bf16",
)


def peer(number: int) -> PeerId:
    """A valid peer id. Its display name follows from it."""
    alphabet = "abcdefghijklmnopqrstuvwxyz234567"
    return PeerId("".join(alphabet[(number * 7 + i * i) % 32] for i in range(26)))


def loss_at(step: int) -> float:
    return 2.9 + 4.75 * math.exp(-step / 60) + 0.05 * math.sin(step * 2.3) * math.exp(-step / 200)


def point(step: int) -> StepPoint:
    slow = 0.55 if 61 <= step < 68 else 1.0
    speed = (2450 + 120 * math.sin(step / 3) + 60 * math.cos(step * 1.7)) * slow
    return StepPoint(
        step=step,
        loss=loss_at(step),
        tokens_per_s=speed,
        boundary_bytes=16_780_000 if slow == 1.0 else 19_100_000,
        reduce_bytes=13_400_000 if slow == 1.0 else 9_800_000,
        seconds=8192 / speed,
        grad_norm=0.4 + 2 * math.exp(-step / 30),
        learning_rate=3e-3,
        validation_loss=loss_at(step) + 0.09 if step % 10 == 0 else None,
    )


def node(number: int, **fields: Any) -> NodeView:
    peer_id = peer(number)
    defaults: dict[str, Any] = {
        "peer_id": peer_id,
        "name": display_name(peer_id),
        "incarnation": number + 1,
        "stage": number % 3,
        "state": "training",
        "device": "cuda",
        "device_name": "NVIDIA GeForce RTX 3060",
        "pid": 4000 + number,
        "address": f"127.0.0.1:{41000 + number}",
        "queue_depth": number % 4,
        "microbatches_per_s": 2.0 + 0.6 * (number % 3),
        "memory_bytes": 1_900_000_000,
        "bytes_sent": 1_400_000_000 + number,
        "bytes_received": 1_300_000_000,
        "contributed_microbatches": 900 - 71 * number,
        "contributed_share": (900 - 71 * number) / 5_280,
        "last_seen_s": START_S + 400,
        "discovered_peers": 6,
    }
    return NodeView.model_validate({**defaults, **fields})


def boundary(number: int) -> BoundaryView:
    """Forward in int8 with a scale for 64 values, backward in bf16."""
    return BoundaryView(
        from_stage=number,
        to_stage=number + 1,
        traffic=[
            TrafficView(kind="forward", encoded_bytes=2_230_000, bf16_bytes=4_194_304),
            TrafficView(kind="backward", encoded_bytes=4_194_304, bf16_bytes=4_194_304),
        ],
    )


NEW: dict[str, Any] = {
    "contributed_microbatches": 0,
    "contributed_share": 0.0,
    "microbatches_per_s": 0.0,
    "queue_depth": 0,
}


def training_view(step: int = 132, **fields: Any) -> RunView:
    """Three stages, seven live nodes, one that left, one on its way."""
    nodes = [
        node(0, device_name="NVIDIA GeForce RTX 3090", microbatches_per_s=4.1, queue_depth=3),
        node(1),
        node(2, device_name="Apple M2 Max", device="mps"),
        node(3, microbatches_per_s=1.1, queue_depth=8, device="cpu", device_name="12 CPU cores"),
        node(4, state="ready", waiting_for="a forward tensor from stage 0"),
        node(5, marks=2),
        node(6, state="left", stage=None),
        node(7, state="copying", stage=2, **NEW),
        node(8, state="joining", stage=None, **NEW),
    ]
    parts = ("embedding + layers 0–1", "layers 2–3", "layers 4–5 + loss")
    defaults: dict[str, Any] = {
        "run_id": RunId("stdlib-small-1f6a09c2"),
        "name": "stdlib-small",
        "spec_summary": SPEC,
        "state": "training",
        "step": step,
        "total_steps": 200,
        "attempt": 1,
        "receipts_done": 29,
        "receipts_total": 48,
        "receipts_taken": 6_365,
        "loss": loss_at(step),
        "loss_first": loss_at(1),
        "validation_loss": loss_at(step // 10 * 10) + 0.09,
        "tokens_per_s": point(step).tokens_per_s,
        "boundary_bytes_per_step": 16_780_000,
        "reduce_bytes_per_step": 13_400_000,
        "bytes_total": 3_984_000_000,
        "started_s": START_S,
        "now_s": START_S + 460,
        "stages": [
            StageView(
                stage=stage,
                layers=f"{2 * stage}–{2 * stage + 1}",
                parts=parts[stage],
                nodes=[n for n in nodes if n.stage == stage],
            )
            for stage in range(3)
        ],
        "nodes": nodes,
        "boundaries": [boundary(0), boundary(1)],
        "history": [point(s) for s in range(1, step + 1)],
        "events": [
            EventLine(time_s=START_S + 4, kind="joined", text="amber-fox joined with an RTX 3090"),
            EventLine(time_s=START_S + 31, kind="started", text="Six nodes are here: step 1 opens"),
            EventLine(
                time_s=START_S + 231,
                kind="fenced",
                text="keen-wren fell silent at step 61; its 5 microbatches went to two replicas",
            ),
            EventLine(
                time_s=START_S + 236, kind="committed", text="Step 61 committed, nothing lost"
            ),
            EventLine(time_s=START_S + 401, kind="snapshot", text="Snapshot of step 100 is whole"),
        ],
        "weights_digest": "9f31c2aa07d1e5b4",
        "snapshot_step": 100,
        "join_link": "shoal://join/secret-link",
    }
    return RunView.model_validate({**defaults, **fields})


def troubled_view(**fields: Any) -> RunView:
    """A run that has seen replays, a rollback and a back-off, and replays a stage right now."""
    calm = training_view()
    nodes = [
        n.model_copy(
            update={
                "tier": "holder",
                "log_bytes": 48_000_000 + 1_000_000 * i,
                "log_oldest_step": 101,
            }
            if n.state == "training"
            else {}
        )
        for i, n in enumerate(calm.nodes)
    ]
    nodes[1] = nodes[1].model_copy(update={"state": "leaving", "leaves_within_s": 21.4})
    nodes[3] = nodes[3].model_copy(update={"tier": "worker", "log_bytes": 0, "log_oldest_step": 0})
    nodes[7] = nodes[7].model_copy(update={"state": "warming"})
    defaults: dict[str, Any] = {
        "nodes": nodes,
        "stages": [
            stage.model_copy(update={"nodes": [n for n in nodes if n.stage == stage.stage]})
            for stage in calm.stages
        ],
        "log_bytes": sum(n.log_bytes for n in nodes),
        "log_budget_bytes": 1_024_000_000,
        "replays": 1,
        "replay_seconds": 12.4,
        "replay_bytes": 96_000_000,
        "rollbacks": 2,
        "rollback_seconds": 61.0,
        "replaying": [
            ReplayView(
                stage=1, node="swift-tern", from_step=100, to_step=131, step=117, seconds=9.2
            )
        ],
        "recoveries": [
            RecoveryView(
                kind="rollback", time_s=START_S + 120, from_step=37, to_step=20, seconds=41.0,
                reason="stage 2 has no node that holds step 37; its logs were lost with keen-wren",
            ),
            RecoveryView(
                kind="replay", time_s=START_S + 300, stage=1, from_step=60, to_step=84,
                seconds=12.4, log_bytes=96_000_000,
            ),
            RecoveryView(
                kind="rollback", time_s=START_S + 410, from_step=130, to_step=100,
                reason="a replay gave other bits than the record",
            ),
        ],
        "back_offs": BackOffView(
            count=2, step=90, reason="microbatch 3 of step 90 overflows at stage 1",
            loss_scale=256.0, coarser_bits=4,
        ),
        "coordinator": "10.0.0.5:7600",
        "term": 3,
        "standbys": [
            StandbyView(address="10.0.0.7:7601", connected=True, events_behind=2),
            StandbyView(address="10.0.0.9:7601"),
        ],
    }  # fmt: skip
    return training_view(**{**defaults, **fields})


def waiting_view(**fields: Any) -> RunView:
    """Before the first step: a stage nobody holds."""
    few = [node(0, **{**NEW, "state": "ready"}), node(1, **{**NEW, "state": "ready"})]
    defaults: dict[str, Any] = {
        "state": "waiting",
        "waiting_for": "2 of 3 stages are held. One more node starts the run: pass on the join "
        "link that the coordinator printed.",
        "loss": None,
        "loss_first": None,
        "validation_loss": None,
        "tokens_per_s": 0.0,
        "boundary_bytes_per_step": 0,
        "reduce_bytes_per_step": 0,
        "bytes_total": 0,
        "receipts_done": 0,
        "receipts_total": 0,
        "nodes": few,
        "stages": [
            StageView(
                stage=stage,
                layers=f"{2 * stage}–{2 * stage + 1}",
                parts=f"layers {2 * stage}–{2 * stage + 1}",
                nodes=[n for n in few if n.stage == stage],
            )
            for stage in range(3)
        ],
        "boundaries": [],
        "events": [EventLine(time_s=START_S + 4, kind="joined", text="azure-moose joined")],
        "snapshot_step": None,
        "weights_digest": None,
    }
    return training_view(0, **{**defaults, **fields})


def crowded_view() -> RunView:
    """More stages than fit side by side, and the longest texts."""
    stages = [
        StageView(
            stage=stage,
            layers=str(stage),
            parts=f"layer {stage}",
            nodes=[
                node(
                    (3 * stage + i) % 12,
                    stage=stage,
                    peer_id=f"{stage}-{i}",
                    name="w" * 80 if stage == 2 else f"node-{stage}-{i}",
                    waiting_for="w" * 200 if stage == 3 else "",
                    queue_depth=1000 * stage,
                )
                for i in range(1 + stage % 3)
            ],
        )
        for stage in range(7)
    ]
    return training_view(
        boundaries=[boundary(b) for b in range(6)],
        stages=stages,
        nodes=[n for stage in stages for n in stage.nodes],
        name="long-name-" * 4,
        waiting_for="w" * 290,
        total_steps=1_000_000,
        weights_digest="0123456789abcdef" * 4,
        steps_lost=1,
    )


class FakeSource:
    """A `ViewSource` that a test moves by hand; records which levers were pulled."""

    def __init__(self, view: RunView | None = None) -> None:
        self._view = view or training_view()
        self._version = 0
        self._moved = asyncio.Condition()
        self.pulled: list[str] = []
        self.refusal: Exception | None = None
        self.waiters = 0

    def view(self) -> RunView:
        return self._view

    async def show(self, change: RunView | Callable[[RunView], RunView]) -> None:
        """Replace the view and wake everybody who waits for a change."""
        async with self._moved:
            self._view = change if isinstance(change, RunView) else change(self._view)
            self._version += 1
            self._moved.notify_all()

    async def changed(self, after_version: int) -> int:
        async with self._moved:
            self.waiters += 1
            try:
                await self._moved.wait_for(lambda: self._version > after_version)
            finally:
                self.waiters -= 1
            return self._version

    async def _pull(self, what: str) -> None:
        if self.refusal:
            raise self.refusal
        self.pulled.append(what)

    async def pause(self) -> None:
        await self._pull("pause")

    async def resume(self) -> None:
        await self._pull("resume")

    async def stop(self) -> None:
        await self._pull("stop")

    async def snapshot(self) -> None:
        await self._pull("snapshot")

    async def join_link(self) -> str:
        return "shoal://join/secret-link"

    async def dismiss(self, peer_id: PeerId) -> None:
        await self._pull(f"dismiss {peer_id}")


REFUSAL = ConfigError("run: finished already. Launch another one.")


def one_more_step(view: RunView) -> RunView:
    """The view after the next step."""
    step = view.step + 1
    history: Sequence[StepPoint] = [*view.history, point(step)]
    event = EventLine(
        time_s=view.now_s + 3, kind="committed", text=f"Step {step} committed, {step} in all"
    )
    return view.model_copy(
        update={
            "step": step,
            "loss": loss_at(step),
            "now_s": view.now_s + 3,
            "history": history,
            "events": [*view.events, event],
        }
    )
