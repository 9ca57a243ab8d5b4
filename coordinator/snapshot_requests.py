# SPDX-License-Identifier: Apache-2.0
"""Who was asked to store which stage's state, and when it is time to ask."""

from shoal.coordinator.assignments import Desk
from shoal.coordinator.sessions import Session
from shoal.coordinator.state import SnapshotStored
from shoal.protocol.ids import Incarnation, PeerId, Stage
from shoal.protocol.proto import coordinator_pb2

_KEPT = 2
_MAX_ASKED = 8
_LEAST_HANDOVER_S = 5.0
_DEADLINE_S = 900.0
"""After this, another holder is asked too."""

_RETRY_S = 10.0
_RETRY_LIMIT_S = 300.0


class SnapshotRequests:
    def __init__(self, desk: Desk, *, every: int) -> None:
        self._log = desk.log
        self._members = desk.members
        self._snapshots = desk.snapshots
        self._every = every
        self._asked: dict[int, dict[Stage, tuple[Incarnation, float]]] = {}
        self._took_s: float | None = None
        self.wanted = False
        """Whether to store one at the next opportunity, due or not."""
        self.trouble = ""
        """Why the store could not take the last one; empty when it could."""
        self._retry_after_s = _RETRY_S
        self._retry_at_s = 0.0
        self._refused = -1  # the step of it

    def is_stored(self, step: int) -> bool:
        """The state at step 0 needs no snapshot."""
        return not step or step in self._snapshots.complete_steps()

    def handover_s(self) -> float | None:
        """How long to allow for storing a stage: three times what the last snapshot took."""
        return None if self._took_s is None else max(_LEAST_HANDOVER_S, 3 * self._took_s)

    def ask_if_due(self) -> None:
        """Between steps."""
        step = self._log.state.step
        if self.is_stored(step):
            self.wanted = False
            return
        if step not in self._log.state.weights_digests:
            return  # replicas have yet to agree on what is to be stored
        if self._lost_a_request(step):
            self.wanted = True
        if (self.wanted or step % self._every == 0) and self.ask():
            self.wanted = False

    def ask(self) -> bool:
        """One holder of every stage sends its state to the store; asked once each. True when
        every stage has somebody who was asked."""
        step, now_s = self._log.state.step, self._log.clock()
        if self.trouble and now_s < self._retry_at_s:
            return False
        if self._refused == step:
            self._refused = -1
            self._asked.pop(step, None)
        asked = self._asked.setdefault(step, {})
        self._forget_old(step)
        for stage in self._members.stages:
            if stage in asked and not self._is_void(*asked[stage]):
                continue
            holders = [s for s in self._members.holders(stage) if not self._has_failed(s)]
            if holders:
                before, _ = asked.get(stage, (None, 0.0))
                chosen = min(
                    holders,
                    key=lambda s: (s.incarnation == before, s.heartbeat.queue_depth, s.peer_id),
                )
                asked[stage] = chosen.incarnation, now_s
                chosen.send(snapshot=coordinator_pb2.TakeSnapshot(step=step))
        return len(asked) == len(self._members.stages)

    def _forget_old(self, but: int) -> None:
        for oldest in sorted(self._asked.keys() - {but})[:-_MAX_ASKED]:
            del self._asked[oldest]

    def unasked(self) -> list[Stage]:
        asked = self._asked.get(self._log.state.step, {})
        return [s for s in self._members.stages if s not in asked or self._is_void(*asked[s])]

    def _is_void(self, incarnation: Incarnation, asked_s: float) -> bool:
        late = self._log.clock() - asked_s > _DEADLINE_S
        session = self._members.by_incarnation(incarnation)
        return late or session is None or session.snapshot_failed_s >= asked_s

    def _has_failed(self, session: Session) -> bool:
        """Whether it could not store a snapshot just now, and is left alone for a while."""
        return self._log.clock() - session.snapshot_failed_s < _RETRY_S

    def why_unasked(self, stage: Stage) -> str:
        """For people."""
        step = self._log.state.step
        failed = [s for s in self._members.holders(stage) if self._has_failed(s)]
        if failed:
            return (
                f"{failed[0].name} could not store the snapshot of stage {stage}, step {step}: "
                f"{failed[0].snapshot_trouble} It is asked again within {_RETRY_S:.0f} s"
            )
        return f"stage {stage} needs a node that holds step {step} for the snapshot"

    def _lost_a_request(self, step: int) -> bool:
        """Whether a snapshot asked for earlier will never be complete; it is forgotten then."""
        void = [
            earlier
            for earlier, asked in self._asked.items()
            if earlier != step and any(self._is_void(*request) for request in asked.values())
        ]
        for earlier in void:
            del self._asked[earlier]
        return bool(void)

    def expects(self, peer_id: PeerId, step: int, stage: int) -> bool:
        """Whether this node was asked for this stage's snapshot and has not been fenced since."""
        session = self._members.sessions.get(peer_id)
        incarnation, _ = self._asked.get(step, {}).get(Stage(stage), (None, 0.0))
        return (
            session is not None and incarnation is not None and (incarnation == session.incarnation)
        )

    def refused(self, step: int, reason: str) -> None:
        """The store could not take a stage's state, through no fault of the node's. Asked again
        after a while, longer each time. Other stages' uploads that are under way stay expected."""
        if self._refused == step and self._log.clock() < self._retry_at_s:
            return  # of another stage
        self._refused = step
        self._retry_after_s = (
            min(2 * self._retry_after_s, _RETRY_LIMIT_S) if self.trouble else (_RETRY_S)
        )
        self._retry_at_s = self._log.clock() + self._retry_after_s
        self.trouble, self.wanted = reason, True
        self._log.say(
            "snapshot_failed",
            f"the snapshot of step {step} could not be stored: {reason} "
            f"One is tried again in {self._retry_after_s:.0f} s",
        )

    def stored(self, step: int) -> None:
        """The store has every stage's state at `step`. Raises `StorageError`."""
        self.trouble = ""
        asked = self._asked.pop(step, {})
        if asked:
            self._took_s = self._log.clock() - min(asked_s for _, asked_s in asked.values())
        self._forget_old(step)
        if step > self._log.state.snapshot_step:
            self._log.record(SnapshotStored(time_s=self._log.clock(), step=step))
            self._log.say("snapshot", f"snapshot of step {step} is stored")
            self._snapshots.prune(keep=_KEPT)
            self._members.truncate_logs()
