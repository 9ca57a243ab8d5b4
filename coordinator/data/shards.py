# SPDX-License-Identifier: Apache-2.0
"""Token shards: encoding, the split into training and validation, the files and their store.

A shard is a headerless array of little-endian token ids, named by its SHA-256. Shards of one
split are concatenated in order; documents are separated by end-of-text and may cross shards.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.data.sources import Document
from shoal.coordinator.data.tokenizer import TrainedTokenizer
from shoal.protocol.atomic_file import AtomicFile
from shoal.protocol.errors import MalformedFrameError, ProtocolError, StorageError
from shoal.protocol.spec import ShardRef

TOKENS_PER_SHARD = 4 << 20
SHARDS_FOLDER = "shards"

_BATCH_CHARS = 2 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")

Tokens = NDArray[np.unsignedinteger]


def token_bytes_of(vocab_size: int) -> Literal[2, 4]:
    return 2 if vocab_size < 1 << 16 else 4


def token_dtype(token_bytes: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{token_bytes}")


@dataclass(frozen=True, slots=True)
class EncodedText:
    """All documents' tokens in one file, each document closed by end-of-text."""

    path: Path
    token_bytes: Literal[2, 4]
    num_tokens: tuple[int, ...]
    """Per document, end-of-text included."""
    keys: tuple[int, ...]
    """Per document: 64 bits of a hash of its text."""


def encode_documents(
    documents: Iterable[Document],
    tokenizer: TrainedTokenizer,
    path: Path,
    progress: Callable[[int], None],
) -> EncodedText:
    """Write the tokens of all documents to `path`; `progress` gets the bytes of text done."""
    token_bytes = token_bytes_of(tokenizer.vocab_size)
    dtype = token_dtype(token_bytes)
    end_of_text = [tokenizer.end_of_text_id]
    num_tokens: list[int] = []
    keys: list[int] = []
    num_bytes = 0
    with path.open("wb") as handle:
        for texts in _batches(documents):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                handle.write(np.array(ids + end_of_text, dtype=dtype).tobytes())
                raw = text.encode("utf-8")
                num_tokens.append(len(ids) + 1)
                keys.append(int.from_bytes(hashlib.sha256(raw).digest()[:8], "little"))
                num_bytes += len(raw)
            progress(num_bytes)
    return EncodedText(path, token_bytes, tuple(num_tokens), tuple(keys))


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    texts: list[str] = []
    num_chars = 0
    for document in documents:
        texts.append(document.text)
        num_chars += len(document.text)
        if num_chars >= _BATCH_CHARS:
            yield texts
            texts, num_chars = [], 0
    if texts:
        yield texts


def choose_validation(
    keys: Sequence[int], num_tokens: Sequence[int], *, fraction: float, min_tokens: int
) -> frozenset[int]:
    """The numbers of the documents to hold out: those with the lowest keys.

    A document's own text decides, so equal documents stay together and a corpus that grows keeps
    its split. A corpus too small for `fraction` to give `min_tokens` holds out more documents,
    up to half of its tokens; a single document is never held out.
    """
    if not fraction:
        return frozenset()
    threshold = int(fraction * 2**64)
    total = sum(num_tokens)
    chosen: set[int] = set()
    chosen_tokens = 0
    by_key: dict[int, list[int]] = {}
    for number, key in enumerate(keys):
        by_key.setdefault(key, []).append(number)
    for key in sorted(by_key):
        more = sum(num_tokens[number] for number in by_key[key])
        wanted = key < threshold or chosen_tokens < min_tokens
        if not wanted or 2 * (chosen_tokens + more) > total:
            break
        chosen.update(by_key[key])
        chosen_tokens += more
    return frozenset(chosen)


def write_shards(
    encoded: EncodedText, numbers: frozenset[int], folder: Path
) -> tuple[ShardRef, ...]:
    """Write the documents with these numbers, in order, as shards below `folder`."""
    dtype = token_dtype(encoded.token_bytes)
    refs: list[ShardRef] = []
    buffer = np.empty(min(TOKENS_PER_SHARD, sum(encoded.num_tokens)), dtype=dtype)
    filled = 0
    with encoded.path.open("rb") as handle:
        for number, length in enumerate(encoded.num_tokens):
            raw = handle.read(length * encoded.token_bytes)
            if number not in numbers:
                continue
            tokens = np.frombuffer(raw, dtype=dtype)
            while len(tokens):
                taken = tokens[: len(buffer) - filled]
                buffer[filled : filled + len(taken)] = taken
                filled += len(taken)
                tokens = tokens[len(taken) :]
                if filled == len(buffer):
                    refs.append(write_shard(folder, buffer))
                    filled = 0
    if filled:
        refs.append(write_shard(folder, buffer[:filled]))
    return tuple(refs)


def write_shard(folder: Path, tokens: Tokens) -> ShardRef:
    """Write one shard atomically; an existing file of its name is replaced."""
    content = tokens.tobytes()
    sha256 = hashlib.sha256(content).hexdigest()
    with AtomicFile(shard_path(folder, sha256)) as file:
        file.write(content)
    return ShardRef(sha256=sha256, num_tokens=len(tokens))


def shard_path(folder: Path, sha256: str) -> Path:
    return folder / SHARDS_FOLDER / f"{sha256}.bin"


def shard_is_intact(folder: Path, ref: ShardRef, token_bytes: int) -> bool:
    try:
        with shard_path(folder, ref.sha256).open("rb") as handle:
            if os.fstat(handle.fileno()).st_size != ref.num_tokens * token_bytes:
                return False
            return hashlib.file_digest(handle, "sha256").hexdigest() == ref.sha256
    except FileNotFoundError:
        return False


class ShardStore:
    """A run folder's shards, by digest, for peers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, sha256: str) -> Path:
        """The file of a shard. `sha256` comes from a peer: nothing but 64 hex digits gets near a
        path. Raises `MalformedFrameError`, `ProtocolError` for a shard that the run doesn't
        have, `StorageError` for an unreadable one.
        """
        if not _SHA256.fullmatch(sha256):
            raise MalformedFrameError(
                f"shard digest {sha256[:80]!r} is not 64 lower-case hex digits. "
                "Ask for a digest of the run's data manifest."
            )
        path = shard_path(self._folder, sha256)
        try:
            if path.is_file():
                return path
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}. Check the run folder.") from error
        raise ProtocolError(
            f"no shard {sha256} in this run. Ask for a digest of the run's data manifest."
        )
