# SPDX-License-Identifier: Apache-2.0
"""A node's samples: cached shards, and windows read across their edges."""

import asyncio
import errno
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.node.data import ShardCache, TokenSource
from shoal.protocol import atomic_file
from shoal.protocol.errors import (
    ChecksumError,
    DataError,
    DiskFullError,
    OversizedStreamError,
    ProtocolError,
    StorageError,
    TruncatedStreamError,
    UnreachableError,
)
from shoal.protocol.ids import RunId
from shoal.protocol.sampling import sample_indices, validation_indices
from shoal.protocol.spec import (
    BatchSpec,
    DataManifest,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
    ShardRef,
)

SEQ_LEN = 8
VOCAB_SIZE = 1_000


class Origin:
    """Serves shards; what it sends can be replaced, held back or made to fail."""

    def __init__(self) -> None:
        self.shards: dict[str, bytes] = {}
        self.served: list[str] = []
        self.closed = 0
        self.asked = asyncio.Event()
        self.released = asyncio.Event()
        self.released.set()
        self.error: Exception | None = None

    def add(self, tokens: list[int]) -> ShardRef:
        content = np.array(tokens, dtype="<u2").tobytes()
        sha256 = hashlib.sha256(content).hexdigest()
        self.shards[sha256] = content
        return ShardRef(sha256=sha256, num_tokens=len(tokens))

    async def fetch(self, sha256: str) -> AsyncIterator[bytes]:
        self.served.append(sha256)
        self.asked.set()
        content = self.shards[sha256]
        try:
            for start in range(0, len(content), 10):
                await self.released.wait()
                if self.error is not None:
                    raise self.error
                yield content[start : start + 10]
        finally:
            self.closed += 1


def run_of(origin: Origin, train: list[list[int]], validation: list[list[int]]) -> ResolvedRun:
    return ResolvedRun(
        run_id=RunId("run-00000000"),
        spec=RunSpec(
            seed=3,
            model=ModelSpec(seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE),
            batch=BatchSpec(microbatches=3, microbatch_size=2),
            pipeline=PipelineSpec(cuts=(2,)),
        ),
        data=DataManifest(
            vocab_size=VOCAB_SIZE,
            token_bytes=2,
            train=tuple(origin.add(tokens) for tokens in train),
            validation=tuple(origin.add(tokens) for tokens in validation),
            tokenizer_sha256="0" * 64,
        ),
    )


def numbered(*lengths: int) -> list[list[int]]:
    """Shards whose tokens count up over all of them: token i has id i."""
    ends = np.cumsum(lengths)
    return [
        list(range(end - length, end)) for end, length in zip(ends.tolist(), lengths, strict=True)
    ]


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.fixture
def cache(tmp_path: Path, origin: Origin) -> ShardCache:
    return ShardCache(tmp_path / "shards", origin.fetch)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "shards").iterdir())


async def test_training_rows_are_the_sampled_windows_also_across_shards(
    origin: Origin, cache: ShardCache
) -> None:
    # Three tokens a shard: every window of nine touches at least three shards.
    source = TokenSource(run_of(origin, numbered(*[3] * 60), []), cache)
    seen = []
    for step in (1, 2, 3):
        await source.ensure_training(step, range(3))
        for microbatch in range(3):
            tokens_BT, targets_BT = source.training(step, microbatch)
            indices = sample_indices(
                seed=3,
                step=step,
                microbatch=microbatch,
                microbatches=3,
                microbatch_size=2,
                num_sequences=(180 - 1) // SEQ_LEN,
            )
            starts = torch.tensor(indices)[:, None] * SEQ_LEN
            assert torch.equal(tokens_BT, starts + torch.arange(SEQ_LEN))
            assert torch.equal(targets_BT, tokens_BT + 1)
            assert tokens_BT.dtype == targets_BT.dtype == torch.int64
            assert tokens_BT.is_contiguous()
            assert targets_BT.is_contiguous()
            seen += indices
    assert len(set(seen)) == len(seen) == 18


async def test_tensors_are_the_callers_own(origin: Origin, cache: ShardCache) -> None:
    source = TokenSource(run_of(origin, numbered(100), []), cache)
    await source.ensure_training(1, [0])
    tokens_BT, targets_BT = source.training(1, 0)
    expected = targets_BT.clone()
    tokens_BT.fill_(-1)
    assert torch.equal(targets_BT, expected)
    assert torch.equal(source.training(1, 0)[1], expected)


