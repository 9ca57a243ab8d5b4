# SPDX-License-Identifier: Apache-2.0
"""A swarm under faults for a long time: does anything grow, how much work still gets done, and are
the weights at the end those of an undisturbed run?

    python benchmarks/soak.py --minutes 30 --every 20

Prints Markdown rows for docs/reliability.md. Exit code 1: memory, open files or the event log grow
beyond the limits in process_samples.py and figures.py, or the weights differ.
"""

import argparse
import asyncio
import json
import logging
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exactness import check_exact
from figures import (
    MAX_LOG_BYTES_PER_STEP,
    computed_twice,
    fault_table,
    log_bytes_per_step,
    loss,
    machine,
    memory_table,
    table,
)
from outcomes import Result, Stretch
from process_samples import growth
from session import Plan, run_session

from shoal.protocol.errors import ShoalError

BLOCK_S = 300.0
"""Under faults at a stretch, between two undisturbed ones of a quarter of that."""


def stretches(minutes: float, every_s: float) -> list[Stretch]:
    total_s = 60 * minutes
    count = max(1, round(total_s / BLOCK_S))
    block_s = total_s / count
    quiet = Stretch(block_s / 4)
    blocks = [quiet]
    for _ in range(count):
        blocks += [Stretch(block_s, every_s), quiet]
    return blocks


SHORT = [Stretch(4.0), Stretch(24.0, 3.5), Stretch(4.0)]


def main() -> int:
    arguments = parse()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="shoal-soak-"))
    plan = Plan(
        folder.absolute(),
        size=arguments.size,
        nodes=arguments.nodes,
        seed=arguments.seed,
        discovery=not arguments.short,
    )
    blocks = SHORT if arguments.short else stretches(arguments.minutes, arguments.every)
    begun_s = time.time()

    def say(text: str) -> None:
        print(f"{time.time() - begun_s:7.1f} s  {text}", file=sys.stderr, flush=True)

    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        result = asyncio.run(run_session(plan, blocks, say))
    except ShoalError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    say("comparing with the undisturbed run")
    last_step, differs = (0, "") if arguments.no_compare else check_exact(plan.folder / "run")
    report = describe(plan, result, last_step, differs, compared=not arguments.no_compare)
    print(markdown(plan, result, report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if arguments.folder is None and not report["troubles"]:
        shutil.rmtree(folder, ignore_errors=True)
    for trouble in report["troubles"]:
        print(f"soak: {trouble} (logs: {folder})", file=sys.stderr)
    return 1 if report["troubles"] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0, help="under faults")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--nodes", type=int, default=4, choices=(2, 3, 4, 5, 6))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", choices=("tiny", "demo"), default="tiny")
    parser.add_argument("--short", action="store_true", help="40 seconds, for the tests")
    parser.add_argument(
        "--no-compare", action="store_true", help="don't compute the undisturbed run"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    parser.add_argument("--folder", type=Path, help="keep the swarm's files here")
    return parser.parse_args()


def describe(
    plan: Plan, result: Result, last_step: int, differs: str, *, compared: bool
) -> dict[str, Any]:
    """Everything measured, and what is wrong with it."""
    _, troubles = memory_table(result)
    per_step = log_bytes_per_step(result.log_sizes)
    if per_step is not None and per_step > MAX_LOG_BYTES_PER_STEP:
        troubles.append(f"the event log grows by {per_step:.0f} bytes a step")
    if differs:
        troubles.append(differs)
    if result.steps_lost or result.microbatches_missing or result.microbatches_double:
        troubles.append(
            f"{result.steps_lost} steps lost, {result.microbatches_missing} microbatches missing, "
            f"{result.microbatches_double} counted twice"
        )
    quiet = [o for o in result.outcomes if o.every_s is None]
    disturbed = [o for o in result.outcomes if o.every_s is not None]
    cost = loss(quiet, disturbed)
    return {
        "machine": machine(),
        "size": plan.size,
        "nodes": plan.nodes,
        "seed": plan.seed,
        "steps": result.steps,
        "compared_steps": last_step,
        "weights_equal": not differs if compared else None,
        "step_s": result.step_s,
        "goodput": cost.goodput,
        "lost_s_per_fault": cost.lost_s,
        "computed_twice": computed_twice(result),
        "restarts": result.restarts,
        "crashes": result.crashes,
        "steps_lost": result.steps_lost,
        "microbatches_missing": result.microbatches_missing,
        "microbatches_double": result.microbatches_double,
        "log_bytes_per_step": per_step,
        "faults": [asdict(fault) for fault in result.faults],
        "stretches": [
            {"every_s": o.every_s, "seconds": o.seconds, "steps": o.steps, "taken": o.taken}
            for o in result.outcomes
        ],
        "growth": [g.as_json() for life in result.sampler.lives if (g := growth(life))],
        "lives": [asdict(life) for life in result.sampler.lives],
        "log_sizes": [asdict(size) for size in result.log_sizes],
        "troubles": troubles,
    }


def markdown(plan: Plan, result: Result, report: dict[str, Any]) -> str:
    disturbed_s = sum(o.seconds for o in result.outcomes if o.every_s is not None)
    last = result.log_sizes[-1] if result.log_sizes else None
    per_step = report["log_bytes_per_step"]
    equal = "not compared"
    if report["weights_equal"] is not None:
        equal = f"yes, {report['compared_steps']:,} steps" if report["weights_equal"] else "NO"
    rows = [
        ("time under faults", f"{disturbed_s / 60:.1f} min, {plan.nodes} nodes, {plan.size} model"),
        ("steps committed", f"{result.steps:,}"),
        ("an undisturbed step", f"{result.step_s:.3f} s"),
        ("faults survived", f"{len(result.faults)}, {result.restarts} restarts"),
        ("processes that ended of themselves", result.crashes),
        ("weights of the undisturbed run", equal),
        ("goodput", f"{report['goodput']:.1%}"),
        ("time lost per fault", f"{report['lost_s_per_fault']:.2f} s"),
        ("work computed twice", f"{report['computed_twice']:.2%}"),
        (
            "event log at the end",
            f"{last.file_bytes / 1e6:.2f} MB, {last.rows:,} rows" if last else "–",
        ),
        ("event log, growth", "–" if per_step is None else f"{per_step:.0f} bytes a step"),
    ]
    memory, _ = memory_table(result)
    return "\n\n".join(
        [
            f"Measured on {report['machine']}:",
            table(("soak", ""), rows),
            fault_table(result.faults, result.step_s),
            memory,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
