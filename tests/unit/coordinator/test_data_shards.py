# SPDX-License-Identifier: Apache-2.0
"""Token shards: encoding, the split, content addresses, and what the store serves."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.data import shards
from shoal.coordinator.data.shards import (
    ShardStore,
    choose_validation,
    encode_documents,
    shard_path,
    token_bytes_of,
    token_dtype,
    write_shard,
    write_shards,
)
from shoal.coordinator.data.sources import Document
from shoal.coordinator.data.tokenizer import build_tokenizer
from shoal.protocol.errors import MalformedFrameError, ProtocolError

BYTE = build_tokenizer("byte", [])


def read(folder: Path, sha256: str) -> list[int]:
    return np.fromfile(shard_path(folder, sha256), dtype="<u2").tolist()


def encode(folder: Path, *texts: str) -> shards.EncodedText:
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    return encode_documents(documents, BYTE, folder / "tokens.bin", lambda done: None)


def test_token_width_follows_the_vocabulary() -> None:
    assert [token_bytes_of(size) for size in (257, 65_535, 65_536, 200_000)] == [2, 2, 4, 4]
    assert np.array([1, 258], dtype=token_dtype(2)).tobytes() == b"\x01\x00\x02\x01"
    assert np.array([258], dtype=token_dtype(4)).tobytes() == b"\x02\x01\x00\x00"


def test_documents_are_joined_by_end_of_text_in_order(tmp_path: Path) -> None:
    encoded = encode(tmp_path, "ab", "c", "d")
    [ref] = write_shards(encoded, frozenset({0, 2}), tmp_path)
    assert read(tmp_path, ref.sha256) == [97, 98, 256, 100, 256]
    assert ref.num_tokens == 5


def test_shards_are_cut_at_their_size_and_keep_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", 4)
    encoded = encode(tmp_path, "abcdefghi", "j", "klm")
    refs = write_shards(encoded, frozenset(range(3)), tmp_path)
    assert [ref.num_tokens for ref in refs] == [4, 4, 4, 4]
    joined = [token for ref in refs for token in read(tmp_path, ref.sha256)]
    assert joined == [*b"abcdefghi", 256, *b"j", 256, *b"klm", 256]
    for ref in refs:
        content = shard_path(tmp_path, ref.sha256).read_bytes()
        assert hashlib.sha256(content).hexdigest() == ref.sha256


def test_no_documents_give_no_shards(tmp_path: Path) -> None:
    assert write_shards(encode(tmp_path, "ab"), frozenset(), tmp_path) == ()


def test_progress_counts_bytes_of_text_up_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_BATCH_CHARS", 3)
    seen: list[int] = []
    documents = [Document(str(number), "éa") for number in range(5)]
    encode_documents(documents, BYTE, tmp_path / "tokens.bin", seen.append)
    assert seen == [6, 12, 15]


def test_split_depends_on_the_text_and_not_on_its_place(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(200)]

    def held_out(order: list[str]) -> set[str]:
        encoded = encode(tmp_path, *order)
        chosen = choose_validation(encoded.keys, encoded.num_tokens, fraction=0.1, min_tokens=10)
        return {order[number] for number in chosen}

    expected = held_out(texts)
    assert held_out(texts[::-1]) == expected
    assert 5 < len(expected) < 40
    assert held_out([*texts, *texts[:50]]) == expected  # duplicates stay on their side


documents_strategy = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 50)), min_size=1, max_size=60
)


@given(
    documents=documents_strategy, fraction=st.floats(0.001, 0.49), min_tokens=st.integers(1, 100)
)
def test_split_holds_out_the_lowest_keys_and_at_most_half(
    documents: list[tuple[int, int]], fraction: float, min_tokens: int
) -> None:
    keys, num_tokens = zip(*documents, strict=True)
    chosen = choose_validation(keys, num_tokens, fraction=fraction, min_tokens=min_tokens)
    held_out = sum(num_tokens[number] for number in chosen)
    assert 2 * held_out <= sum(num_tokens)
    kept_keys = {key for number, key in enumerate(keys) if number not in chosen}
    chosen_keys = {keys[number] for number in chosen}
    assert not kept_keys & chosen_keys
    assert max(chosen_keys, default=-1) < min(kept_keys)


def test_small_corpus_holds_out_enough_for_a_sequence() -> None:
    keys = [2**63 + number for number in range(10)]  # all far above the threshold
    chosen = choose_validation(keys, [10] * 10, fraction=0.01, min_tokens=25)
    assert chosen == {0, 1, 2}
    assert choose_validation(keys, [10] * 10, fraction=0.0, min_tokens=25) == frozenset()
    assert choose_validation([5], [1_000], fraction=0.4, min_tokens=25) == frozenset()


def test_store_opens_a_shard_by_its_digest(tmp_path: Path) -> None:
    ref = write_shard(tmp_path, np.array([1, 2], dtype="<u2"))
    assert ShardStore(tmp_path).open(ref.sha256).read_bytes() == b"\x01\x00\x02\x00"


@pytest.mark.parametrize(
    "digest", ["", "../../etc/passwd", "../" + "0" * 61, "0" * 63, "A" * 64, "0" * 64 + "\n"]
)
def test_store_refuses_what_is_no_digest(tmp_path: Path, digest: str) -> None:
    with pytest.raises(MalformedFrameError):
        ShardStore(tmp_path).open(digest)


def test_store_refuses_a_shard_that_the_run_lacks(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="no shard"):
        ShardStore(tmp_path).open("0" * 64)
