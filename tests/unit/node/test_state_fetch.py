# SPDX-License-Identifier: Apache-2.0
"""Several donors, some of whom die, are slow or lie: the file is whole, and fetched about once."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from shoal.node import chunk_schedule, state_fetch
from shoal.node.state_fetch import FetchProgress, StateFetch
from shoal.protocol import disk
from shoal.protocol.errors import (
    ChecksumError,
    DiskFullError,
    OversizedStreamError,
    ProtocolError,
    ShoalError,
    UnreachableError,
    WrongStepError,
)
from shoal.protocol.ids import PeerId
from shoal.protocol.proto import peer_pb2
from shoal.protocol.state_chunks import describe, read_chunks

STATE = bytes(i * 31 % 253 for i in range(40 * 65536 + 17))
REQUEST = peer_pb2.StateRequest(run_id="run-00000000", stage=1, step=7)


class Donor:
    def __init__(self, name: str, folder: Path, data: bytes = STATE) -> None:
        self.name = name
        self.peer_id: PeerId | None = PeerId(name)
        self._path = folder / f"donor-{name}"
        self._path.write_bytes(data)
        self.digest = 0
        self.dies_after = 10**9  # chunks
        self.hangs = False
        self.refusal: Exception | None = None
        self.flips: set[int] = set()
        self.gave = 0
        self.is_closed = False

    async def describe(
        self, request: peer_pb2.StateRequest, *, timeout_s: float
    ) -> peer_pb2.StateDescription:
        if self.refusal:
            raise self.refusal
        return describe(self._path, weights_digest=self.digest)

    async def fetch(
        self, request: peer_pb2.StateRequest, *, timeout_s: float
    ) -> AsyncGenerator[peer_pb2.StateChunk, None]:
        for index in request.chunks:
            await asyncio.sleep(0)
            if self.hangs:
                await asyncio.Event().wait()
            if self.gave >= self.dies_after:
                raise UnreachableError(f"{self.name} is gone")
            self.gave += 1
            for chunk in read_chunks(self._path, [index], chunk_bytes=65536):
                if index in self.flips:
                    chunk.data = bytes(len(chunk.data))
                yield chunk

    async def close(self) -> None:
        self.is_closed = True


def as_rpc_error(error: ShoalError) -> grpc.aio.AioRpcError:
    """What a caller gets of an error that the other side raised."""
    nothing = grpc.aio.Metadata()
    details = f"{type(error).__name__}: {error}"
    return grpc.aio.AioRpcError(error.grpc_status, nothing, nothing, details)


class Joiner:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "partial" / "state.partial"
        self.progress = FetchProgress()
        self.bad: list[str] = []

    def note(self, peer: PeerId, error: ProtocolError) -> None:
        self.bad.append(peer)

    async def fetch(
        self,
        *donors: Donor,
        digest: int | None = None,
        judge: Callable[[Path], Awaitable[bool]] | None = None,
        max_bytes: int = len(STATE),
    ) -> bytes:
        self.progress = FetchProgress()
        fetch = StateFetch(
            donors, REQUEST, self.path, max_bytes=max_bytes, weights_digest=digest, judge=judge,
            on_bad=self.note, progress=self.progress,
        )  # fmt: skip
        path = await asyncio.wait_for(fetch.run(), 30)
        assert all(donor.is_closed for donor in donors)
        return path.read_bytes()


@pytest.fixture
def joiner(tmp_path: Path) -> Joiner:
    return Joiner(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a test's length."""
    monkeypatch.setattr(chunk_schedule, "_UNKNOWN_DEADLINE_S", 0.05)
    monkeypatch.setattr(chunk_schedule, "LEAST_DEADLINE_S", 0.05)
    monkeypatch.setattr(state_fetch, "_GRACE_S", 0.05)
    monkeypatch.setattr(state_fetch, "_IDLE_S", 0.01)
    monkeypatch.setattr(state_fetch, "backoff", lambda *_, **__: 0.0)


async def test_donors_share_the_work(tmp_path: Path, joiner: Joiner) -> None:
    one, two = Donor("one", tmp_path), Donor("two", tmp_path)
    assert await joiner.fetch(one, two) == STATE
    assert min(one.gave, two.gave) > 0
    assert joiner.progress.share == 1.0
    assert joiner.progress.fetched_bytes < 1.5 * len(STATE)


async def test_a_donor_that_dies_in_the_middle_is_replaced_without_starting_over(
    tmp_path: Path, joiner: Joiner
) -> None:
    mortal, other = Donor("mortal", tmp_path), Donor("other", tmp_path)
    mortal.dies_after = 5
    assert await joiner.fetch(mortal, other) == STATE
    assert joiner.progress.fetched_bytes < 1.5 * len(STATE)
    assert joiner.bad == []


