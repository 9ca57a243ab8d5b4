# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: trained, bytes, and loaded from a folder."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shoal.coordinator.data import tokenizer as module
from shoal.coordinator.data.tokenizer import END_OF_TEXT, build_tokenizer, tokenizer_digest
from shoal.protocol.errors import ConfigError, DataError

TEXTS = [f"def function_{n}(value):\n    return value + {n}  # é {n % 7}\n" for n in range(300)]
BYTE = build_tokenizer("byte", [])


def test_two_bpe_trainings_give_the_same_bytes() -> None:
    first, second = (build_tokenizer("bpe:400", iter(TEXTS)) for _ in range(2))
    assert first.json_bytes == second.json_bytes
    assert first.vocab_size == 400


def test_bpe_round_trips_any_text_and_compresses_its_own() -> None:
    trained = build_tokenizer("bpe:400", TEXTS)
    for text in (TEXTS[0], "日本語 \t\0 🐟", "a  b\r\n"):
        [ids] = trained.encode_batch([text])
        assert trained.tokenizer.decode(ids) == text
    assert len(trained.encode_batch([TEXTS[0]])[0]) < len(TEXTS[0]) / 2


def test_bpe_of_little_text_has_the_vocabulary_it_could_learn() -> None:
    trained = build_tokenizer("bpe:2048", ["tiny tiny tiny"])
    assert 257 <= trained.vocab_size < 300


def test_bpe_reads_no_more_text_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRAINING_BYTES", 1_000)
    texts = iter(TEXTS)
    build_tokenizer("bpe:300", texts)
    assert len(list(texts)) > len(TEXTS) - 40


@given(st.text())
def test_byte_ids_are_the_utf8_bytes(text: str) -> None:
    assert BYTE.encode_batch([text]) == [list(text.encode("utf-8"))]


def test_byte_tokenizer_has_257_ids_and_decodes() -> None:
    assert (BYTE.vocab_size, BYTE.end_of_text_id) == (257, 256)
    assert BYTE.tokenizer.decode(list("naïve\n".encode())) == "naïve\n"


@pytest.mark.parametrize("kind", ["byte", "bpe:300"])
def test_text_that_spells_a_special_token_is_ordinary_text(kind: str) -> None:
    trained = build_tokenizer(kind, TEXTS)
    [ids] = trained.encode_batch([f"a{END_OF_TEXT}b"])
    assert trained.end_of_text_id not in ids


@pytest.mark.parametrize("kind", ["byte", "bpe:300"])
def test_saved_json_is_a_complete_tokenizer(kind: str) -> None:
    trained = build_tokenizer(kind, TEXTS)
    loaded = Tokenizer.from_str(trained.json_bytes.decode())
    assert loaded.encode(TEXTS[3]).ids == trained.encode_batch([TEXTS[3]])[0]
    assert loaded.token_to_id(END_OF_TEXT) == trained.end_of_text_id


def test_folder_is_loaded_as_it_is(tmp_path: Path) -> None:
    original = build_tokenizer("bpe:300", TEXTS)
    (tmp_path / "tokenizer.json").write_bytes(original.json_bytes)
    loaded = build_tokenizer(f"hf:{tmp_path}", [])
    assert loaded.json_bytes == original.json_bytes
    assert loaded.end_of_text_id == original.end_of_text_id
    assert loaded.encode_batch(TEXTS[:2]) == original.encode_batch(TEXTS[:2])


@pytest.mark.parametrize("eos", ["a", {"content": "a"}])
def test_folders_config_names_the_end_of_text(tmp_path: Path, eos: object) -> None:
    (tmp_path / "tokenizer.json").write_bytes(BYTE.json_bytes)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert build_tokenizer(f"hf:{tmp_path}", []).end_of_text_id == ord("a")


def test_folder_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    kind = f"hf:{tmp_path}"
    with pytest.raises(DataError, match=r"tokenizer\.json: No such file"):
        build_tokenizer(kind, [])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        build_tokenizer(kind, [])
    unnamed = BYTE.json_bytes.replace(END_OF_TEXT.encode(), b"<|pause|>")
    (tmp_path / "tokenizer.json").write_bytes(unnamed)
    with pytest.raises(DataError, match="eos_token"):
        build_tokenizer(kind, [])


@pytest.mark.parametrize(
    "kind", ["bpe", "bpe:", "bpe:256", "bpe:²", "bpe:99999999", "words", "hf:"]
)
def test_unknown_kinds_and_sizes_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer = "):
        build_tokenizer(kind, TEXTS)


def test_digest_follows_a_folders_content(tmp_path: Path) -> None:
    kind = f"hf:{tmp_path}"
    digests = {tokenizer_digest("byte"), tokenizer_digest("bpe:300"), tokenizer_digest(kind)}
    (tmp_path / "tokenizer.json").write_bytes(BYTE.json_bytes)
    digests.add(tokenizer_digest(kind))
    assert len(digests) == 4
