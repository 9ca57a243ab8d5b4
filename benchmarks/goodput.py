# SPDX-License-Identifier: Apache-2.0
"""How much work still gets done with a fault every 20, 60 and 300 seconds.

    python benchmarks/goodput.py

Undisturbed stretches and stretches under faults follow each other in one session; goodput is the
ratio of their committed tokens a second. At 20 and 60 s it is measured. A stretch with enough
faults 300 s apart would take hours: that row is computed from the time lost per fault, and says so.
Prints Markdown rows for docs/reliability.md.
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

from figures import Loss, computed_twice, fault_table, loss, machine, table
from outcomes import Result, Stretch
from session import Plan, run_session

from shoal.protocol.errors import ShoalError

MEASURED_EVERY_S = (20.0, 60.0)
COMPUTED_EVERY_S = 300.0


def stretches(faults: int, rounds: int, quiet_s: float) -> list[Stretch]:
    """Enough time for about so many faults at each rate, in `rounds` turns."""
    quiet = Stretch(quiet_s)
    plan = [quiet]
    for _ in range(rounds):
        for every_s in MEASURED_EVERY_S:
            plan += [Stretch(every_s * faults / rounds, every_s), quiet]
    return plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=8, help="at each rate, about")
    parser.add_argument("--rounds", type=int, default=2, help="turns to spread them over")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds undisturbed between")
    parser.add_argument("--nodes", type=int, default=4, choices=(2, 3, 4, 5, 6))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", choices=("tiny", "demo"), default="demo")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    parser.add_argument("--folder", type=Path, help="keep the swarm's files here")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="shoal-goodput-"))
    plan = Plan(folder.absolute(), size=arguments.size, nodes=arguments.nodes, seed=arguments.seed)
    begun_s = time.time()

    def say(text: str) -> None:
        print(f"{time.time() - begun_s:7.1f} s  {text}", file=sys.stderr, flush=True)

    logging.getLogger("httpx").setLevel(logging.WARNING)
    blocks = stretches(arguments.faults, arguments.rounds, arguments.quiet)
    try:
        result = asyncio.run(run_session(plan, blocks, say))
    except ShoalError as error:
        print(f"goodput: {error} (logs: {folder})", file=sys.stderr)
        return 1
    print(markdown(plan, result))
    if arguments.json is not None:
        report = {
            "machine": machine(),
            "size": plan.size,
            "nodes": plan.nodes,
            "seed": plan.seed,
            "step_s": result.step_s,
            "computed_twice": computed_twice(result),
            "rates": {every_s: asdict(cost) for every_s, cost in costs(result).items()},
            "stretches": [asdict(outcome) for outcome in result.outcomes],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def costs(result: Result) -> dict[float, Loss]:
    quiet = [o for o in result.outcomes if o.every_s is None]
    return {
        every_s: loss(quiet, [o for o in result.outcomes if o.every_s == every_s])
        for every_s in MEASURED_EVERY_S
    }


def markdown(plan: Plan, result: Result) -> str:
    rows: list[tuple[object, ...]] = []
    by_rate = costs(result)
    for every_s, cost in by_rate.items():
        rows.append(
            (f"{every_s:.0f} s", f"{cost.goodput:.1%}", cost.num_faults, f"{cost.lost_s:.2f} s",
             "measured")
        )  # fmt: skip
    rarest = by_rate[MEASURED_EVERY_S[-1]]
    rare = min(1.0, 1 - rarest.lost_s / COMPUTED_EVERY_S)
    rows.append(
        (f"{COMPUTED_EVERY_S:.0f} s", f"{rare:.1%}", "–",
         f"{rarest.lost_s:.2f} s", f"computed from the time lost per fault at "
         f"{MEASURED_EVERY_S[-1]:.0f} s")
    )  # fmt: skip
    return "\n\n".join(
        [
            f"Measured on {machine()}; {plan.nodes} nodes, {plan.size} model, an undisturbed step "
            f"{result.step_s:.3f} s, {result.steps:,} steps, work computed twice "
            f"{computed_twice(result):.2%}:",
            table(("a fault every", "goodput", "faults", "time lost per fault", "how"), rows),
            fault_table(result.faults, result.step_s),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