async def test_validation_reads_the_held_out_text(origin: Origin, cache: ShardCache) -> None:
    source = TokenSource(run_of(origin, numbered(50), numbered(5, 40, 5)), cache)
    assert source.num_validation_sequences == 6
    await source.ensure_validation([0, 1])
    tokens_BT, targets_BT = source.validation(1)
    starts = torch.tensor(validation_indices(1, 2, 6))[:, None] * SEQ_LEN
    assert torch.equal(tokens_BT, starts + torch.arange(SEQ_LEN))
    assert torch.equal(targets_BT, tokens_BT + 1)


async def test_only_needed_shards_are_fetched_and_each_once(
    origin: Origin, cache: ShardCache
) -> None:
    source = TokenSource(run_of(origin, numbered(*[9] * 100), []), cache)
    await source.ensure_training(1, [1])
    first = list(origin.served)
    assert 1 <= len(first) <= 4  # two windows
    source.training(1, 1)
    await source.ensure_training(1, [1])
    assert origin.served == first


async def test_concurrent_requests_share_one_fetch(origin: Origin, cache: ShardCache) -> None:
    ref = origin.add(list(range(50)))
    origin.released.clear()
    calls = [asyncio.create_task(cache.ensure(ref, token_bytes=2)) for _ in range(5)]
    await asyncio.sleep(0)
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    origin.released.set()
    await asyncio.gather(*calls[1:])
    assert origin.served == [ref.sha256]
    assert cache.path(ref).read_bytes() == origin.shards[ref.sha256]


async def test_another_process_finds_the_shard_on_disk(
    origin: Origin, cache: ShardCache, tmp_path: Path
) -> None:
    ref = origin.add([1, 2, 3])
    await cache.ensure(ref, token_bytes=2)
    again = ShardCache(tmp_path / "shards", origin.fetch)
    await again.ensure(ref, token_bytes=2)
    assert len(origin.served) == 1
    assert files(tmp_path) == [f"{ref.sha256}.bin"]


@pytest.mark.parametrize("damaged", [b"", b"\x01\x00", b"\x07\x00\x02\x00\x03\x00"])
async def test_damaged_file_is_fetched_again(
    origin: Origin, cache: ShardCache, damaged: bytes
) -> None:
    ref = origin.add([1, 2, 3])
    cache.path(ref).parent.mkdir()
    cache.path(ref).write_bytes(damaged)
    await cache.ensure(ref, token_bytes=2)
    assert cache.path(ref).read_bytes() == origin.shards[ref.sha256]


async def test_file_lost_or_cut_during_the_run_is_reported_then_fetched_again(
    origin: Origin, cache: ShardCache
) -> None:
    run = run_of(origin, numbered(100), [])
    source = TokenSource(run, cache)
    with pytest.raises(StorageError, match="No such file"):
        source.training(1, 0)
    await source.ensure_training(1, [0])
    expected = source.training(1, 0)
    cache.path(run.data.train[0]).write_bytes(b"\0\0")
    with pytest.raises(StorageError, match="cut short"):
        source.training(1, 0)
    await source.ensure_training(1, [0])
    assert torch.equal(source.training(1, 0)[0], expected[0])
    assert len(origin.served) == 2


async def test_oversize_stream_is_cut_off(
    origin: Origin, cache: ShardCache, tmp_path: Path
) -> None:
    ref = origin.add([1, 2, 3])
    origin.shards[ref.sha256] += bytes(1 << 20)
    with pytest.raises(OversizedStreamError, match="6 bytes"):
        await cache.ensure(ref, token_bytes=2)
    assert files(tmp_path) == []
    assert origin.closed == 1


async def test_short_and_wrong_streams_are_refused(
    origin: Origin, cache: ShardCache, tmp_path: Path
) -> None:
    ref = origin.add([1, 2, 3])
    content = origin.shards[ref.sha256]
    origin.shards[ref.sha256] = content[:-1]
    with pytest.raises(TruncatedStreamError, match="5 bytes of 6"):
        await cache.ensure(ref, token_bytes=2)
    origin.shards[ref.sha256] = bytes(6)
    with pytest.raises(ChecksumError):
        await cache.ensure(ref, token_bytes=2)
    assert files(tmp_path) == []
    origin.shards[ref.sha256] = content
    await cache.ensure(ref, token_bytes=2)  # a failure isn't remembered
    assert files(tmp_path) == [f"{ref.sha256}.bin"]


async def test_failed_fetch_reaches_every_caller_and_leaves_no_file(
    origin: Origin, cache: ShardCache, tmp_path: Path
) -> None:
    ref = origin.add([1, 2, 3])
    origin.error = UnreachableError("the coordinator is away")
    outcomes = await asyncio.gather(
        *(cache.ensure(ref, token_bytes=2) for _ in range(3)), return_exceptions=True
    )
    assert all(isinstance(outcome, UnreachableError) for outcome in outcomes)
    assert files(tmp_path) == []


