# SPDX-License-Identifier: Apache-2.0
"""Prepares a run's data: tokenizer.json and token shards in the run folder, and their manifest.

Everything is built in a staging folder and moved from there, so that an interruption or a full
disk leaves nothing half-written. A cache keeps finished results by what they were made from: a
second launch links them into the run folder.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from shoal.coordinator.data.shards import (
    choose_validation,
    encode_documents,
    shard_is_intact,
    shard_path,
    write_shards,
)
from shoal.coordinator.data.sources import list_files, open_source
from shoal.coordinator.data.tokenizer import build_tokenizer, tokenizer_digest
from shoal.protocol.atomic_file import AtomicFile
from shoal.protocol.errors import DataError, StorageError
from shoal.protocol.sampling import num_sequences
from shoal.protocol.spec import DataManifest, DataSpec, canonical_json

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with the phase's name and how much of it is done, 0 to 1."""

TOKENIZER_FILE = "tokenizer.json"

_MANIFEST_FILE = "manifest.json"
_LAYOUT_VERSION = 1
"""Raise it when the same inputs shall give other shards: old cache entries are then unused."""
_STAGING_PREFIX = ".preparing-"
_STALE_STAGING_S = 24 * 3600


def prepare_data(
    spec: DataSpec,
    *,
    seq_len: int,
    min_sequences: int,
    folder: Path,
    cache: Path | None,
    progress: Progress,
) -> DataManifest:
    """Fill `folder` with tokenizer.json and shards/, from the source or from `cache`.

    `min_sequences` is what training needs at least: a microbatch's. Equal text, spec and
    `tokenizers` version give an equal manifest on every machine. Raises `ConfigError`,
    `DataError` (text missing, unreadable or too little) and `StorageError`. Blocks for seconds to
    hours: run it in a thread.
    """
    try:
        files_digest = list_files(spec).digest
        entry = cache / _cache_key(spec, seq_len, files_digest) if cache else None
        manifest = _load_entry(entry) if entry else None
        if entry is None or manifest is None:
            with _staging(cache or folder) as staging:
                manifest = _build(spec, seq_len, staging, progress)
                _check_size(manifest, spec, seq_len, min_sequences)
                _install(staging, manifest, folder)
                if entry is not None:
                    _publish(staging, entry)
        else:
            _check_size(manifest, spec, seq_len, min_sequences)
            _install(entry, manifest, folder)
    except OSError as error:
        raise StorageError(
            f"preparing the run's data in {folder}: {error}. "
            "Free some space, or choose another folder that can be written."
        ) from error
    progress("data ready", 1.0)
    return manifest


def _cache_key(spec: DataSpec, seq_len: int, files_digest: str) -> str:
    facts = {
        "layout": _LAYOUT_VERSION,
        "spec": spec.model_dump(mode="json"),
        "seq_len": seq_len,  # a small corpus holds out at least one sequence
        "files": files_digest,
        "tokenizer": tokenizer_digest(spec.tokenizer),
    }
    return hashlib.sha256(canonical_json(facts)).hexdigest()


def _load_entry(entry: Path) -> DataManifest | None:
    """The entry's manifest, where every file of it is there and intact."""
    try:
        manifest = DataManifest.model_validate_json((entry / _MANIFEST_FILE).read_bytes())
        tokenizer_json = (entry / TOKENIZER_FILE).read_bytes()
    except FileNotFoundError:
        if entry.exists():
            logger.warning("%s lacks a file; the data is prepared again", entry)
        return None
    except ValidationError:
        logger.warning("%s: its manifest is damaged; the data is prepared again", entry)
        return None
    if hashlib.sha256(tokenizer_json).hexdigest() != manifest.tokenizer_sha256 or not all(
        shard_is_intact(entry, ref, manifest.token_bytes)
        for ref in (*manifest.train, *manifest.validation)
    ):
        logger.warning("%s is damaged; the data is prepared again", entry)
        return None
    return manifest


