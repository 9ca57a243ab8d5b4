# SPDX-License-Identifier: Apache-2.0
"""A stage is computed again out of its neighbours' logs, to the bit; what logs lack is named."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import torch

from shoal.compression.codec import CodecContext, Leg
from shoal.compression.registry import parse_boundary
from shoal.node.boundary_fetch import BoundaryFetch
from shoal.node.boundary_log import BoundaryLog
from shoal.node.hardware import Device
from shoal.node.log_file import Sent
from shoal.node.logged_boundaries import LoggedBoundaries
from shoal.node.peer_service import PeerService
from shoal.node.replay import StageReplay
from shoal.node.stage import StageRuntime
from shoal.node.stage_worker import StageWorker
from shoal.node.swarm_view import SwarmView
from shoal.protocol.costs import boundary_shape
from shoal.protocol.errors import (
    BoundaryHoleError,
    ImpossibleLeaseError,
    MalformedFrameError,
    ProtocolError,
    ReplayMismatchError,
    WrongRunError,
)
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2, peer_pb2, types_pb2
from shoal.protocol.scale import scale_exponent

from .loopback import Loopback, member
from .tiny_run import tiny_run

torch.set_num_threads(1)

STAGES, MICROBATCHES, STEPS = 3, 3, 4
RUN = tiny_run(
    STAGES, microbatches=MICROBATCHES, microbatch_size=2, boundary="fwd=bf16;bwd=int8:g16"
)
BOUNDARY = parse_boundary(RUN.spec.pipeline.boundary)
SHAPE = boundary_shape(RUN.spec)
CPU = torch.device("cpu")
LEARNING_RATE = 1e-2
LOGGED_BY = PeerId("a" * 26)
REPLAYS = PeerId("b" * 26)


class Tokens:
    """Samples as a function of step and microbatch."""

    async def ensure_training(self, step: int, microbatches: object) -> None: ...

    def training(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        both = torch.randint(0, 257, (2, 2, 8), generator=generator)
        return both[0], both[1]


@dataclass
class Truth:
    """What happened in the run: computed by the stages' runtimes alone."""

    sent: dict[tuple[int, int], list[Sent]] = field(default_factory=dict)
    """(step, stage) -> what it sent."""
    steps: dict[int, list[coordinator_pb2.ReplayStep]] = field(default_factory=dict)
    """By stage."""
    states: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    """(stage, step) -> tensors."""


def cross(tensor: torch.Tensor, step: int, m: int, boundary: int, leg: Leg) -> tuple[Any, Any]:
    codec = BOUNDARY.forward if leg == "forward" else BOUNDARY.backward
    context = CodecContext(RUN.spec.seed, step, m, boundary, leg)
    payload = codec.encode(tensor, context)
    return payload, codec.decode(payload, SHAPE, context)


def compute() -> Truth:
    truth, tokens = Truth(), Tokens()
    stages = [StageRuntime(RUN, s, device=CPU, compute_dtype="fp32") for s in range(STAGES)]
    for stage in stages:
        stage.initialise()
    exponent = scale_exponent(RUN.spec.tokens_per_step)
    for step in range(1, STEPS + 1):
        for stage in stages:
            truth.states[stage.spec.stage, step - 1] = stage.state_tensors()
            stage.begin_step(step, exponent, 1.0)
        for m in range(MICROBATCHES):
            x, targets = tokens.training(step, m)
            for s in range(STAGES - 1):
                payload, x = cross(stages[s].forward(m, x), step, m, s, "forward")
                truth.sent.setdefault((step, s), []).append(Sent("forward", m, payload))
            _, gradient = stages[-1].forward_backward_loss(m, x, targets)
            for s in range(STAGES - 1, 0, -1):
                assert gradient is not None
                payload, received = cross(gradient, step, m, s - 1, "backward")
                truth.sent.setdefault((step, s), []).append(Sent("backward", m, payload))
                gradient = stages[s - 1].backward(m, received)
        for s, stage in enumerate(stages):
            commit = coordinator_pb2.Commit(
                step=step, learning_rate=LEARNING_RATE, clip_scale=0.75, scale_exponent=exponent,
                loss_scale=1.0, num_tokens=RUN.spec.tokens_per_step,
                sums_digest=stage.sums_digest(stage.sums),
            )  # fmt: skip
            stage.apply(
                stage.sums.clone(), step=step, num_tokens=commit.num_tokens,
                learning_rate=LEARNING_RATE, clip_scale=0.75, scale_exponent=exponent,
            )  # fmt: skip
            source = [coordinator_pb2.BoundarySource(log=0, microbatches=range(MICROBATCHES))]
            truth.steps.setdefault(s, []).append(
                coordinator_pb2.ReplayStep(
                    commit=commit, weights_digest=stage.weights_digest(), has_weights_digest=True,
                    inputs=source if s else [], gradients=source if s < STAGES - 1 else [],
                )
            )  # fmt: skip
            truth.states[s, step] = stage.state_tensors()
    return truth


