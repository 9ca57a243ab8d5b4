# SPDX-License-Identifier: Apache-2.0
"""Whether a run that was disturbed has the weights of an undisturbed one: all of its steps are
computed again, in one process, by the reference that the tests use."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from shoal.coordinator.export import read_run
from shoal.coordinator.run_view import audit
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.sqlite_store import read_log_and_history
from shoal.coordinator.state import StepCommitted
from shoal.coordinator.step_row import StepRow

_REFERENCE = Path(__file__).parents[1] / "tests" / "swarm" / "reference.py"


def check_exact(run_folder: Path) -> tuple[int, str]:
    """(last step, what differs); nothing differs in an empty text. The run must have been stopped
    in order, so that its last step has a snapshot."""
    run = read_run(run_folder)
    stored, rows = read_log_and_history(run_folder / "events.sqlite")
    records = [
        StepCommitted.model_validate(event.payload)
        for event in stored
        if event.kind == "step_committed"
    ]
    steps: list[StepRow | StepCommitted] = [*rows, *records]
    snapshots = SnapshotStore(run_folder, run, read_only=True)
    last = snapshots.newest() or 0
    if not last:
        return 0, "no step has a snapshot, so that there is nothing to compare"
    lacking = set(range(1, last + 1)) - {step.step for step in steps}
    if lacking:
        return last, f"{len(lacking)} steps have no record, among them step {min(lacking)}"
    missing, double = audit(run, records)
    missing += sum(row.missing for row in rows)
    double += sum(row.double for row in rows)
    if missing or double:
        return last, f"{missing} microbatches are missing, {double} were counted twice"
    reference = _load_reference().Reference(run, run_folder)
    for step in sorted(steps, key=lambda step: step.step):
        if step.sums_digests != reference.truth(step.step).sums_digests:
            return last, f"the sums of step {step.step} differ"
    if snapshots.weights_sha256(last) != reference.weights_sha256(last):
        return last, f"the weights after step {last} differ"
    return last, ""


def _load_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("undisturbed_reference", _REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["undisturbed_reference"] = module
    spec.loader.exec_module(module)
    return module
