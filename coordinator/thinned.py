# SPDX-License-Identifier: Apache-2.0
"""Any number of steps in a bounded number of points, for charts."""

from collections.abc import Iterable

from shoal.coordinator.step_row import StepRow


class Thinned:
    """Keeps one row of every `stride` consecutive steps: one that validated where there is one,
    else the first. The stride doubles whenever there are more than `limit` rows."""

    def __init__(self, limit: int, rows: Iterable[StepRow] = (), *, stride: int = 1) -> None:
        self._limit = limit
        self.stride = stride
        self._kept: dict[int, StepRow] = {}
        for row in rows:
            self.add(row)

    def add(self, row: StepRow) -> None:
        self._put(row)
        while len(self._kept) > self._limit:
            self.stride *= 2
            rows, self._kept = self._kept.values(), {}
            for kept in rows:
                self._put(kept)

    def rows(self) -> list[StepRow]:
        """Ascending by step."""
        return [self._kept[bucket] for bucket in sorted(self._kept)]

    def _put(self, row: StepRow) -> None:
        before = self._kept.get(row.step // self.stride)
        if before is None or (before.validation_loss is None and row.validation_loss is not None):
            self._kept[row.step // self.stride] = row
