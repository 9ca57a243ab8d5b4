# SPDX-License-Identifier: Apache-2.0
"""A joiner and its donors over real mutual TLS, with real stages: from nothing to a holder."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.node.hardware import Device
from shoal.node.pace import Pace
from shoal.node.peer_service import PeerService
from shoal.node.stage_holder import StageHolder
from shoal.node.stage_member import Prepared
from shoal.node.state_transfer import StateTransfer
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import UnreachableError
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.scale import scale_exponent
from shoal.protocol.task_scope import TaskScope

from .loopback import Loopback, member
from .test_stage_holder import RUN

torch.set_num_threads(1)

ALL = types_pb2.STATE_PART_ALL
WEIGHTS = types_pb2.STATE_PART_WEIGHTS
MOMENTS = types_pb2.STATE_PART_MOMENTS
INIT = coordinator_pb2.STATE_SOURCE_INIT
PEER = coordinator_pb2.STATE_SOURCE_PEER
DEVICE = Device(torch.device("cpu"), "test", 1, 1.0, "fp32", 1)
STAGE = 0


def no_coordinator() -> Any:
    raise UnreachableError("there is none")


class Gate(Pace):
    """Holds background transfers up while it is shut."""

    def __init__(self) -> None:
        super().__init__(0)
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def spend(self, num_bytes: int) -> None:
        await self.is_open.wait()


class Node:
    """What a daemon composes, without a session."""

    def __init__(self, number: int, folder: Path, loopback: Loopback, tasks: TaskScope) -> None:
        self.number = number
        self.peer_id = PeerId("abcdefgh"[number] * 26)
        self.folder = folder / f"node-{number}"
        self.scratch = self.folder / "scratch"
        self.scratch.mkdir(parents=True)
        self.sent: asyncio.Queue[coordinator_pb2.NodeEvent] = asyncio.Queue()
        self.bad: list[str] = []
        self.loopback = loopback
        credentials = loopback.credentials(self.peer_id)
        membership: Any = SimpleNamespace(run=RUN, credentials=credentials)
        self.transfer = StateTransfer(
            membership, self.folder, no_coordinator, on_bad=lambda who, _: self.bad.append(who)
        )
        swarm = SwarmView()
        self.holder = StageHolder(
            membership, DEVICE, folder=self.folder, scratch=self.scratch, transfer=self.transfer,
            swarm=swarm, tasks=tasks, send=self.sent.put_nowait, report=lambda line: None,
        )  # fmt: skip
        self.pace = Gate()
        self.service = PeerService(RUN.run_id, swarm, self.holder, lambda *_: None, pace=self.pace)
        self.server: Any = None
        self.port = 0

    async def serve(self) -> None:
        self.server, self.port = await self.loopback.serve(self.service, self.peer_id)

    def member(self) -> types_pb2.Member:
        return member(self.number, self.peer_id, port=self.port, stage=STAGE)

    @property
    def runtime(self) -> Any:
        assert self.holder.member is not None
        return self.holder.member.worker.runtime

    async def event(self, kind: str) -> Any:
        event = await asyncio.wait_for(self.sent.get(), 20)
        assert event.WhichOneof("event") == kind, event
        return getattr(event, kind)

    async def obey(self, **command: Any) -> None:
        await self.holder.obey(coordinator_pb2.Command(**command), next(iter(command)))

    async def pin(self, *versions: tuple[int, types_pb2.StatePart.ValueType]) -> None:
        await self.obey(
            pin=coordinator_pb2.Pin(
                versions=[coordinator_pb2.StateVersion(step=s, part=p) for s, p in versions]
            )
        )

    async def commit(self, step: int) -> None:
        """A committed step, as if its sums had been prepared."""
        member_ = self.holder.member
        assert member_ is not None
        generator = torch.Generator().manual_seed(step)
        size = self.runtime.sums.numel()
        totals = torch.randint(-(1 << 40), 1 << 40, (size,), generator=generator)
        member_.prepared = Prepared(step, 0, totals, step)
        exponent = scale_exponent(RUN.spec.tokens_per_step)
        command = coordinator_pb2.Commit(
            step=step, learning_rate=1e-2, clip_scale=0.7, scale_exponent=exponent,
            num_tokens=RUN.spec.tokens_per_step, sums_digest=step,
        )  # fmt: skip
        await self.obey(commit=command)


class Bench:
    def __init__(self, folder: Path, loopback: Loopback, tasks: TaskScope) -> None:
        self.nodes = [Node(number, folder, loopback, tasks) for number in range(1, 4)]
        *self.donors, self.joiner = self.nodes

    def to_donors(self) -> coordinator_pb2.Donors:
        return coordinator_pb2.Donors(
            members=[donor.member() for donor in self.donors],
            weights_digest=self.donors[0].runtime.weights_digest(),
            has_weights_digest=True,
        )

    async def pin(self, *versions: tuple[int, types_pb2.StatePart.ValueType]) -> None:
        for donor in self.donors:
            await donor.pin(*versions)

    async def step(self, step: int) -> None:
        for donor in self.donors:
            await donor.commit(step)
            await donor.event("applied")

    async def assign(self, step: int, tier: types_pb2.Tier.ValueType) -> None:
        assign = coordinator_pb2.Assign(
            stage=STAGE, incarnation=3, step=step, source=PEER, tier=tier, donors=self.to_donors()
        )
        await self.joiner.holder.take(assign)

    async def pull(self, step: int, part: types_pb2.StatePart.ValueType) -> None:
        pull = coordinator_pb2.Pull(incarnation=3, step=step, part=part, donors=self.to_donors())
        await self.joiner.obey(pull=pull)

    def holds_the_same(self) -> bool:
        state = self.joiner.runtime.state_tensors()
        expected = self.donors[0].runtime.state_tensors()
        return all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    loopback = Loopback(tmp_path)
    async with TaskScope() as tasks:
        bench = Bench(tmp_path, loopback, tasks)
        for donor in bench.donors:
            await donor.serve()
            await donor.holder.take(
                coordinator_pb2.Assign(stage=STAGE, incarnation=donor.number, source=INIT)
            )
            await donor.event("ready")
        try:
            yield bench
        finally:
            for node in bench.nodes:
                await node.holder.close()
            await loopback.close()
    assert not [p for node in bench.nodes for p in node.scratch.iterdir()]
    assert not list(tmp_path.glob("*/partial/*"))


async def test_a_copy_of_a_pinned_version_is_whole_though_its_donors_trained_on(
    bench: Bench,
) -> None:
    await bench.step(1)
    donors = bench.to_donors()
    await bench.pin((1, ALL))
    before = bench.donors[0].runtime.state_tensors()
    await bench.step(2)
    assign = coordinator_pb2.Assign(
        stage=STAGE, incarnation=3, step=1, source=PEER, tier=types_pb2.TIER_HOLDER, donors=donors
    )
    await bench.joiner.holder.take(assign)
    ready = await bench.joiner.event("ready")
    assert (ready.step, ready.weights_digest) == (1, donors.weights_digest)
    state = bench.joiner.runtime.state_tensors()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert bench.joiner.holder.held() is not None


async def test_all_donors_describe_the_same_bytes(bench: Bench) -> None:
    await bench.step(1)
    for part in (ALL, WEIGHTS, MOMENTS):
        await bench.pin((1, part))
        found = [await donor.holder.pinned(STAGE, 1, part) for donor in bench.donors]
        assert found[0].description == found[1].description
        assert found[0].path.read_bytes() == found[1].path.read_bytes()


async def test_a_joiner_becomes_a_worker_and_then_a_holder(bench: Bench) -> None:
    joiner = bench.joiner
    await bench.step(1)
    await bench.pin((1, WEIGHTS))
    await bench.assign(1, types_pb2.TIER_WORKER)
    assert (await joiner.event("ready")).step == 1
    assert joiner.holder.held() is None, "weights alone are offered to nobody"

    await bench.step(2)
    await bench.pin((2, WEIGHTS))
    await bench.pull(2, WEIGHTS)
    applied = await joiner.event("applied")
    assert applied.weights_digest == bench.donors[0].runtime.weights_digest()

    await bench.pin((2, MOMENTS))
    for donor in bench.donors:
        donor.pace.is_open.clear()  # the moments take a while
    await bench.pull(2, MOMENTS)
    for step in (3, 4):
        await joiner.commit(step)
        await bench.step(step)
        await bench.donors[0].obey(  # one is enough, and it is urgent
            pin=coordinator_pb2.Pin(
                versions=[
                    coordinator_pb2.StateVersion(step=2, part=MOMENTS),
                    coordinator_pb2.StateVersion(step=step, part=WEIGHTS, urgent=True),
                ]
            )
        )
        pull = coordinator_pb2.Pull(incarnation=3, step=step, part=WEIGHTS)
        pull.donors.CopyFrom(bench.to_donors())
        del pull.donors.members[1:]
        await joiner.obey(pull=pull)
        assert (await joiner.event("applied")).step == step
    assert joiner.holder.waiting_for().startswith("worker: moments")
    for donor in bench.donors:
        donor.pace.is_open.set()
    promoted = await joiner.event("promoted")
    assert promoted.step == 4
    assert bench.holds_the_same()

    await joiner.commit(5)
    await bench.step(5)
    assert (await joiner.event("applied")).step == 5
    assert bench.holds_the_same()
    assert joiner.bad == []


async def test_a_donor_that_dies_leaves_the_rest_to_the_other(bench: Bench) -> None:
    await bench.step(1)
    await bench.pin((1, ALL))
    await bench.donors[0].server.stop(None)
    await bench.assign(1, types_pb2.TIER_HOLDER)
    assert (await bench.joiner.event("ready")).step == 1
    assert bench.holds_the_same()


async def test_a_version_that_nobody_pinned_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.node.state_pins.PIN_LAG_S", 0.0)
    await bench.assign(0, types_pb2.TIER_HOLDER)
    trouble = await bench.joiner.event("trouble")
    assert trouble.error == "WrongStepError"
    assert bench.joiner.holder.held() is None