TRUTH = compute()


@dataclass
class Bench:
    """A node whose log has all that was sent, and one that replays."""

    log: BoundaryLog
    own_log: BoundaryLog
    fetch_from: types_pb2.Member
    network: Loopback
    server: grpc.aio.Server

    def fetch(self, stage: int) -> BoundaryFetch:
        return BoundaryFetch(
            RUN, stage, [self.fetch_from], boundary=BOUNDARY,
            credentials=self.network.credentials(REPLAYS),
        )  # fmt: skip

    async def replay(
        self, stage: int, *, base: int = 0, steps: list[coordinator_pb2.ReplayStep] | None = None
    ) -> tuple[StageRuntime, list[tuple[int, int]]]:
        """The runtime afterwards, and the progress that was reported."""
        tokens: Any = Tokens()
        device = Device(CPU, "test", 1 << 30, 1.0, "fp32", 1)
        worker = StageWorker(RUN, stage, boundary=BOUNDARY, device=device, tokens=tokens)
        progress: list[tuple[int, int]] = []
        try:
            await worker.create()
            worker.runtime.load_state(TRUTH.states[stage, base], base)
            async with self.fetch(stage) as fetch:
                await StageReplay(
                    worker,
                    coordinator_pb2.Replay(
                        base_step=base, steps=steps or TRUTH.steps[stage][base:]
                    ),
                    fetch=fetch, boundary=BOUNDARY, device=CPU, log=self.own_log,
                    progress=lambda step, num_bytes: progress.append((step, num_bytes)),
                ).run()  # fmt: skip
        finally:
            worker.close()
        return worker.runtime, progress


def a_log(folder: Path) -> BoundaryLog:
    return BoundaryLog(folder, RUN.run_id, boundary=BOUNDARY.spec, budget_bytes=10**7)


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    network = Loopback(tmp_path / "keys")
    log, own = a_log(tmp_path / "log"), a_log(tmp_path / "own")
    for (step, stage), sent in TRUTH.sent.items():
        log.append(step, stage, sent)
    inboxes: Any = None
    service = PeerService(
        RUN.run_id,
        SwarmView(),
        inboxes,
        lambda peer, error: None,
        logged=LoggedBoundaries(RUN, log),
    )
    server, port = await network.serve(service, LOGGED_BY)
    try:
        yield Bench(log, own, member(1, LOGGED_BY, port=port), network, server)
    finally:
        await network.close()
        await log.close()
        await own.close()


@pytest.mark.parametrize("base", [0, 2])
@pytest.mark.parametrize("stage", range(STAGES))
async def test_a_replayed_stage_has_the_bits_of_the_run(
    bench: Bench, stage: int, base: int
) -> None:
    runtime, progress = await bench.replay(stage, base=base)
    assert runtime.step == STEPS
    state = runtime.state_tensors()
    for name, tensor in TRUTH.states[stage, STEPS].items():
        assert torch.equal(state[name], tensor), name
    assert [step for step, _ in progress] == list(range(base + 1, STEPS + 1))
    neighbours = [s for s in (stage - 1, stage + 1) if 0 <= s < STAGES]
    read = sum(
        len(sent.payload)
        for step in range(base + 1, STEPS + 1)
        for s in neighbours
        for sent in TRUTH.sent[step, s]
        if (sent.kind == "forward") == (s < stage)
    )
    assert progress[-1][1] == read


