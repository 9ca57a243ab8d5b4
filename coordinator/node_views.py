# SPDX-License-Identifier: Apache-2.0
"""The nodes of a run as people see them, attached or gone, and who contributed how much."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from shoal.coordinator.conductor import Conductor
from shoal.coordinator.dashboard.views import NodeState, NodeView
from shoal.coordinator.sessions import Session
from shoal.coordinator.state import StepCommitted
from shoal.coordinator.step_runner import Phase
from shoal.protocol.ids import PeerId

_MAX_CACHED = 10_000


class NodeViews:
    """Counts every record once, however often it is asked."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._compacted = 0  # rows of the history when the following was begun
        self._counted: tuple[int, Counter[PeerId]] = (0, Counter())
        self._earlier: dict[PeerId, int] = {}  # slots in the history

    def views(self, records: Sequence[StepCommitted], now_s: float) -> list[NodeView]:
        """`records` are those of steps without a row in the history (`run_view.new_records`)."""
        conductor = self._conductor
        if self._compacted != conductor.history.totals.num_steps:
            self._compacted, self._earlier = conductor.history.totals.num_steps, {}
            self._counted = (0, Counter())
        fresh = self._contributions(records)
        total = conductor.history.totals.counted + sum(fresh.values()) or 1
        sessions = [
            *((s, False) for s in conductor.sessions.values()),
            *((s, True) for s in conductor.gone.values()),
        ]
        contributed = {s.peer_id: fresh[s.peer_id] + self._slots(s.peer_id) for s, _ in sessions}
        return [
            NodeView(
                peer_id=s.peer_id,
                name=s.name,
                incarnation=s.last_incarnation,
                stage=s.last_stage if gone else s.stage,
                state=self._node_state(s, gone=gone),
                tier=_tier(s),
                leaves_within_s=None if gone else _leaves_within_s(s, now_s),
                device=s.hello.hardware.device or "cpu",
                device_name=s.hello.hardware.device_name,
                pid=s.hello.pid,
                address=s.hello.address,
                queue_depth=s.heartbeat.queue_depth,
                microbatches_per_s=s.speed,
                memory_bytes=s.heartbeat.memory_bytes,
                bytes_sent=s.heartbeat.bytes_sent,
                bytes_received=s.heartbeat.bytes_received,
                waiting_for="" if gone else _waits_for(s),
                contributed_microbatches=contributed[s.peer_id],
                contributed_share=contributed[s.peer_id] / total,
                last_seen_s=s.last_heartbeat_s,
                discovered_peers=s.heartbeat.discovered_peers,
                log_bytes=s.heartbeat.log_bytes,
                log_oldest_step=s.heartbeat.log_oldest_step,
                marks=conductor.marks[s.peer_id],
            )
            for s, gone in sorted(sessions, key=lambda pair: pair[0].attached_s)
        ]

    def _contributions(self, records: Sequence[StepCommitted]) -> Counter[PeerId]:
        count, counted = self._counted
        peers = self._conductor.state.peers
        for record in records[count:]:
            for stage in record.contributions:
                for incarnation, ids in stage.items():
                    counted[peers[incarnation]] += len(ids)
        self._counted = (len(records), counted)
        return counted

    def _slots(self, peer_id: PeerId) -> int:
        if peer_id not in self._earlier:
            if len(self._earlier) > _MAX_CACHED:
                self._earlier.clear()
            self._earlier[peer_id] = self._conductor.history.slots_of(peer_id)
        return self._earlier[peer_id]

    def _node_state(self, session: Session, *, gone: bool) -> NodeState:
        if gone:
            went = session.farewell is not None or session.dismissed or self._conductor.ended
            return "left" if went else "fenced"
        if session.state == "attached":
            return "joining"
        if session.state == "ready" and self._conductor.phase in (Phase.STEP, Phase.APPLYING):
            ledger = self._conductor.ledger
            if ledger is not None and ledger.participates(session.incarnation):
                return "training"
        return session.state


def _waits_for(session: Session) -> str:
    leaves = session.last_wait if session.farewell is not None else ""
    return session.placement or leaves or session.heartbeat.waiting_for


def _leaves_within_s(session: Session, now_s: float) -> float | None:
    if session.farewell is None or session.leave_by_s is None:
        return None
    return max(0.0, session.leave_by_s - now_s)


def _tier(session: Session) -> Literal["", "worker", "holder"]:
    if session.state not in ("ready", "leaving"):
        return ""
    return "holder" if session.tier == "holder" else "worker"
