# SPDX-License-Identifier: Apache-2.0
"""Single faults and pairs as the tests tried them, as rows for docs/reliability.md.

    SHOAL_FAULT_REPORT=report.jsonl scripts/test --full tests/swarm/test_faults.py
    python benchmarks/fault_report.py report.jsonl

A case stands in the report once its test has found every step since the fault equal to the
undisturbed run's; one that didn't survive is a failed test, and not here.
"""

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from figures import table


def kind(case: dict[str, Any]) -> str:
    """ "kill, a node", or the name of a kind of pairs."""
    if case["kind"] != "single":
        return str(case["kind"])
    whom, _, what = case["faults"][0].partition(": ")
    action = what.partition(" ")[2]
    return f"{action}, {'the coordinator' if whom.startswith('coordinator') else 'a node'}"


def markdown(cases: Iterable[dict[str, Any]]) -> str:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        kinds.setdefault(kind(case), []).append(case)
    rows = []
    for name, group in sorted(kinds.items()):
        steps = [case["steps_to_next_commit"] for case in group]
        rows.append(
            (
                name,
                len(group),
                f"{statistics.median(steps):.1f}",
                f"{max(steps):.1f}",
                f"{max(case['seconds_to_next_commit'] for case in group):.1f} s",
                sum(case["rolled_back"] for case in group),
                sum(case["replayed"] for case in group),
                sum(case["steps_recomputed"] for case in group),
                sum(case["microbatches_moved"] for case in group),
            )
        )
    header = (
        "fault", "survived", "median, steps", "worst, steps", "worst", "rollbacks", "replays",
        "steps recomputed", "microbatches moved",
    )  # fmt: skip
    return table(header, rows)


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python benchmarks/fault_report.py REPORT.jsonl", file=sys.stderr)
        return 2
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    print(markdown(json.loads(line) for line in lines if line.strip()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