def _build(spec: DataSpec, seq_len: int, staging: Path, progress: Progress) -> DataManifest:
    num_bytes = list_files(spec).num_bytes
    total_bytes = max(1, min(num_bytes, spec.max_bytes) if spec.max_bytes else num_bytes)

    progress("building the tokenizer", 0.0)
    tokenizer = build_tokenizer(spec.tokenizer, (document.text for document in open_source(spec)))
    _write(staging / TOKENIZER_FILE, tokenizer.json_bytes)

    progress("encoding", 0.0)
    encoded = encode_documents(
        open_source(spec),
        tokenizer,
        staging / "tokens.bin",
        # Compressed sources hold more text than bytes.
        lambda done: progress("encoding", min(1.0, done / total_bytes)),
    )
    validation = choose_validation(
        encoded.keys,
        encoded.num_tokens,
        fraction=spec.validation_fraction,
        min_tokens=seq_len + 1,
    )
    held_out_tokens = sum(encoded.num_tokens[number] for number in validation)
    if spec.validation_fraction and not num_sequences(held_out_tokens, seq_len):
        validation = frozenset()
        logger.warning(
            "data.source = %r: too little text to hold a sequence out; nothing is validated",
            spec.source,
        )
    progress("writing shards", 0.0)
    training = frozenset(range(len(encoded.keys))) - validation
    manifest = DataManifest(
        vocab_size=tokenizer.vocab_size,
        token_bytes=encoded.token_bytes,
        train=write_shards(encoded, training, staging),
        validation=write_shards(encoded, validation, staging),
        tokenizer_sha256=hashlib.sha256(tokenizer.json_bytes).hexdigest(),
    )
    encoded.path.unlink()
    _write(staging / _MANIFEST_FILE, canonical_json(manifest.model_dump(mode="json")))
    progress("writing shards", 1.0)
    return manifest


def _check_size(manifest: DataManifest, spec: DataSpec, seq_len: int, min_sequences: int) -> None:
    num_tokens = sum(ref.num_tokens for ref in manifest.train)
    found = num_sequences(num_tokens, seq_len)
    if found < min_sequences:
        raise DataError(
            f"data.source = {spec.source!r} gives {num_tokens} training tokens, {found} sequences "
            f"of model.seq_len = {seq_len}; a microbatch takes {min_sequences}. "
            "Add text, or lower model.seq_len or batch.microbatch_size."
        )


@contextlib.contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{_STAGING_PREFIX}*"):  # of a launch that was killed
        if time.time() - left.stat().st_mtime > _STALE_STAGING_S:
            shutil.rmtree(left, ignore_errors=True)
    staging = parent / f"{_STAGING_PREFIX}{secrets.token_hex(6)}"
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _install(origin: Path, manifest: DataManifest, folder: Path) -> None:
    """Link or copy an entry's files into the run folder; on failure none of the new ones stay."""
    refs = (*manifest.train, *manifest.validation)
    placed: list[Path] = []
    try:
        for sha256 in sorted({ref.sha256 for ref in refs}):
            target = shard_path(folder, sha256)
            if not target.exists():
                placed.append(target)
            _link_or_copy(shard_path(origin, sha256), target)
        # Written last and always copied: the run's own file, which a user may open and save.
        target = folder / TOKENIZER_FILE
        _write(target, (origin / TOKENIZER_FILE).read_bytes())
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        raise


def _write(path: Path, content: bytes) -> None:
    with AtomicFile(path) as file:
        file.write(content)


def _link_or_copy(origin: Path, target: Path) -> None:
    """Atomically, replacing a file that is there (it may be damaged)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        try:
            os.link(origin, temporary)
        except OSError:  # another file system, or one without links
            _write(target, origin.read_bytes())
            return
        temporary.replace(target)
    finally:
        # Also after a success: renaming a link over another link of one file does nothing.
        temporary.unlink(missing_ok=True)


def _publish(staging: Path, entry: Path) -> None:
    """Make the staged result the cache's entry, in place of a damaged one.

    The staging folder is renamed: it is gone afterwards. Whoever publishes the same entry at the
    same moment has built the same, so either may win.
    """
    if entry.exists():
        damaged = entry.with_name(f"{_STAGING_PREFIX}{secrets.token_hex(6)}")
        entry.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        staging.rename(entry)
    except OSError:
        if not entry.exists():
            raise
