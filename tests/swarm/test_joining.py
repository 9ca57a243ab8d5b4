# SPDX-License-Identifier: Apache-2.0
"""A node joins while the run goes on. Its state comes in chunks from whoever is left."""

import re
from pathlib import Path

import pytest

from shoal.coordinator.dashboard.views import NodeView, RunView
from shoal.coordinator.state import RolledBack, StageAssigned, StageReplayed, StepCommitted
from shoal.protocol.ids import Incarnation

from .harness import ENDLESS, Process, Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

# About 10 MB of weights, twice as much of moments; some steps a second.
LARGE = {"dim": 256, "num_layers": 2, "ffn_dim": 1024}
SLOW = ("--donate-mb-per-s", "1")
_GOT = re.compile(
    r"got (the \w+) of stage \d+ at step (\d+): (\d+) bytes fetched, (\d+) bytes were there"
)


def fetched(process: Process) -> list[tuple[str, int, int, int]]:
    """(what, step, bytes fetched, bytes that were there) of every fetch, as the node logs them."""
    text = process.log.read_text(encoding="utf-8", errors="replace")
    return [(w, int(s), int(f), int(r)) for w, s, f, r in _GOT.findall(text)]


def assigned(swarm: Swarm, process: Process) -> list[StageAssigned]:
    return [e for e in swarm.events(StageAssigned) if e.peer_id == process.peer_id]


def counts(record: StepCommitted, incarnation: Incarnation) -> bool:
    return any(part.get(incarnation) for part in record.contributions)


async def of_tier(swarm: Swarm, process: Process, tier: str) -> NodeView:
    def holds(view: RunView) -> bool:
        return any(
            n.pid == process.pid and n.tier == tier and n.state in ("ready", "training")
            for n in view.nodes
        )

    view = await swarm.see(holds, f"{process.name} is a {tier}")
    return swarm.node_in(view, process)


async def warming(swarm: Swarm, process: Process, *, least: int = 0) -> int:
    """Wait until the node has so many percent of its weights; returns how many it has."""
    share = re.compile(r"warming up: (\d+) % of the weights")

    def percent(view: RunView) -> int:
        node = next((n for n in view.nodes if n.pid == process.pid), None)
        found = share.search(node.waiting_for) if node else None
        return int(found[1]) if found else -1

    view = await swarm.see(lambda v: percent(v) >= least, f"{process.name} has {least} %")
    return percent(view)


async def test_a_node_joins_while_steps_are_made_and_becomes_a_holder(tmp_path: Path) -> None:
    run = spec(steps=ENDLESS, pipeline={"replicas": 1})
    async with Swarm(tmp_path, run) as swarm:
        await swarm.start("n0", "n1")
        joiner = swarm.start_node("n2")
        node = await of_tier(swarm, joiner, "holder")
        incarnation = Incarnation(node.incarnation)
        await swarm.wait_until(
            lambda: any(counts(r, incarnation) for r in swarm.events(StepCommitted)),
            "its work counts",
        )
        log = swarm.log()
        begun = next(
            i
            for i, event in enumerate(log)
            if isinstance(event, StageAssigned) and event.incarnation == incarnation
        )
        records = [e for e in log[begun:] if isinstance(e, StepCommitted)]
        assert not counts(records[0], incarnation), "the run waited for it"
        assert next(what for what, *_ in fetched(joiner)) == "the weights"
        assert "the moments" in {what for what, *_ in fetched(joiner)}

        # It holds all that its stage needs: the other one may go.
        view = await swarm.view()
        assert node.stage is not None
        other = next(n for n in view.stages[node.stage].nodes if n.pid != joiner.pid)
        swarm.kill(swarm.process_of(other))
        await swarm.advance(5)
        assert not swarm.events(RolledBack)
        await swarm.stop_and_check()


async def test_what_is_fetched_is_kept_though_donor_and_joiner_die_and_a_worker_saves_no_stage(
    tmp_path: Path,
) -> None:
    run = spec(
        steps=ENDLESS,
        model=LARGE,
        pipeline={"stages": 1, "replicas": 2},
        batch={"microbatches": 2, "microbatch_size": 1},
        fault={"snapshot_every": 5},
    )
    async with Swarm(tmp_path, run) as swarm:
        swarm.start_coordinator()
        donors = [swarm.start_node(name, arguments=SLOW) for name in ("n0", "n1")]
        await swarm.committed(2)
        joiner = swarm.start_node("n2")
        await warming(swarm, joiner, least=20)
        first = assigned(swarm, joiner)
        swarm.kill(joiner)

        joiner = swarm.start_node("n2")
        await warming(swarm, joiner, least=20)
        swarm.kill(donors[0])
        step = swarm.last_step
        await of_tier(swarm, joiner, "worker")
        assert swarm.last_step > step, "the run waited for it"
        what, _, new, old = fetched(joiner)[0]
        assert what == "the weights"
        assert old > 0, "it began again"
        assert new > 0
        first_fetch = old + new
        assert len(assigned(swarm, joiner)) == len(first) + 1, "a donor's death began it again"

        # It works, though its moments are on their way; alone it can't go on.
        await swarm.advance(2)
        pulled = [new for what, _, new, _ in fetched(joiner) if what == "the weights"][1:]
        assert pulled, "it pulled no weights"
        assert first_fetch <= 1.3 * pulled[0], "chunks were fetched more than about once"
        assert not any(what == "the moments" for what, *_ in fetched(joiner))
        swarm.kill(donors[1])
        await of_tier(swarm, joiner, "holder")
        assert swarm.events(RolledBack) or swarm.events(StageReplayed), "a worker saved it"
        await swarm.advance(3)
        await swarm.stop_and_check()
