# SPDX-License-Identifier: Apache-2.0
"""Whom a node knows, who may speak for whom, and waiting for a plan that is on its way."""

import asyncio

import pytest

from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import FencedError, UnknownPeerError
from shoal.protocol.ids import Incarnation, PeerId
from shoal.protocol.proto import coordinator_pb2, types_pb2

ALICE, BOB = PeerId("a" * 26), PeerId("b" * 26)
ONE, TWO = Incarnation(1), Incarnation(2)


def member(incarnation: int, peer_id: str = ALICE, stage: int = 0) -> types_pb2.Member:
    return types_pb2.Member(
        incarnation=incarnation, peer_id=peer_id, name=f"node-{incarnation}", stage=stage
    )


def plan(
    epoch: int, *members: types_pb2.Member, fenced: tuple[int, ...] = ()
) -> coordinator_pb2.Plan:
    return coordinator_pb2.Plan(epoch=epoch, members=members, fenced=fenced)


async def test_update_tells_who_is_gone() -> None:
    swarm = SwarmView()
    assert await swarm.update(plan(1, member(1), member(2, BOB))) == set()
    assert await swarm.update(plan(2, member(2, BOB), fenced=(1,))) == {ONE}
    assert swarm.member(ONE) is None
    assert swarm.name(TWO) == "node-2"
    assert swarm.name(ONE) == "incarnation 1"


async def test_only_the_member_itself_may_speak_for_its_incarnation() -> None:
    swarm = SwarmView()
    await swarm.update(plan(1, member(1), member(2, BOB)))
    assert swarm.check(ONE, ALICE).name == "node-1"
    with pytest.raises(UnknownPeerError, match="speaks for incarnation 1"):
        swarm.check(ONE, BOB)


async def test_unknown_and_fenced_incarnations_are_refused() -> None:
    swarm = SwarmView()
    await swarm.update(plan(1, member(1), fenced=(2,)))
    with pytest.raises(FencedError, match="not in the plan"):
        swarm.check(Incarnation(9), ALICE)
    with pytest.raises(FencedError, match="fenced"):
        swarm.check(TWO, BOB)


async def test_fenced_stays_fenced_whatever_later_plans_say() -> None:
    swarm = SwarmView()
    await swarm.update(plan(1, fenced=(1,)))
    await swarm.update(plan(2, member(1)))
    with pytest.raises(FencedError):
        swarm.check(ONE, ALICE)


@pytest.mark.parametrize("newer", [plan(2, member(1)), plan(2, fenced=(1,))])
async def test_waiting_ends_with_the_plan_that_decides(newer: coordinator_pb2.Plan) -> None:
    swarm = SwarmView()
    waiting = asyncio.create_task(swarm.known(ONE, timeout_s=60))
    await asyncio.sleep(0)
    await swarm.update(plan(1, member(2, BOB)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await swarm.update(newer)
    await asyncio.wait_for(waiting, 10)


async def test_waiting_ends_at_its_timeout() -> None:
    await SwarmView().known(ONE, timeout_s=0.0)
