# SPDX-License-Identifier: Apache-2.0
"""One side of a boundary asks the other for its share, over real mutual TLS."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from shoal.node import shares
from shoal.node.boundary_log import BoundaryLog
from shoal.node.log_file import Sent
from shoal.node.peer_service import PeerService
from shoal.node.share_fetch import ShareFetch, ask_for_share, request_of
from shoal.node.shares import Share, ShareDesk, SharedOut, ShareKey, mirrored_numel
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import (
    BoundaryHoleError,
    ImpossibleLeaseError,
    WrongLeaseError,
    WrongRunError,
    WrongShapeError,
    WrongStepError,
)
from shoal.protocol.ids import NOBODY, Incarnation, PeerId, RunId
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.spec import DataManifest, ResolvedRun, RunSpec

from .loopback import Loopback, member

RUN_ID = RunId("tiny-0a1b2c3d")
ASKS, HAS, OTHER = (PeerId(c * 26) for c in "aho")
COMMITTED = 4
KEY = ShareKey(step=5, boundary=1, scale_exponent=20, loss_scale=1.0)


def resolved_run(boundary: str = "mapl:r=4") -> ResolvedRun:
    spec = RunSpec.model_validate(
        {
            "model": {
                "dim": 8, "num_heads": 2, "num_layers": 3, "seq_len": 3, "vocab_size": 256
            },
            "pipeline": {"stages": 3, "cuts": [1, 2], "boundary": boundary},
        }
    )  # fmt: skip
    data = DataManifest(vocab_size=256, token_bytes=2, train=(), validation=(), tokenizer_sha256="")
    return ResolvedRun(run_id=RUN_ID, spec=spec, data=data)


RUN = resolved_run()
NUMEL = 32


def values(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**40), 2**40, (NUMEL,), generator=generator)


def test_only_a_trainable_projection_is_held_by_both_sides() -> None:
    assert mirrored_numel(RUN.spec) == NUMEL
    assert mirrored_numel(resolved_run("mapl:r=4:proj=fixed").spec) == 0
    assert mirrored_numel(resolved_run("resbm:b=4").spec) == 0
    assert mirrored_numel(resolved_run("bf16").spec) == 0


# ---- the desk ----------------------------------------------------------------------------


async def test_desk_waits_for_the_sums() -> None:
    desk = ShareDesk(COMMITTED)
    waiting = asyncio.create_task(desk.get(KEY))
    await asyncio.sleep(0)
    desk.close_step(COMMITTED)  # whatever else changes
    await asyncio.sleep(0)
    assert not waiting.done()
    share = Share.of(values(1))
    desk.offer({KEY: share})
    assert await waiting is share


async def test_share_at_another_scale_is_not_given() -> None:
    desk = ShareDesk(COMMITTED)
    coarser = ShareKey(5, 1, scale_exponent=16, loss_scale=1.0)
    waiting = asyncio.create_task(desk.get(coarser))
    desk.offer({KEY: Share.of(values(1))})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    right = Share.of(values(2))
    desk.offer({coarser: right})
    assert await waiting is right


async def test_desk_keeps_a_committed_step_for_those_who_are_late() -> None:
    desk = ShareDesk(COMMITTED)
    desk.offer({KEY: Share.of(values(1))})
    desk.close_step(5)
    assert (await desk.get(KEY)).payload == Share.of(values(1)).payload
    desk.offer({})
    with pytest.raises(WrongStepError):
        await desk.get(KEY)


@pytest.mark.parametrize("step", [COMMITTED, COMMITTED + 3])
async def test_desk_refuses_steps_that_are_not_next(step: int) -> None:
    with pytest.raises(WrongStepError):
        await ShareDesk(COMMITTED).get(ShareKey(step, 1, 20, 1.0))


async def test_wait_for_the_sums_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "WAIT_S", 0.0)
    with pytest.raises(WrongStepError, match="not summed up yet"):
        await ShareDesk(COMMITTED).get(KEY)


async def test_a_stage_that_is_given_up_ends_the_wait() -> None:
    desk = ShareDesk(COMMITTED)
    waiting = asyncio.create_task(desk.get(KEY))
    await asyncio.sleep(0)
    desk.close()
    with pytest.raises(WrongLeaseError):
        await waiting


# ---- over the wire -----------------------------------------------------------------------


class Node:
    """Holds stage 2, the receiver's side of boundary 1, unless told otherwise; at step 4."""

    def __init__(self, folder: Path, peer_id: PeerId) -> None:
        self.desk = ShareDesk(COMMITTED)
        self.log = BoundaryLog(
            folder, RUN_ID, boundary=RUN.spec.pipeline.boundary, budget_bytes=10**6
        )
        inboxes: Any = self
        self.service = PeerService(
            RUN_ID, SwarmView(), inboxes, lambda who, error, key: None,
            shared=SharedOut(RUN, self.log),
        )  # fmt: skip
        self.peer_id = peer_id
        self.port = 0
        self.stage = 2

    def share_desk(self, stage: int) -> ShareDesk | None:
        return self.desk if stage == self.stage else None

    def member(self, incarnation: int) -> types_pb2.Member:
        return member(incarnation, self.peer_id, port=self.port, stage=self.stage)


