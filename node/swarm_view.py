# SPDX-License-Identifier: Apache-2.0
"""Whom this node knows: the coordinator's plan, and who is fenced."""

import asyncio

from shoal.protocol.errors import FencedError, UnknownPeerError
from shoal.protocol.ids import Incarnation, PeerId
from shoal.protocol.proto import coordinator_pb2, types_pb2

_MAX_FENCED = 1024
"""Of the newest incarnations; older ones are not in the plan either, and so refused as well."""


class SwarmView:
    """The newest plan. Other nodes may have heard of a newer one: `known` waits for it."""

    def __init__(self) -> None:
        self._members: dict[Incarnation, types_pb2.Member] = {}
        self._fenced: set[Incarnation] = set()
        self._changed = asyncio.Condition()

    async def update(self, plan: coordinator_pb2.Plan) -> set[Incarnation]:
        """Take a plan; returns the incarnations that are gone since the last one."""
        before = set(self._members)
        self._members = {Incarnation(m.incarnation): m for m in plan.members}
        fenced = self._fenced | {Incarnation(i) for i in plan.fenced}
        self._fenced = set(sorted(fenced)[-_MAX_FENCED:])
        async with self._changed:
            self._changed.notify_all()
        return before - set(self._members)

    def member(self, incarnation: Incarnation) -> types_pb2.Member | None:
        return self._members.get(incarnation)

    def name(self, incarnation: Incarnation) -> str:
        member = self._members.get(incarnation)
        return member.name if member else f"incarnation {incarnation}"

    def members_of(self, stage: int) -> list[types_pb2.Member]:
        """The stage's replicas, by incarnation."""
        found = (m for m in self._members.values() if m.stage == stage)
        return sorted(found, key=lambda member: member.incarnation)

    def check(self, incarnation: Incarnation, peer_id: PeerId) -> types_pb2.Member:
        """The member, if that is who speaks. Raises `FencedError` or `UnknownPeerError`."""
        member = self._members.get(incarnation)
        if incarnation in self._fenced or member is None:
            raise FencedError(
                f"incarnation {incarnation} is "
                + ("fenced" if incarnation in self._fenced else "not in the plan")
                + "; wait for a new assignment"
            )
        if member.peer_id != peer_id:
            raise UnknownPeerError(
                f"peer {peer_id} speaks for incarnation {incarnation}, which is {member.peer_id}'s"
            )
        return member

    async def known(self, incarnation: Incarnation, *, timeout_s: float) -> None:
        """Return once the plan names `incarnation`, or after `timeout_s`."""

        def decided() -> bool:
            return incarnation in self._members or incarnation in self._fenced

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(decided)
        except TimeoutError:
            return
