# SPDX-License-Identifier: Apache-2.0
"""What outlives a fake process: snapshots, promises and boundary logs."""

import hashlib
from pathlib import Path

from shoal.coordinator.snapshots import SnapshotStore
from shoal.node.promises import Promised, Promises
from shoal.protocol.ids import RunId
from shoal.protocol.step_record import SignedRecord

from .fake_run import AUTHORITY
from .fake_training import State

BoundaryLog = dict[tuple[int, int], dict[tuple[str, int], int]]
"""(step, stage) -> (direction, microbatch) -> value."""


class FakeSnapshots(SnapshotStore):
    """Snapshots in memory: step -> stage -> (weights, moments)."""

    def __init__(self) -> None:
        self.full = False
        """Whether the disk has no room."""
        self.incoming: dict[int, dict[int, State]] = {}
        self.complete: dict[int, dict[int, State]] = {}

    def put(self, step: int, stage: int, state: State, num_stages: int) -> bool:
        self.incoming.setdefault(step, {})[stage] = state
        if len(self.incoming[step]) == num_stages:
            self.complete[step] = self.incoming.pop(step)
        return step in self.complete

    def complete_steps(self) -> list[int]:
        return sorted(self.complete)

    def weights_sha256(self, step: int) -> str:
        return hashlib.sha256(repr(sorted(self.complete[step].items())).encode()).hexdigest()

    def prune(self, keep: int = 2) -> list[int]:
        removed = sorted(self.complete)[:-keep]
        for step in removed:
            del self.complete[step]
        return removed


class MemoryPromises(Promises):
    """A node's promises, on a disk that is a variable."""

    def __init__(self, run_id: RunId) -> None:
        super().__init__(Path("/nowhere"), run_id, AUTHORITY.fingerprint)
        self.trust(AUTHORITY.certificate_der)

    def _write(self, promised: Promised) -> None:
        self._promised = promised

    def _write_record(self, record: SignedRecord) -> None:
        self.on_disk = record

    def _read_record(self) -> SignedRecord | None:
        return getattr(self, "on_disk", None)

    def restarted(self) -> None:
        """Only what is on the disk is left."""
        self._records.clear()
        self.trust(AUTHORITY.certificate_der)