@dataclass
class Scene:
    network: Loopback
    node: Node
    second: Node
    unreachable: list[str]
    swarm: SwarmView

    def fetch(self) -> ShareFetch:
        """Of a node at stage 1, whose incarnation makes it ask the first replica first."""
        return ShareFetch(
            RUN, 1, me=Incarnation(10), swarm=self.swarm,
            credentials=self.network.credentials(ASKS),
            on_unreachable=lambda who, reason: self.unreachable.append(who.name),
        )  # fmt: skip

    async def ask(
        self, key: ShareKey, *, stage: int = 2, run_id: str = RUN_ID, numel: int = NUMEL
    ) -> torch.Tensor:
        channel = self.network.credentials(ASKS).channel(f"127.0.0.1:{self.node.port}", HAS)
        async with channel:
            request = request_of(run_id, key, stage)
            share = await ask_for_share(channel, request, numel, name="node")
            return share.values


@pytest_asyncio.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    network = Loopback(tmp_path / "keys")
    node, second = Node(tmp_path / "log", HAS), Node(tmp_path / "second", OTHER)
    for one in (node, second):
        _, one.port = await network.serve(one.service, one.peer_id)
    swarm = SwarmView()
    await swarm.update(coordinator_pb2.Plan(epoch=1, members=[node.member(1), second.member(2)]))
    yield Scene(network, node, second, [], swarm)
    await network.close()
    await node.log.close()
    await second.log.close()


async def test_share_is_fetched_once_it_is_there(scene: Scene) -> None:
    fetch = scene.fetch()
    fetching = asyncio.create_task(fetch.fetch([KEY]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert fetch.waits_for == 1
    scene.node.desk.offer({KEY: Share.of(values(7))})
    got = await fetching
    assert torch.equal(got[1].values, values(7))
    assert got[1].num_bytes == len(Share.of(values(7)).payload)
    assert (fetch.waits_for, fetch.num_fetched, scene.unreachable) == (NOBODY, 1, [])
    await fetch.close()


async def test_who_has_answered_is_not_waited_for(scene: Scene) -> None:
    before, after = scene.second, scene.node
    before.stage = 0
    members = [after.member(1), before.member(2)]
    await scene.swarm.update(coordinator_pb2.Plan(epoch=2, members=members))
    upstream = ShareKey(step=5, boundary=0, scale_exponent=20, loss_scale=1.0)
    after.desk.offer({KEY: Share.of(values(7))})
    fetch = scene.fetch()
    fetching = asyncio.create_task(fetch.fetch([upstream, KEY]))
    while fetch.num_fetched < 1:  # noqa: ASYNC110  # the wire's turns
        await asyncio.sleep(0)
    assert fetch.waits_for == 2
    before.desk.offer({upstream: Share.of(values(8))})
    got = await fetching
    assert torch.equal(got[0].values, values(8))
    assert fetch.waits_for == NOBODY
    await fetch.close()


async def test_another_replica_is_asked_when_one_is_gone(scene: Scene) -> None:
    gone = scene.node.member(1)
    gone.address = "127.0.0.1:1"
    members = [gone, scene.second.member(2)]
    await scene.swarm.update(coordinator_pb2.Plan(epoch=2, members=members))
    scene.second.desk.offer({KEY: Share.of(values(7))})
    fetch = scene.fetch()
    assert torch.equal((await fetch.fetch([KEY]))[1].values, values(7))
    assert scene.unreachable == ["node-1"]
    await fetch.close()


async def test_committed_steps_come_out_of_the_log(scene: Scene) -> None:
    old = ShareKey(3, 1, 20, 1.0)
    scene.node.log.append(3, 2, [Sent("share", 1, Share.of(values(3)).payload)])
    assert torch.equal(await scene.ask(old), values(3))


async def test_incompressible_share_is_logged_and_read_raw(scene: Scene) -> None:
    extremes = torch.tensor([2**62 - 1, -(2**62)] * (NUMEL // 2))
    extremes[0] = -(2**63)
    scene.node.log.append(3, 2, [Sent("share", 1, Share.of(extremes).payload)])
    assert torch.equal(await scene.ask(ShareKey(3, 1, 20, 1.0)), extremes)


async def test_a_hole_in_the_log_is_called_one(scene: Scene) -> None:
    with pytest.raises(BoundaryHoleError):
        await scene.ask(ShareKey(3, 1, 20, 1.0))


async def test_what_an_earlier_computation_logged_is_not_taken_for_the_open_step(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "WAIT_S", 0.0)
    scene.node.log.append(5, 2, [Sent("share", 1, Share.of(values(3)).payload)])
    with pytest.raises(WrongStepError):
        await scene.ask(KEY)


async def test_other_runs_stages_and_sizes_are_refused(scene: Scene) -> None:
    with pytest.raises(WrongRunError):
        await scene.ask(KEY, run_id="other-0a1b2c3d")
    with pytest.raises(ImpossibleLeaseError):
        await scene.ask(KEY, stage=0)
    with pytest.raises(ImpossibleLeaseError):
        await scene.ask(ShareKey(5, 2, 20, 1.0))
    scene.node.desk.offer({KEY: Share.of(values(1))})
    with pytest.raises(WrongShapeError):
        await scene.ask(KEY, numel=NUMEL + 1)