async def test_a_replay_logs_what_the_lost_node_had_logged(bench: Bench) -> None:
    await bench.replay(1)
    for step in range(1, STEPS + 1):
        places = await bench.own_log.places(step, 1)
        have = {key: await bench.own_log.read(step, 1, place) for key, place in places.items()}
        assert have == {
            (sent.kind, sent.number): bytes(sent.payload) for sent in TRUTH.sent[step, 1]
        }


async def test_a_hole_names_whose_log_lacks_what(bench: Bench) -> None:
    bench.log.append(3, 0, [s for s in TRUTH.sent[3, 0] if s.number != 1])
    with pytest.raises(BoundaryHoleError, match="step 3 lacks the forward tensor of microbatch 1"):
        await bench.replay(1)


async def test_a_hole_carries_the_peer(bench: Bench) -> None:
    bench.log.truncate(STEPS)
    with pytest.raises(BoundaryHoleError) as raised:
        await bench.replay(0)
    assert raised.value.peer_id == LOGGED_BY


async def test_a_damaged_entry_is_a_hole(bench: Bench, tmp_path: Path) -> None:
    await bench.log.places(1, 0)
    path = tmp_path / "log" / RUN.run_id / "step-00000002-stage-0.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BoundaryHoleError, match="step 2 lacks the forward tensor of microbatch 2"):
        await bench.replay(1)


async def test_a_log_that_can_not_be_reached_is_a_hole(bench: Bench) -> None:
    await bench.server.stop(None)
    with pytest.raises(BoundaryHoleError, match="got no answer") as raised:
        await bench.replay(1)
    assert raised.value.peer_id == LOGGED_BY


async def test_another_tensor_than_was_sent_is_found_out_by_the_sums(bench: Bench) -> None:
    wrong = [
        Sent(s.kind, s.number, TRUTH.sent[2, 0][0].payload) if s.kind == "forward" else s
        for s in TRUTH.sent[2, 0]
    ]
    bench.log.append(2, 0, wrong)
    with pytest.raises(ReplayMismatchError, match="step 2 of stage 1: the replay gives sums"):
        await bench.replay(1)


async def test_other_weights_than_on_record_are_found_out(bench: Bench) -> None:
    steps = [coordinator_pb2.ReplayStep.FromString(s.SerializeToString()) for s in TRUTH.steps[1]]
    steps[1].weights_digest ^= 1
    with pytest.raises(ReplayMismatchError, match="step 2 of stage 1: the replay gives weights"):
        await bench.replay(1, steps=steps)


async def test_a_plan_that_leaves_out_a_microbatch_is_refused(bench: Bench) -> None:
    steps = [coordinator_pb2.ReplayStep.FromString(s.SerializeToString()) for s in TRUTH.steps[1]]
    del steps[1].gradients[0].microbatches[2]
    with pytest.raises(ReplayMismatchError, match=r"plan of step 2 .* microbatch 2"):
        await bench.replay(1, steps=steps)


async def test_a_payload_with_nan_is_a_hole(bench: Bench) -> None:
    sent = TRUTH.sent[1, 0]
    bench.log.append(1, 0, [Sent(s.kind, s.number, b"\xff" * len(s.payload)) for s in sent])
    with pytest.raises(BoundaryHoleError, match="NaN"):
        await bench.replay(1)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"run_id": "other"}, WrongRunError),
        ({"direction": types_pb2.DIRECTION_REDUCE_TOTAL}, MalformedFrameError),
        ({"stage": 0}, ImpossibleLeaseError),
        ({"stage": STAGES}, ImpossibleLeaseError),
        ({"stage": STAGES - 1, "direction": types_pb2.DIRECTION_BACKWARD}, ImpossibleLeaseError),
        ({"microbatches": [MICROBATCHES]}, ImpossibleLeaseError),
        ({"microbatches": [0] * (MICROBATCHES + 1)}, ImpossibleLeaseError),
    ],
)
async def test_a_log_answers_nothing_that_no_step_has(
    bench: Bench, changes: dict[str, Any], error: type[ProtocolError]
) -> None:
    asked: dict[str, Any] = {
        "run_id": RUN.run_id, "step": 1, "stage": 1, "direction": types_pb2.DIRECTION_FORWARD,
        "microbatches": [0], **changes,
    }  # fmt: skip
    logged = LoggedBoundaries(RUN, bench.log)
    frames = logged.frames(peer_pb2.BoundaryRequest(**asked))
    with pytest.raises(error):
        await anext(frames)