async def test_a_donor_that_hangs_holds_nobody_up(tmp_path: Path, joiner: Joiner) -> None:
    stuck, other = Donor("stuck", tmp_path), Donor("other", tmp_path)
    stuck.hangs = True
    assert await joiner.fetch(stuck, other) == STATE
    assert joiner.bad == []


async def test_a_donor_that_sends_a_wrong_chunk_is_reported_and_not_used_again(
    tmp_path: Path, joiner: Joiner
) -> None:
    liar, other = Donor("liar", tmp_path), Donor("other", tmp_path)
    liar.flips = set(range(3))
    assert await joiner.fetch(liar, other) == STATE
    assert joiner.bad == ["liar"]


async def test_the_file_of_most_donors_wins(tmp_path: Path, joiner: Joiner) -> None:
    odd = Donor("odd", tmp_path, STATE[::-1])
    assert await joiner.fetch(odd, Donor("a", tmp_path), Donor("b", tmp_path)) == STATE
    assert odd.gave == 0


async def test_between_two_donors_the_recorded_weights_decide(
    tmp_path: Path, joiner: Joiner
) -> None:
    odd, right = Donor("odd", tmp_path, STATE[::-1]), Donor("right", tmp_path)

    async def judge(path: Path) -> bool:
        return path.read_bytes() == STATE

    assert await joiner.fetch(odd, right, judge=judge) == STATE
    assert joiner.bad == ["odd"]


async def test_a_donor_that_claims_other_weights_than_the_record_is_not_asked(
    tmp_path: Path, joiner: Joiner
) -> None:
    odd, right = Donor("odd", tmp_path, STATE[::-1]), Donor("right", tmp_path)
    odd.digest, right.digest = 1, 2
    assert await joiner.fetch(odd, right, digest=2) == STATE
    assert (odd.gave, joiner.bad) == (0, ["odd"])


async def test_when_nobody_is_left_what_is_there_is_kept_for_the_next_try(
    tmp_path: Path, joiner: Joiner
) -> None:
    mortal = Donor("mortal", tmp_path)
    mortal.dies_after = 30
    with pytest.raises(UnreachableError, match="mortal is gone"):
        await joiner.fetch(mortal)
    assert await joiner.fetch(Donor("next", tmp_path)) == STATE
    assert joiner.progress.resumed_bytes == 30 * 65536
    assert joiner.progress.fetched_bytes == len(STATE) - 30 * 65536


async def test_a_fetch_that_is_cancelled_is_resumed(tmp_path: Path, joiner: Joiner) -> None:
    donor = Donor("donor", tmp_path)
    fetching = asyncio.create_task(joiner.fetch(donor))
    while donor.gave < 10:  # noqa: ASYNC110  # the donor's turns
        await asyncio.sleep(0)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    assert await joiner.fetch(Donor("again", tmp_path)) == STATE
    assert joiner.progress.resumed_bytes > 0


async def test_a_state_over_the_plan_is_refused(tmp_path: Path, joiner: Joiner) -> None:
    with pytest.raises(OversizedStreamError):
        await joiner.fetch(Donor("big", tmp_path), max_bytes=len(STATE) - 1)
    assert joiner.bad == ["big"]
    assert not joiner.path.exists()


async def test_a_donor_without_the_version_is_no_liar(tmp_path: Path, joiner: Joiner) -> None:
    late = Donor("late", tmp_path)
    late.refusal = WrongStepError("the state of step 7 is not pinned here")
    assert await joiner.fetch(late, Donor("other", tmp_path)) == STATE
    with pytest.raises(WrongStepError):
        await joiner.fetch(late)
    assert joiner.bad == []


async def test_when_all_are_wrong_it_says_so(tmp_path: Path, joiner: Joiner) -> None:
    async def judge(path: Path) -> bool:
        return False

    with pytest.raises(ChecksumError, match="other weights"):
        await joiner.fetch(Donor("one", tmp_path), judge=judge)
    assert joiner.bad == ["one"]


async def test_a_full_disk_of_a_donor_is_not_taken_for_the_own(
    tmp_path: Path, joiner: Joiner
) -> None:
    full = Donor("full", tmp_path)
    full.refusal = as_rpc_error(DiskFullError("pin: No space left on device", folder="/far"))
    with pytest.raises(UnreachableError, match="full can't read its copy: pin: No space left"):
        await joiner.fetch(full)
    assert joiner.bad == []
    assert await joiner.fetch(full, Donor("other", tmp_path)) == STATE


async def test_the_own_full_disk_says_how_much_is_lacking(
    tmp_path: Path, joiner: Joiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_full_until_s", float("inf"))
    with pytest.raises(DiskFullError, match=r"free 2\.6 MB under") as raised:
        await joiner.fetch(Donor("one", tmp_path))
    assert raised.value.needed_bytes == len(STATE)
    assert Path(raised.value.folder) == joiner.path.parent
