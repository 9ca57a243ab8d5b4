# SPDX-License-Identifier: Apache-2.0
"""Admission: who is refused, with which words."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from shoal.coordinator import service
from shoal.coordinator.service import CoordinatorService
from shoal.protocol.authority import PEER_URI_PREFIX, Authority
from shoal.protocol.errors import AdmissionError, MalformedFrameError, ShoalError, VersionError
from shoal.protocol.identity import NodeIdentity, TlsKey, make_join_request
from shoal.protocol.ids import RunId
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.rpc import error_from_rpc
from shoal.version import PROTOCOL_VERSION

RUN = RunId("run-00000000")


class Context:
    """Ends the call as gRPC does."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class Desk:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority.load_or_create(folder / "keys")
        self.node = NodeIdentity.load_or_create(folder / "node")
        conductor: Any = SimpleNamespace(run=SimpleNamespace(run_id=RUN, to_json=lambda: b"{}"))
        self.service = CoordinatorService(
            conductor, self.authority, run_folder=folder, session_address=lambda: "127.0.0.1:2",
            discovery_addresses=lambda: ["/a"] * 40, leaf_lifetime_s=60,
        )  # fmt: skip

    def request(self, token: str, run_id: RunId = RUN) -> coordinator_pb2.JoinRequest:
        return make_join_request(self.node, TlsKey.generate(), token, run_id, time.time())

    def token(self, *, lasts_s: float = 60, run_id: RunId = RUN) -> str:
        return self.authority.issue_token(run_id, int(time.time() + lasts_s))

    async def refusal(self, request: coordinator_pb2.JoinRequest) -> ShoalError:
        context: Any = Context()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.service.Join(request, context)
        return error_from_rpc(caught.value)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_a_valid_link_admits(desk: Desk) -> None:
    context: Any = Context()
    reply = await desk.service.Join(desk.request(desk.token()), context)
    assert reply.session_address == "127.0.0.1:2"
    assert len(reply.discovery_peers) == 16
    assert 50 < reply.expires_s - time.time() <= 60


async def test_another_protocol_version_names_both_and_the_remedy(desk: Desk) -> None:
    request = desk.request(desk.token())
    request.protocol_version = 99
    error = await desk.refusal(request)
    assert isinstance(error, VersionError)
    assert error.exit_code == 5
    assert f"version {PROTOCOL_VERSION} " in str(error)
    assert "version 99" in str(error)
    assert "pip install" in str(error)


async def test_an_expired_token_is_refused(desk: Desk) -> None:
    error = await desk.refusal(desk.request(desk.token(lasts_s=-60)))
    assert isinstance(error, AdmissionError)
    assert "expired" in str(error)


async def test_a_link_to_another_run_is_refused(desk: Desk) -> None:
    other = RunId("other-11111111")
    error = await desk.refusal(desk.request(desk.token(run_id=other), other))
    assert isinstance(error, AdmissionError)
    assert "other-11111111" in str(error)
    foreign = await desk.refusal(desk.request(desk.token(run_id=other)))
    assert isinstance(foreign, AdmissionError)


async def test_a_flood_of_joins_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.service._joins.extend([time.time()] * 600)
    error = await desk.refusal(desk.request(desk.token()))
    assert error.exit_code == 8


async def test_a_session_that_says_nothing_is_ended(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DEADLINE_S", 0.01)

    async def silence() -> AsyncIterator[coordinator_pb2.NodeEvent]:
        await asyncio.Event().wait()
        yield coordinator_pb2.NodeEvent()

    context: Any = Context()
    context.auth_context = lambda: {
        "x509_subject_alternative_name": [f"{PEER_URI_PREFIX}{desk.node.peer_id}".encode()]
    }
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await desk.service.Session(silence(), context)
    assert "sent nothing within" in str(error_from_rpc(caught.value))


async def test_an_upload_that_stops_is_given_up() -> None:
    async def broken_off() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    chunks = broken_off()
    assert await service._next(chunks, within_s=60) == 1
    with pytest.raises(MalformedFrameError, match="nothing within 0"):
        await service._next(chunks, within_s=0)
    assert await service._next(chunks, within_s=60) is None
