# SPDX-License-Identifier: Apache-2.0
"""A stage of a fake swarm that lost its last node, computed again out of its neighbours' logs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2 as pb
from shoal.protocol.scale import coarsened

from .fake_training import MASK, State, advanced, applied, mix, scaled

if TYPE_CHECKING:
    from .fake_swarm import FakeSwarm


class LogHole(Exception):
    """A boundary log lacks something; `args` says whose."""


class OtherBits(Exception):
    """A replayed step does not come out as it was recorded."""


@dataclass(frozen=True)
class Replayed:
    """A step that was computed again."""

    state: State
    sent: list[tuple[str, int, int]]


def replayed(swarm: "FakeSwarm", assign: pb.Assign, state: State, step: pb.ReplayStep) -> Replayed:
    """One step on top of `state`. Raises `LogHole` and `OtherBits`."""
    weights, moments = state
    total, sent = _summed(swarm, assign, weights, step)
    moments = advanced(moments, total)
    after = applied(weights, moments, step.commit.step)
    wrong = step.has_weights_digest and after != step.weights_digest
    if total != step.commit.sums_digest or wrong:
        raise OtherBits
    return Replayed((after, moments), sent)


def _summed(
    swarm: "FakeSwarm", assign: pb.Assign, weights: int, step: pb.ReplayStep
) -> tuple[int, list[tuple[str, int, int]]]:
    number, stage, total = step.commit.step, assign.stage, 0
    inputs = _logged(swarm, assign.replay, (number, stage - 1), "forward", step.inputs)
    gradients = _logged(swarm, assign.replay, (number, stage + 1), "backward", step.gradients)
    sent: list[tuple[str, int, int]] = []
    for m in range(swarm.run.spec.batch.microbatches):
        x = inputs[m] if stage else 0
        is_last = stage == swarm.num_stages - 1
        gradient = mix(number, m, stage, weights, x, 0 if is_last else gradients[m], 1)
        total = (total + gradient) & MASK
        if not is_last:
            sent.append(("forward", m, mix(number, m, stage, weights, x)))
        if stage:
            sent.append(("backward", m, gradient))
    exponent = step.commit.scale_exponent
    return scaled(total, coarsened(swarm.run.spec.tokens_per_step, exponent)), sent


def _logged(
    swarm: "FakeSwarm",
    replay: pb.Replay,
    key: tuple[int, int],
    kind: str,
    sources: Iterable[pb.BoundarySource],
) -> dict[int, int]:
    """By microbatch, what the logs of its sources have of a (step, stage)."""
    found = {}
    for source in sources:
        peer_id = PeerId(replay.logs[source.log].peer_id)
        node = swarm.nodes.get(peer_id)
        if node is None or node.frozen:
            raise LogHole(peer_id)
        entries = node.log.get(key, {})
        for m in source.microbatches:
            if (kind, m) not in entries:
                raise LogHole(peer_id)
            found[m] = entries[kind, m] ^ node.corrupt_log
    return found
