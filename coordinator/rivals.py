# SPDX-License-Identifier: Apache-2.0
"""Whether another coordinator leads a run: asked before this one serves it."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from shoal.coordinator.standby_link import LINK_FILE
from shoal.coordinator.state import RunState
from shoal.coordinator.terms import FORCE
from shoal.protocol.authority import fetch_authority
from shoal.protocol.discovery import Discovery
from shoal.protocol.errors import ShoalError, TermError
from shoal.protocol.ids import RunId
from shoal.protocol.join_link import split_address
from shoal.protocol.proto import coordinator_pb2, coordinator_pb2_grpc
from shoal.protocol.rpc import admission_channel, error_from_rpc

log = logging.getLogger(__name__)

ASK_S = 3.0
"""For an answer, the connection included."""

_MAX_ASKED = 12


@dataclass(frozen=True, slots=True)
class Rival:
    """A coordinator of the run that answers."""

    address: str
    """Its admission port."""
    term: int
    leads: bool
    step: int
    log_id: str


async def ask(address: str, run_id: RunId, fingerprint: str) -> Rival | None:
    """Who answers at an admission address as this run's coordinator; None when nobody does."""
    try:
        host, port = split_address(address)
        proof = await asyncio.to_thread(fetch_authority, host, port, fingerprint, ASK_S)
        async with admission_channel(address, proof) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            reply = await stub.Leader(coordinator_pb2.LeaderRequest(run_id=run_id), timeout=ASK_S)
    except grpc.aio.AioRpcError as error:
        log.info("no coordinator at %s: %s", address, error_from_rpc(error))
        return None
    except (ShoalError, ValueError) as error:
        log.info("no coordinator at %s: %s", address, error)
        return None
    if reply.run_id != run_id:
        return None
    return Rival(address, reply.term, reply.leads, reply.step, reply.coordinator_id[:64])


async def find_leader(
    addresses: Sequence[str], run_id: RunId, fingerprint: str, *, own_log_id: str
) -> Rival | None:
    """Of the coordinators that answer and lead, the one with the highest term."""
    asked = list(dict.fromkeys(a for a in addresses if a))[:_MAX_ASKED]
    answers = await asyncio.gather(*(ask(address, run_id, fingerprint) for address in asked))
    leading = [r for r in answers if r is not None and r.leads and r.log_id != own_log_id]
    return max(leading, key=lambda rival: rival.term, default=None)


async def discovered(discovery: Discovery | None, run_id: RunId, fingerprint: str) -> list[str]:
    """The admission address that discovery knows; none when it doesn't answer soon."""
    if discovery is None:
        return []
    try:
        async with asyncio.timeout(ASK_S):
            record = await discovery.coordinator(run_id, bytes.fromhex(fingerprint))
    except (ShoalError, TimeoutError, OSError) as error:
        log.info("discovery: %s", error)
        return []
    return [record.address] if record is not None else []


def led_elsewhere(rival: Rival, run_id: RunId, folder: Path) -> TermError:
    """Why a coordinator doesn't start, and what its operator can do."""
    return TermError(
        f"run {run_id} is led by the coordinator at {rival.address} in term {rival.term}, now at "
        f"step {rival.step}. Leave it to that one, or stop it first; or let this one stand by for "
        f"it: `shoal launch --standby LINK --folder {folder}`, with the link in the file "
        f"{LINK_FILE} of its run folder",
        term=rival.term,
        address=rival.address,
    )


def require_own_log(state: RunState, log_id: str, folder: Path) -> None:
    """Raises `TermError` for the copy of a log that decides alone: a copy never does."""
    if state.is_alone and state.council.log_id not in ("", log_id):
        raise TermError(
            f"{folder} is a copy of the run folder in which the run was led until step "
            f"{state.step}, or was moved to another disk or machine. Two coordinators on copies "
            "would be two runs. If the other folder's coordinator is gone for good, and only "
            f"then, start this one with {FORCE}",
            term=state.term,
        )
