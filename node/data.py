# SPDX-License-Identifier: Apache-2.0
"""A node's samples: token shards fetched by digest into a cache, and windows read from them.

Shapes: B rows of a microbatch, T = seq_len tokens; int64 on the CPU.
"""

import asyncio
import hashlib
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.node.shard_room import evict, mark_used
from shoal.protocol.atomic_file import AtomicFile, storage_error
from shoal.protocol.errors import (
    ChecksumError,
    DataError,
    DiskFullError,
    OversizedStreamError,
    ProtocolError,
    StorageError,
    TruncatedStreamError,
)
from shoal.protocol.sampling import (
    num_sequences,
    sample_indices,
    sequence_span,
    validation_indices,
)
from shoal.protocol.spec import ResolvedRun, ShardRef

Fetch = Callable[[str], AsyncIterator[bytes]]
"""Streams a shard's bytes by its SHA-256. It brings its own deadline; nothing is trusted."""

_CONCURRENT_FETCHES = 4


class ShardCache:
    """Shards on disk, named by digest; shared by all runs of a node.

    Used from one event loop; `path` may be called from any thread.
    """

    def __init__(
        self,
        folder: Path,
        fetch: Fetch,
        *,
        max_bytes: int | None = None,
        on_full: Callable[[DiskFullError], None] = lambda error: None,
    ) -> None:
        """With `max_bytes` the shards used longest ago go when there are more; those asked for in
        this turn and the one before stay, however large they are. `on_full` hears of a shard for
        which the disk has no room, though all others are gone."""
        self._folder = folder
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._on_full = on_full
        self._turn = 0
        self._used: dict[str, int] = {}  # the turn in which a shard was last asked for
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._verified: set[str] = set()
        self._slots = asyncio.Semaphore(_CONCURRENT_FETCHES)

    def turn(self) -> None:
        """A step is over, or begun: shards asked for before the last turn are free to go."""
        self._turn += 1
        self._used = {sha: turn for sha, turn in self._used.items() if turn >= self._turn - 1}

    def path(self, ref: ShardRef) -> Path:
        return self._folder / f"{ref.sha256}.bin"

    async def ensure(self, ref: ShardRef, *, token_bytes: int) -> None:
        """Have the shard on disk, verified. Concurrent calls for one shard share one fetch, which
        goes on when a caller is cancelled.

        Raises what the fetch raises, `OversizedStreamError`, `TruncatedStreamError` or
        `ChecksumError` for wrong bytes, `StorageError` for the disk. The next call tries again.
        """
        num_bytes = ref.num_tokens * token_bytes
        if self._used.get(ref.sha256) != self._turn:
            self._used[ref.sha256] = self._turn
            mark_used(self.path(ref))
        if ref.sha256 in self._verified and _size(self.path(ref)) == num_bytes:
            return
        task = self._fetches.get(ref.sha256)
        if task is None:
            task = asyncio.create_task(
                self._verify_or_fetch(ref, num_bytes), name=f"shard {ref.sha256[:8]}"
            )
            self._fetches[ref.sha256] = task
            task.add_done_callback(lambda done: self._forget(ref.sha256, done))
        await asyncio.shield(task)

    async def aclose(self) -> None:
        """Cancel fetches under way; they leave no file."""
        tasks = list(self._fetches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, sha256: str, task: asyncio.Task[None]) -> None:
        self._fetches.pop(sha256, None)
        if not task.cancelled():
            task.exception()  # retrieved: all who asked may have been cancelled

    async def _verify_or_fetch(self, ref: ShardRef, num_bytes: int) -> None:
        path = self.path(ref)
        async with self._slots:
            self._verified.discard(ref.sha256)
            if not await asyncio.to_thread(_is_intact, path, ref.sha256, num_bytes):
                await self._store(ref, num_bytes)
                if self._max_bytes is not None:
                    await self._evict(self._max_bytes)
        self._verified.add(ref.sha256)

    async def _store(self, ref: ShardRef, num_bytes: int) -> None:
        """On a full disk the shards that aren't in use are the first to go."""
        try:
            try:
                await self._receive(ref, num_bytes)
            except DiskFullError as error:
                if not error.folder or not await self._evict(0):
                    raise
                await self._receive(ref, num_bytes)
        except DiskFullError as error:
            self._on_full(error)
            raise

    async def _evict(self, max_bytes: int) -> int:
        kept = {f"{sha}.bin" for sha in self._used}
        return await asyncio.to_thread(evict, self._folder, max_bytes, kept=kept)

    async def _receive(self, ref: ShardRef, num_bytes: int) -> None:
        chunks = self._fetch(ref.sha256)
        partial = AtomicFile(self.path(ref), expected_bytes=num_bytes)
        hasher = hashlib.sha256()
        received = 0
        try:
            async for chunk in chunks:
                received += len(chunk)
                if received > num_bytes:
                    raise OversizedStreamError(
                        f"shard {ref.sha256}: more than the plan's {num_bytes} bytes. "
                        "The transfer is dropped; fetch it from an honest source."
                    )
                hasher.update(chunk)
                await asyncio.to_thread(partial.write, chunk)
            if received < num_bytes:
                raise TruncatedStreamError(
                    f"shard {ref.sha256}: {received} bytes of {num_bytes}. "
                    "It is fetched again when next needed."
                )
            if hasher.hexdigest() != ref.sha256:
                raise ChecksumError(
                    f"shard {ref.sha256}: its bytes have the digest {hasher.hexdigest()}. "
                    "It is fetched again when next needed."
                )
            await asyncio.to_thread(partial.commit)
        finally:
            # Safe while a cancelled call's thread still writes: the file object locks.
            partial.discard()
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()


