# SPDX-License-Identifier: Apache-2.0
"""What tests ask of a fake swarm."""

from collections.abc import Callable
from dataclasses import replace

from shoal.coordinator.run_view import ConductorView
from shoal.coordinator.state import RunState
from shoal.coordinator.step_runner import Phase
from shoal.protocol.ids import Incarnation
from shoal.protocol.scale import coarsened

from .fake_node import FakeNode
from .fake_swarm import FakeSwarm
from .fake_training import reference


def assert_undisturbed(swarm: FakeSwarm) -> None:
    """Records and weights are those of a run in which nothing happened; and it can be shown."""
    state = swarm.conductor.state
    tokens = swarm.run.spec.tokens_per_step
    expected = reference(
        swarm.run, {s: coarsened(tokens, r.scale_exponent) for s, r in state.records.items()}
    )
    assert state.records.keys() == set(range(1, state.highest_step + 1))
    for step, record in state.records.items():
        assert record.sums_digests == expected.sums[step]
        for parts in record.contributions:
            ids = sorted(m for ids in parts.values() for m in ids)
            assert ids == list(range(swarm.run.spec.batch.microbatches))
    for step, weights in state.weights_digests.items():
        assert weights == expected.weights[step]
    assert "contradiction" not in kinds(swarm)
    assert ConductorView(swarm.conductor, lambda: "link").view().steps_lost == 0


def kinds(swarm: FakeSwarm) -> list[str]:
    return [kind for _, kind, _ in swarm.conductor.events]


def lines(swarm: FakeSwarm) -> str:
    return "\n".join(text for *_, text in swarm.conductor.events)


def in_step(swarm: FakeSwarm, step: int = 2) -> Callable[[], bool]:
    return lambda: (
        swarm.conductor.phase is Phase.STEP
        and swarm.conductor.state.step == step - 1
        and swarm.conductor.ledger is not None
        and swarm.conductor.ledger.receipts_done() > 2
    )


def untermed(state: RunState) -> RunState:
    """What a coordinator that starts again must find as it was: everything but its term."""
    return replace(state, term=0, last_incarnation=Incarnation(0))


def say_farewell(node: FakeNode) -> None:
    node.leave()