async def test_closing_cancels_a_fetch_and_leaves_no_file(
    origin: Origin, cache: ShardCache, tmp_path: Path
) -> None:
    ref = origin.add([1, 2, 3])
    origin.released.clear()
    call = asyncio.create_task(cache.ensure(ref, token_bytes=2))
    await origin.asked.wait()
    await cache.aclose()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert files(tmp_path) == []
    assert origin.closed == 1


async def test_folder_that_cannot_be_written_is_a_storage_error(
    origin: Origin, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ShardCache(tmp_path / "file" / "shards", origin.fetch)
    with pytest.raises(StorageError, match="Not a directory"):
        await cache.ensure(origin.add([1]), token_bytes=2)


async def test_token_outside_the_vocabulary_is_refused(origin: Origin, cache: ShardCache) -> None:
    source = TokenSource(run_of(origin, [[VOCAB_SIZE] * 50], []), cache)
    await source.ensure_training(1, [0])
    with pytest.raises(ProtocolError, match="token 1000"):
        source.training(1, 0)


async def test_run_without_enough_text_says_so(origin: Origin, cache: ShardCache) -> None:
    with pytest.raises(DataError, match="fewer than"):
        TokenSource(run_of(origin, numbered(SEQ_LEN), []), cache)
    source = TokenSource(run_of(origin, numbered(50), []), cache)
    assert source.num_validation_sequences == 0
    with pytest.raises(DataError, match="validation_fraction"):
        await source.ensure_validation([0])


async def test_a_cache_that_is_full_keeps_what_this_step_and_the_last_one_read(
    tmp_path: Path, origin: Origin
) -> None:
    run = run_of(origin, numbered(*[6] * 40), [])
    cache = ShardCache(tmp_path / "shards", origin.fetch, max_bytes=100)
    source = TokenSource(run, cache)
    for step in range(1, 9):
        await source.ensure_training(step, range(3))
        if step > 1:
            source.training(step - 1, 2)
        for microbatch in range(3):
            source.training(step, microbatch)
    kept = sum(p.stat().st_size for p in (tmp_path / "shards").iterdir())
    in_two_steps = 2 * 3 * 2 * 3  # steps, microbatches, rows, shards a row at most
    assert kept <= in_two_steps * 6 * run.data.token_bytes
    assert len(files(tmp_path)) < 40


def full_for(monkeypatch: pytest.MonkeyPatch, folder: Path, *, beside: int) -> None:
    """The disk is full while more than `beside` shards lie in `folder`."""

    def require_space(path: Path) -> None:
        if len(list(folder.glob("*.bin"))) > beside:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_file, "require_space", require_space)


async def test_on_a_full_disk_shards_that_nobody_needs_make_room(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Exception] = []
    cache = ShardCache(tmp_path, origin.fetch, on_full=heard.append)
    old, new = origin.add([1, 2, 3]), origin.add([4, 5, 6])
    await cache.ensure(old, token_bytes=2)
    cache.turn()
    cache.turn()
    full_for(monkeypatch, tmp_path, beside=0)
    await cache.ensure(new, token_bytes=2)
    assert [path.name for path in tmp_path.glob("*.bin")] == [f"{new.sha256}.bin"]
    assert heard == []


async def test_a_shard_for_which_there_is_no_room_says_how_much_it_needs(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[DiskFullError] = []
    cache = ShardCache(tmp_path, origin.fetch, on_full=heard.append)
    used, more = origin.add([1, 2, 3]), origin.add([4, 5, 6])
    await cache.ensure(used, token_bytes=2)
    full_for(monkeypatch, tmp_path, beside=0)
    with pytest.raises(DiskFullError):
        await cache.ensure(more, token_bytes=2)
    assert [(error.folder, error.needed_bytes) for error in heard] == [(str(tmp_path), 6)]
    assert cache.path(used).exists()


async def test_a_full_disk_elsewhere_costs_no_shard_here(origin: Origin, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, origin.fetch)
    old, new = origin.add([1, 2, 3]), origin.add([4, 5, 6])
    await cache.ensure(old, token_bytes=2)
    cache.turn()
    cache.turn()
    origin.error = DiskFullError("the coordinator's disk is full")
    with pytest.raises(DiskFullError):
        await cache.ensure(new, token_bytes=2)
    assert cache.path(old).exists()
