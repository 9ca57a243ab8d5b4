# SPDX-License-Identifier: Apache-2.0
"""Text sources by name, and what is said when one is missing or broken."""

import json
import sys
import sysconfig
from pathlib import Path

import pytest

from shoal.coordinator.data import sources
from shoal.coordinator.data.sources import list_files, open_source
from shoal.protocol.errors import ConfigError, DataError
from shoal.protocol.spec import DataSpec


def texts(spec: DataSpec) -> list[str]:
    return [document.text for document in open_source(spec)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def test_stdlib_yields_the_interpreters_own_sources_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "b.py", "b = 1\n")
    write(tmp_path / "a" / "__init__.py", "a = 1\n")
    write(tmp_path / "site-packages" / "numpy.py", "no")
    write(tmp_path / "dist-packages" / "apt.py", "no")
    write(tmp_path / "__pycache__" / "c.py", "no")
    write(tmp_path / "latin.py", "# caf\xe9".encode("latin-1"))
    write(tmp_path / "data.txt", "no")
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "b.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert texts(DataSpec()) == ["a = 1\n", "b = 1\n"]


def test_stdlib_of_this_interpreter_is_megabytes_of_text() -> None:
    limited = DataSpec(max_bytes=2 << 20)
    assert sum(len(text.encode()) for text in texts(limited)) == 2 << 20
    assert list_files(DataSpec()).num_bytes > 8 << 20


def test_text_folder_is_read_sorted_and_without_binaries_or_hidden_files(tmp_path: Path) -> None:
    write(tmp_path / "z.txt", "last")
    write(tmp_path / "b" / "one.md", "second")
    write(tmp_path / "a.rst", "first")
    write(tmp_path / "image.png", b"\x89PNG\0\0")
    write(tmp_path / "latin.txt", "caf\xe9".encode("latin-1"))
    write(tmp_path / ".git" / "config", "hidden")
    write(tmp_path / "empty.txt", "")
    spec = DataSpec(source=f"text:{tmp_path}")
    assert [(d.name, d.text) for d in open_source(spec)] == [
        ("a.rst", "first"),
        ("b/one.md", "second"),
        ("z.txt", "last"),
    ]


def test_long_text_file_becomes_several_documents_cut_at_lines(tmp_path: Path) -> None:
    lines = [f"line {number} é\r\n" for number in range(20_000)]
    path = write(tmp_path / "book.txt", "".join(lines))
    pieces = texts(DataSpec(source=f"text:{path}"))
    assert len(pieces) > 2
    assert "".join(pieces) == "".join(lines)
    assert all(piece.endswith("\r\n") for piece in pieces)


def test_text_without_line_breaks_is_still_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "line.txt", "x" * 200_000)
    pieces = texts(DataSpec(source=f"text:{path}"))
    assert sum(map(len, pieces)) == 200_000
    assert max(map(len, pieces)) <= 2 * 64 * 1024


def test_max_bytes_cuts_between_characters(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "abc")
    write(tmp_path / "b.txt", "éé")
    write(tmp_path / "c.txt", "never")
    assert texts(DataSpec(source=f"text:{tmp_path}", max_bytes=6)) == ["abc", "é"]
    assert texts(DataSpec(source=f"text:{tmp_path}", max_bytes=3)) == ["abc"]


def test_jsonl_takes_the_named_field_of_every_line(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", '{"body": "three"}\n')
    write(tmp_path / "a.jsonl", '{"body": "one"}\n\n{"body": "two", "id": 2}')
    write(tmp_path / "readme.txt", "not json")
    spec = DataSpec(source=f"jsonl:{tmp_path}", text_field="body")
    assert texts(spec) == ["one", "two", "three"]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b'{"other": "x"}',
        b'{"text": 5}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_bad_jsonl_line_is_named_by_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path / "rows.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: "):
        texts(DataSpec(source=f"jsonl:{path}"))


def test_missing_text_field_lists_the_fields_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", json.dumps({"content": "x"}))
    with pytest.raises(DataError, match=r"'text' is absent.*'content'.*data\.text_field"):
        texts(DataSpec(source=f"jsonl:{path}"))


def test_parquet_rows_are_read_in_order(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    for name, rows in (("b", ["three"]), ("a", ["one", "two"])):
        parquet.write_table(pyarrow.table({"text": rows}), tmp_path / f"{name}.parquet")
    assert texts(DataSpec(source=f"parquet:{tmp_path}")) == ["one", "two", "three"]
    with pytest.raises(DataError, match=r"data\.text_field"):
        texts(DataSpec(source=f"parquet:{tmp_path}", text_field="body"))


def test_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = write(tmp_path / "x.parquet", b"not parquet at all")
    with pytest.raises(DataError, match=r"x\.parquet"):
        texts(DataSpec(source=f"parquet:{path}"))


def test_parquet_without_the_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.parquet", b"PAR1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'shoal\[datasets\]'"):
        texts(DataSpec(source=f"parquet:{path}"))


@pytest.mark.parametrize("source", ["", "stdlib:x", "text:", "csv:file", "stdlibs"])
def test_unknown_source_lists_those_there_are(source: str) -> None:
    with pytest.raises(ConfigError, match="jsonl:PATH"):
        open_source(DataSpec(source=source))


def test_missing_or_empty_sources_say_so_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_source(DataSpec(source=f"text:{tmp_path / 'nowhere'}"))
    with pytest.raises(DataError, match="no text files"):
        open_source(DataSpec(source=f"text:{tmp_path}"))
    write(tmp_path / "empty.txt", "")
    with pytest.raises(DataError, match="holds no text"):
        texts(DataSpec(source=f"text:{tmp_path}"))


def test_listing_digest_follows_names_sizes_and_times(tmp_path: Path) -> None:
    spec = DataSpec(source=f"text:{tmp_path}")
    path = write(tmp_path / "a.txt", "one")
    first = list_files(spec).digest
    assert list_files(spec).digest == first
    write(path, "longer")
    second = list_files(spec).digest
    path.rename(tmp_path / "b.txt")
    assert len({first, second, list_files(spec).digest}) == 3


def test_unreadable_file_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "one")

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sources, "_is_text", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        open_source(DataSpec(source=f"text:{tmp_path}"))
    assert path.exists()
