# SPDX-License-Identifier: Apache-2.0
"""Where the text comes from: `DataSpec.source`, as a stream of documents in a fixed order.

A source is read several times (for the tokenizer, then for the tokens), so every pass must yield
the same documents: files come sorted by their path below the source's root.
"""

import codecs
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.protocol.errors import ConfigError, DataError
from shoal.protocol.spec import DataSpec, canonical_json

SCHEMES = ("stdlib", "text:PATH", "jsonl:PATH", "parquet:PATH")

_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
# A longer text file becomes several documents: one file may be a whole corpus, and both the
# split into training and validation and the memory for encoding go by document.
_PIECE_CHARS = 64 * 1024
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """`name` says where it came from, for messages; `text` is not empty and encodes to UTF-8."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """A source's files, in reading order, and what tells one state of them from another."""

    paths: tuple[Path, ...]
    num_bytes: int
    digest: str
    """Over names, sizes and modification times: SHA-256."""


def open_source(spec: DataSpec) -> Iterator[Document]:
    """The documents of `spec.source`, at most `spec.max_bytes` of UTF-8 where that is set.

    Raises `ConfigError` for an unknown source; `DataError` where it is missing, unreadable or
    (at the end of the iteration) holds no text.
    """
    scheme, root = _parse(spec)
    paths = list_files(spec).paths
    match scheme:
        case "stdlib":
            documents = _read_whole_files(root, paths)
        case "text":
            documents = _read_text(root, paths)
        case "jsonl":
            documents = _read_jsonl(paths, spec.text_field)
        case _:
            documents = _read_parquet(paths, spec.text_field)
    return _limited(documents, spec)


def list_files(spec: DataSpec) -> SourceFiles:
    """Lists the files without reading them. Raises like `open_source`."""
    scheme, root = _parse(spec)
    if not root.exists():
        raise DataError(
            f"data.source = {spec.source!r}: {root} does not exist. "
            f"Correct the path; sources are {', '.join(SCHEMES)}."
        )
    try:
        paths = tuple(_walk(scheme, root))
        stats = [path.stat() for path in paths]
    except OSError as error:
        raise DataError(
            f"data.source = {spec.source!r}: {error}. Make the files readable."
        ) from error
    if not paths:
        wanted = {"stdlib": "*.py", "jsonl": "*.jsonl", "parquet": "*.parquet"}.get(scheme, "text")
        remedy = (
            'This Python comes without sources: set data.source = "text:PATH".'
            if scheme == "stdlib"
            else "Point it at a folder that has some."
        )
        raise DataError(f"data.source = {spec.source!r}: no {wanted} files below {root}. {remedy}")
    facts = [
        [str(path), stat.st_size, stat.st_mtime_ns] for path, stat in zip(paths, stats, strict=True)
    ]
    return SourceFiles(
        paths=paths,
        num_bytes=sum(stat.st_size for stat in stats),
        digest=hashlib.sha256(canonical_json(facts)).hexdigest(),
    )


def _parse(spec: DataSpec) -> tuple[str, Path]:
    scheme, _, path = spec.source.partition(":")
    if spec.source == "stdlib":
        return scheme, Path(sysconfig.get_path("stdlib"))
    if scheme in ("text", "jsonl", "parquet") and path:
        return scheme, Path(path).expanduser().absolute()
    raise ConfigError(
        f"data.source = {spec.source!r} is no known source. Use one of {', '.join(SCHEMES)}."
    )


def _walk(scheme: str, root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        if scheme == "stdlib":
            subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED]
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    for path in sorted(found, key=lambda path: path.relative_to(root).parts):
        match scheme:
            # Distributions link machine-specific files (sitecustomize.py) into the folder.
            case "stdlib" if path.suffix == ".py" and not path.is_symlink():
                yield path
            case "text" if path.is_file() and _is_text(path):
                yield path
            case "jsonl" | "parquet" if path.suffix == f".{scheme}":
                yield path


def _is_text(path: Path) -> bool:
    """Whether a file is UTF-8 throughout and holds no NUL."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as handle:
        try:
            while block := handle.read(_READ_BYTES):
                if b"\0" in block:
                    return False
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _read_whole_files(root: Path, paths: Iterable[Path]) -> Iterator[Document]:
    for path in paths:
        try:
            yield Document(path.relative_to(root).as_posix(), path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            continue  # the standard library's own tests of source encodings
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}. Make the file readable.") from error


def _read_text(root: Path, paths: Iterable[Path]) -> Iterator[Document]:
    base = root.parent if root.is_file() else root
    for path in paths:
        name = path.relative_to(base).as_posix()
        try:
            with path.open(encoding="utf-8", newline="") as handle:
                lines: list[str] = []
                num_chars = 0
                while line := handle.readline(_PIECE_CHARS):
                    lines.append(line)
                    num_chars += len(line)
                    if num_chars >= _PIECE_CHARS:
                        yield Document(name, "".join(lines))
                        lines, num_chars = [], 0
                yield Document(name, "".join(lines))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error.reason}). Convert the file.") from error
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}. Make the file readable.") from error


def _read_jsonl(paths: Iterable[Path], text_field: str) -> Iterator[Document]:
    for path in paths:
        try:
            with path.open("rb") as handle:
                for number, line in enumerate(handle, start=1):
                    if line.strip():
                        where = f"{path}:{number}"
                        yield Document(where, _json_text(line, text_field, where))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}. Make the file readable.") from error


def _json_text(line: bytes, text_field: str, where: str) -> str:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise DataError(f"{where}: a {type(row).__name__}, not an object. Correct the line.")
        return _field_text(row, text_field, where)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {error}. Correct or remove the line.") from None


def _field_text(row: dict[str, object], text_field: str, where: str) -> str:
    text = row.get(text_field)
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {text_field!r} is {'absent' if text is None else 'not a string'}; "
            f"the row has {', '.join(map(repr, row)) or 'no fields'}. Set data.text_field."
        )
    text.encode("utf-8")  # JSON can spell half a surrogate pair, which is no text
    return text


def _read_parquet(paths: Iterable[Path], text_field: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            "data.source = 'parquet:…' needs the `datasets` library, which isn't installed. "
            "Run: pip install 'shoal[datasets]'"
        ) from None
    for path in paths:
        try:
            rows = datasets.Dataset.from_parquet(str(path), streaming=True)
            for number, row in enumerate(rows):
                where = f"{path}, row {number}"
                yield Document(where, _field_text(row, text_field, where))
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            raise DataError(f"{path}: {error}. Is it a Parquet file?") from error


def _limited(documents: Iterator[Document], spec: DataSpec) -> Iterator[Document]:
    num_bytes = 0
    for document in documents:
        if not document.text:
            continue
        text = document.text.encode("utf-8")
        if spec.max_bytes and num_bytes + len(text) >= spec.max_bytes:
            last = text[: spec.max_bytes - num_bytes].decode("utf-8", errors="ignore")
            if last:
                yield Document(document.name, last)
            return
        num_bytes += len(text)
        yield document
    if not num_bytes:
        raise DataError(
            f"data.source = {spec.source!r} holds no text. Point it at files that have some."
        )
