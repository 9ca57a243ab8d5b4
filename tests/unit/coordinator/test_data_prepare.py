# SPDX-License-Identifier: Apache-2.0
"""From text to a run folder's tokenizer and shards, through the cache and around damage."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from shoal.coordinator.data import prepare
from shoal.coordinator.data.prepare import prepare_data
from shoal.coordinator.data.shards import shard_path
from shoal.protocol.errors import DataError, StorageError
from shoal.protocol.spec import DataManifest, DataSpec


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        text = "".join(f"line {line} of document {number}\n" for line in range(20))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def run(
    corpus: Path,
    folder: Path,
    cache: Path | None = None,
    *,
    tokenizer: str = "bpe:300",
    min_sequences: int = 4,
    seq_len: int = 16,
    phases: list[tuple[str, float]] | None = None,
) -> DataManifest:
    spec = DataSpec(source=f"text:{corpus}", tokenizer=tokenizer)
    return prepare_data(
        spec,
        seq_len=seq_len,
        min_sequences=min_sequences,
        folder=folder,
        cache=cache,
        progress=lambda phase, done: phases.append((phase, done)) if phases is not None else None,
    )


def files_below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def expected_files(manifest: DataManifest) -> set[str]:
    refs = (*manifest.train, *manifest.validation)
    return {"tokenizer.json"} | {f"shards/{ref.sha256}.bin" for ref in refs}


def forbid_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(prepare, "build_tokenizer", refuse)


def test_two_preparations_give_equal_digests(corpus: Path, tmp_path: Path) -> None:
    first = run(corpus, tmp_path / "one")
    assert run(corpus, tmp_path / "two") == first
    assert files_below(tmp_path / "one") == expected_files(first)
    assert first.train
    assert first.validation
    assert first.token_bytes == 2


def test_all_text_is_in_the_shards_once(corpus: Path, tmp_path: Path) -> None:
    manifest = run(corpus, tmp_path / "run", tokenizer="byte")
    tokens = np.concatenate(
        [
            np.fromfile(shard_path(tmp_path / "run", ref.sha256), dtype="<u2")
            for ref in (*manifest.train, *manifest.validation)
        ]
    )
    documents = bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).split(b"\0")[:-1]
    assert sorted(documents) == sorted(path.read_bytes() for path in corpus.iterdir())


def test_second_launch_takes_all_from_the_cache(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(corpus, tmp_path / "one", tmp_path / "cache")
    forbid_building(monkeypatch)
    assert run(corpus, tmp_path / "two", tmp_path / "cache") == first
    assert files_below(tmp_path / "two") == expected_files(first)
    # And once more over what is there: the same folder, started again.
    assert run(corpus, tmp_path / "two", tmp_path / "cache") == first
    assert files_below(tmp_path / "two") == expected_files(first)


def test_cache_is_copied_where_links_are_impossible(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(corpus, tmp_path / "one", tmp_path / "cache")

    def refuse(*args: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    forbid_building(monkeypatch)
    assert run(corpus, tmp_path / "two", tmp_path / "cache") == first
    assert files_below(tmp_path / "two") == expected_files(first)


def test_changed_text_spec_or_sequence_length_misses_the_cache(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = run(corpus, tmp_path / "one", cache)
    assert run(corpus, tmp_path / "two", cache, tokenizer="byte") != first
    run(corpus, tmp_path / "three", cache, seq_len=8)
    (corpus / "00.txt").write_text("something else entirely")
    assert run(corpus, tmp_path / "four", cache) != first
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest", "tokenizer"])
def test_damaged_cache_is_rebuilt(corpus: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    first = run(corpus, tmp_path / "one", cache)
    [entry] = cache.iterdir()
    shard = shard_path(entry, first.train[0].sha256)
    content = shard.read_bytes()
    match damage:
        case "flip":
            shard.unlink()  # not through the link: the first run keeps its own
            shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "truncate":
            shard.unlink()
            shard.write_bytes(content[:-2])
        case "delete":
            shard.unlink()
        case "manifest":
            (entry / "manifest.json").write_text("{")
        case _:
            (entry / "tokenizer.json").write_text("{}")
    assert run(corpus, tmp_path / "two", cache) == first
    assert shard_path(tmp_path / "two", first.train[0].sha256).read_bytes() == content
    [entry] = cache.iterdir()
    assert shard_path(entry, first.train[0].sha256).read_bytes() == content
    tokenizer_json = (tmp_path / "one" / "tokenizer.json").read_bytes()
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == tokenizer_json
    assert (entry / "tokenizer.json").read_bytes() == tokenizer_json


def test_damaged_run_folder_is_mended_from_the_cache(corpus: Path, tmp_path: Path) -> None:
    first = run(corpus, tmp_path / "one", tmp_path / "cache")
    shard = shard_path(tmp_path / "one", first.train[0].sha256)
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(b"damaged")
    run(corpus, tmp_path / "one", tmp_path / "cache")
    assert shard.read_bytes() == content


@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize("full_after", [0, 2, 4, 6, 8])
def test_full_disk_is_a_storage_error_that_leaves_nothing(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_cache: bool,
    full_after: int,
) -> None:
    """The writes: tokenizer, two splits, manifest; then the run folder's tokenizer. Each syncs its
    file, then its folder."""
    written = 0
    real_fsync = os.fsync

    def fill_up(descriptor: int) -> None:
        nonlocal written
        if written == full_after:
            raise OSError(errno.ENOSPC, "No space left on device")
        written += 1
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fill_up)
    cache = tmp_path / "cache" if with_cache else None
    with pytest.raises(StorageError, match="No space left on device"):
        run(corpus, tmp_path / "run", cache)
    assert files_below(tmp_path) == {f"corpus/{number:02}.txt" for number in range(40)}


def test_interruption_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    def interrupt(phase: str, done: float) -> None:
        if phase == "writing shards":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data(
            DataSpec(source=f"text:{corpus}", tokenizer="byte"),
            seq_len=16,
            min_sequences=1,
            folder=tmp_path / "run",
            cache=None,
            progress=interrupt,
        )
    assert files_below(tmp_path / "run") == set()


def test_too_little_text_names_what_is_needed(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"a microbatch takes 100000\. Add text"):
        run(corpus, tmp_path / "run", cache, min_sequences=100_000)
    assert not (tmp_path / "run").exists()
    run(corpus, tmp_path / "run", cache)
    with pytest.raises(DataError, match="a microbatch takes"):  # also out of the cache
        run(corpus, tmp_path / "run", cache, min_sequences=100_000)


def test_single_document_is_all_for_training(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("a single short document " * 20)
    manifest = run(path, tmp_path / "run", tokenizer="byte")
    assert manifest.validation == ()
    assert manifest.train[0].num_tokens == len(path.read_text()) + 1


def test_progress_names_phases_and_ends_complete(corpus: Path, tmp_path: Path) -> None:
    phases: list[tuple[str, float]] = []
    run(corpus, tmp_path / "run", phases=phases)
    names = list(dict.fromkeys(name for name, _ in phases))
    assert names == ["building the tokenizer", "encoding", "writing shards", "data ready"]
    assert all(0 <= done <= 1 for _, done in phases)
    assert ("encoding", 1.0) in phases
    assert phases[-1] == ("data ready", 1.0)


def test_leftovers_of_a_killed_launch_are_removed_when_old(corpus: Path, tmp_path: Path) -> None:
    old, young = tmp_path / "run" / ".preparing-old", tmp_path / "run" / ".preparing-young"
    old.mkdir(parents=True)
    young.mkdir()
    os.utime(old, (0, 0))
    run(corpus, tmp_path / "run", tokenizer="byte")
    assert not old.exists()
    assert young.exists()