class TokenSource:
    """The samples of one run: which ones is decided by (seed, step, microbatch) alone.

    `ensure_…` brings the shards here; the reading calls are synchronous, take fractions of a
    millisecond and may come from any thread.
    """

    def __init__(self, run: ResolvedRun, cache: ShardCache) -> None:
        """Raises `DataError` where the run's training text holds no sequence."""
        self._spec = run.spec
        self._cache = cache
        self._step = -1
        seq_len, token_bytes = run.spec.model.seq_len, run.data.token_bytes
        vocab_size = run.data.vocab_size
        self._training = _Split(cache, run.data.train, token_bytes, vocab_size, seq_len)
        self._validation = _Split(cache, run.data.validation, token_bytes, vocab_size, seq_len)
        if not self._training.num_sequences:
            raise DataError(
                f"run {run.run_id}: its training text has fewer than model.seq_len + 1 = "
                f"{seq_len + 1} tokens. Launch it again with more text."
            )

    @property
    def num_validation_sequences(self) -> int:
        """0 where the run holds no text out."""
        return self._validation.num_sequences

    async def ensure_training(self, step: int, microbatches: Iterable[int]) -> None:
        """Fetch what `training` reads for these microbatch ids. Raises like `ShardCache.ensure`."""
        if step != self._step:
            self._step = step
            self._cache.turn()
        await self._training.ensure(
            index for microbatch in microbatches for index in self._sampled(step, microbatch)
        )

    async def ensure_validation(self, microbatches: Iterable[int]) -> None:
        await self._validation.ensure(
            index for microbatch in microbatches for index in self._held_out(microbatch)
        )

    def training(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """(tokens_BT, targets_BT), freshly allocated. Raises `StorageError` for a shard that
        isn't on disk, `ProtocolError` for a token outside the vocabulary."""
        return self._training.read(self._sampled(step, microbatch))

    def validation(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """Like `training`; the same at every step."""
        return self._validation.read(self._held_out(microbatch))

    def _sampled(self, step: int, microbatch: int) -> tuple[int, ...]:
        return sample_indices(
            seed=self._spec.seed,
            step=step,
            microbatch=microbatch,
            microbatches=self._spec.batch.microbatches,
            microbatch_size=self._spec.batch.microbatch_size,
            num_sequences=self._training.num_sequences,
        )

    def _held_out(self, microbatch: int) -> tuple[int, ...]:
        if not self._validation.num_sequences:
            raise DataError(
                "this run holds no text out, so nothing can be validated. "
                "Launch it with data.validation_fraction above 0 and more text."
            )
        return validation_indices(
            microbatch, self._spec.batch.microbatch_size, self._validation.num_sequences
        )


class _Split:
    """Sequences over concatenated shards."""

    def __init__(
        self,
        cache: ShardCache,
        refs: tuple[ShardRef, ...],
        token_bytes: int,
        vocab_size: int,
        seq_len: int,
    ) -> None:
        self._cache = cache
        self._refs = refs
        self._dtype = np.dtype(f"<u{token_bytes}")
        self._vocab_size = vocab_size
        self._seq_len = seq_len
        self._ends = list(accumulate(ref.num_tokens for ref in refs))
        self.num_sequences = num_sequences(self._ends[-1] if refs else 0, seq_len)

    async def ensure(self, indices: Iterable[int]) -> None:
        needed = {
            self._refs[shard].sha256: self._refs[shard]
            for index in indices
            for shard, _, _ in self._pieces(index)
        }
        # All are waited for, so that no failure is left behind unseen; then the first is raised.
        outcomes = await asyncio.gather(
            *(self._cache.ensure(ref, token_bytes=self._dtype.itemsize) for ref in needed.values()),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def read(self, indices: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        windows = np.empty((len(indices), self._seq_len + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            filled = 0
            for shard, start, stop in self._pieces(index):
                windows[row, filled : filled + stop - start] = self._tokens(shard, start, stop)
                filled += stop - start
        if windows.size and int(windows.max()) >= self._vocab_size:
            raise ProtocolError(
                f"token {int(windows.max())} in a shard of this run, whose vocabulary has "
                f"{self._vocab_size}. Its coordinator made a mistake: launch the run again."
            )
        tokens_BT, targets_BT = windows[:, :-1].copy(), windows[:, 1:].copy()
        return torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT)

    def _pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """(shard, start, stop) with offsets within the shard."""
        start, stop = sequence_span(index, self._seq_len)
        shard = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[shard] - self._refs[shard].num_tokens
            end = min(stop, self._ends[shard])
            yield shard, start - begin, end - begin
            start = end
            shard += 1

    def _tokens(self, shard: int, start: int, stop: int) -> NDArray[np.unsignedinteger]:
        # Read, not mapped: it comes from the same page cache, holds no descriptor per shard, and a
        # file that someone truncates gives an error here, where a mapping would kill the process.
        path = self._cache.path(self._refs[shard])
        try:
            tokens: NDArray[np.unsignedinteger] = np.fromfile(
                path, dtype=self._dtype, count=stop - start, offset=start * self._dtype.itemsize
            )
        except OSError as error:
            raise storage_error(path, error) from error
        if len(tokens) != stop - start:
            raise StorageError(f"{path}: it was cut short. It is fetched again when next needed.")
        return tokens


def _is_intact(path: Path, sha256: str, num_bytes: int) -> bool:
    if _size(path) != num_bytes:
        return False
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest() == sha256
    except OSError as error:
        raise storage_error(path, error) from error


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
