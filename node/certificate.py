# SPDX-License-Identifier: Apache-2.0
"""Keeps a node's certificate fresh: renewed in the session, or joined for anew."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from shoal.node.admission import Membership
from shoal.protocol.errors import ShoalError
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.rpc import DEADLINE_S, error_from_rpc, reply_of

if TYPE_CHECKING:
    from shoal.protocol.proto.coordinator_pb2_grpc import CoordinatorAsyncStub

log = logging.getLogger(__name__)

_LEAST_WAIT_S = 1.0


def renewal_wait_s(expires_s: float, now_s: float) -> float:
    """A third of what is left: several tries before the end, fewer the longer it lasts. Pure."""
    return max(_LEAST_WAIT_S, (expires_s - now_s) / 3)


async def keep_renewed(membership: Membership, stub: "Callable[[], CoordinatorAsyncStub]") -> None:
    """Runs until cancelled. `stub` raises `UnreachableError` while the coordinator is away.

    Channels keep the leaf that they were opened with, and open connections outlive it; whatever
    is opened after a renewal uses the new one.
    """
    while True:
        await asyncio.sleep(renewal_wait_s(membership.certificate_expires_s, time.time()))
        try:
            request = coordinator_pb2.RenewRequest(tls_key=membership.tls_key_der)
            reply = await reply_of(stub().Renew(request, timeout=DEADLINE_S))
        except grpc.aio.AioRpcError as error:
            log.info("certificate not renewed yet: %s", error_from_rpc(error))
        except ShoalError as error:
            log.info("certificate not renewed yet: %s", error)
        else:
            membership.renew(reply.certificate, reply.expires_s)
            log.info("certificate renewed until %s", time.ctime(reply.expires_s))
