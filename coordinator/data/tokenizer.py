# SPDX-License-Identifier: Apache-2.0
"""`DataSpec.tokenizer`: trains a byte-level BPE at launch, or loads one.

Every kind is a `tokenizers.Tokenizer`, so the run folder's tokenizer.json and an exported model
need nothing of ours to read them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.protocol.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"

TRAINING_BYTES = 16 << 20
"""BPE learns from the first so many bytes of text: more hardly changes the merges."""

_KINDS = '"bpe:SIZE", "byte" or "hf:FOLDER"'
_MIN_BPE_SIZE = 257  # every byte and end-of-text
_MAX_BPE_SIZE = 1 << 20
# What known models call it, where tokenizer_config.json doesn't say.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    tokenizer: "Tokenizer"
    vocab_size: int
    """One above the highest token id."""
    end_of_text_id: int
    json_bytes: bytes
    """tokenizer.json."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids without any special token: text that spells one is ordinary text."""
        return [
            encoding.ids
            for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]


def build_tokenizer(kind: str, texts: Iterable[str]) -> TrainedTokenizer:
    """`texts` are read only to train "bpe:SIZE", up to `TRAINING_BYTES`.

    Equal texts and an equal version of `tokenizers` give an equal tokenizer.json. Raises
    `ConfigError` for an unknown kind and `DataError` for a folder that can't be used.
    """
    name, _, argument = kind.partition(":")
    if kind == "byte":
        return _byte_tokenizer()
    if name == "bpe":
        return _train_bpe(_bpe_size(kind, argument), texts)
    if name == "hf" and argument:
        return _load_folder(Path(argument).expanduser())
    raise ConfigError(f"data.tokenizer = {kind!r} is no known tokenizer. Use {_KINDS}.")


def tokenizer_digest(kind: str) -> str:
    """What an encoding depends on beside the text: the library's version and a folder's files."""
    import tokenizers

    digest = hashlib.sha256(f"{kind}\n{tokenizers.__version__}\n".encode())
    name, _, argument = kind.partition(":")
    if name == "hf":
        for file in ("tokenizer.json", "tokenizer_config.json"):
            try:
                content = (Path(argument).expanduser() / file).read_bytes()
            except OSError:
                content = b""  # `build_tokenizer` says what is wrong
            digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _bpe_size(kind: str, argument: str) -> int:
    if argument.isascii() and argument.isdigit() and len(argument) < 9:
        size = int(argument)
        if _MIN_BPE_SIZE <= size <= _MAX_BPE_SIZE:
            return size
    raise ConfigError(
        f"data.tokenizer = {kind!r}: the size must be a number from {_MIN_BPE_SIZE} to "
        f"{_MAX_BPE_SIZE}, such as bpe:2048."
    )


def _train_bpe(size: int, texts: Iterable[str]) -> TrainedTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TRAINING_BYTES), trainer)
    return _finished(tokenizer, END_OF_TEXT)


def _first(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    for text in texts:
        if num_bytes <= 0:
            return
        yield text
        num_bytes -= len(text.encode("utf-8"))


def _byte_tokenizer() -> TrainedTokenizer:
    """Token id = byte value; end-of-text is 256. A BPE without a single merge."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return _finished(tokenizer, END_OF_TEXT)


def _byte_alphabet() -> list[str]:
    """The printable character that `tokenizers`' ByteLevel shows for each byte (GPT-2's table)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    shown |= set(range(ord("®"), ord("ÿ") + 1))
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def _load_folder(folder: Path) -> TrainedTokenizer:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        json_bytes = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer = 'hf:{folder}': {path}: {error.strerror}. "
            "Name a folder that holds a tokenizer.json."
        ) from error
    try:
        tokenizer = Tokenizer.from_str(json_bytes.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: {error}. Is it a tokenizer of the Hugging Face kind?") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _finished(tokenizer, _named_end_of_text(tokenizer, folder), json_bytes)


def _named_end_of_text(tokenizer: "Tokenizer", folder: Path) -> str:
    config_path = folder / "tokenizer_config.json"
    names = list(_END_OF_TEXT_NAMES)
    if config_path.is_file():
        try:
            eos = json.loads(config_path.read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{config_path}: {error}. Correct or remove the file.") from error
        eos = eos.get("content") if isinstance(eos, dict) else eos
        names = [eos, *names] if isinstance(eos, str) else names
    for name in names:
        if tokenizer.token_to_id(name) is not None:
            return name
    raise DataError(
        f"data.tokenizer = 'hf:{folder}': no end-of-text token (looked for {', '.join(names)}). "
        f"Name it as eos_token in {config_path}."
    )


def _finished(
    tokenizer: "Tokenizer", end_of_text: str, json_bytes: bytes | None = None
) -> TrainedTokenizer:
    json_bytes = json_bytes or tokenizer.to_str().encode("utf-8")
    tokenizer.encode_special_tokens = True  # after serialising: for our encoding only
    end_of_text_id = tokenizer.token_to_id(end_of_text)
    assert end_of_text_id is not None
    return TrainedTokenizer(
        tokenizer=tokenizer,
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        end_of_text_id=end_of_text_id,
        json_bytes=json_bytes,
    )
