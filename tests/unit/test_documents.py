# SPDX-License-Identifier: Apache-2.0
"""The documents are right where a machine can tell: commands, run files, links, paths."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer

from shoal import cli
from shoal.protocol.errors import ShoalError
from shoal.protocol.spec import RunSpec, load_run_spec

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
OPERATING = ROOT / "docs" / "operating.md"
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(
            path
            for name in ("docs", "deploy", "benchmarks")
            for path in (ROOT / name).glob("**/*.md")
        ),
    ]
)

FOLDERS = ("protocol", "compression", "node", "coordinator", "src", "scripts", "tests", "deploy",
           "docs", "benchmarks")  # fmt: skip
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*")
_END_OF_COMMAND = {"|", "||", "&&", "&", ";", ">", ">>", "<"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def blocks(document: Path, language: str) -> list[str]:
    return [body for tag, body in _FENCE.findall(text_of(document)) if tag == language]


def prose(document: Path) -> str:
    """Without fenced blocks."""
    return _FENCE.sub("", text_of(document))


def commands(document: Path) -> Iterator[list[str]]:
    """Every simple command of the shell blocks as its words, without variables set before it."""
    for block in blocks(document, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words: list[str] = []
            for word in [*shlex.split(line, comments=True), ";"]:
                if word not in _END_OF_COMMAND:
                    words.append(word)
                    continue
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []


@pytest.fixture(scope="module")
def shoal() -> Any:
    """The command line as typer makes it."""
    cli._register()
    return typer.main.get_command(cli.app)


def parse(group: Any, words: list[str]) -> None:
    """Raises what the command line raises for a command, option or value that it doesn't know."""
    command, arguments = group, list(words)
    while hasattr(command, "commands"):
        name = arguments.pop(0)
        assert name in command.commands, f"shoal {' '.join(words)}: there is no command {name!r}"
        command = command.commands[name]
    command.make_context(command.name, arguments)


# ---- commands ----------------------------------------------------------------------------


@every_document
def test_shoal_commands_in_documents_exist_with_their_options(document: Path, shoal: Any) -> None:
    for words in commands(document):
        if words[0] == "shoal" and words[1:] != ["--help"]:
            parse(shoal, words[1:])
        elif words[0] == "scripts/demo":
            parse(shoal, ["demo", *words[1:]])


@every_document
def test_scripts_in_documents_exist(document: Path) -> None:
    named = [words[0] for words in commands(document) if _PATH.fullmatch(words[0])]
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_readme_shows_the_two_commands_and_the_uses() -> None:
    shown = {" ".join(words[:2]) for words in commands(README)}
    assert {"scripts/demo", "scripts/test"} <= {words[0] for words in commands(README)}
    assert {"shoal launch", "shoal join", "shoal status", "shoal check", "shoal export"} <= shown


# ---- blocks ------------------------------------------------------------------------------


@every_document
def test_run_files_in_documents_are_valid(document: Path, tmp_path: Path) -> None:
    for block in blocks(document, "toml"):
        path = tmp_path / "RUN.toml"
        path.write_text(block, encoding="utf-8")
        if re.search(r"^\[(model|pipeline|batch|data|fault|validation)\]", block, re.MULTILINE):
            assert isinstance(load_run_spec(path), RunSpec)


@every_document
def test_python_in_documents_parses(document: Path) -> None:
    for block in blocks(document, "python"):
        ast.parse(block)


def test_readme_run_file_passes_shoal_check(tmp_path: Path) -> None:
    (block,) = blocks(README, "toml")
    (tmp_path / "RUN.toml").write_text(block, encoding="utf-8")
    assert ["shoal", "check", "RUN.toml"] in list(commands(README))
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli", "check", "RUN.toml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "stage" in done.stdout


# ---- links, paths, words -----------------------------------------------------------------


def slug(heading: str) -> str:
    """As GitHub makes the anchor of a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors(document: Path) -> set[str]:
    return {slug(heading) for heading in _HEADING.findall(prose(document))}


@every_document
def test_relative_links_and_images_exist(document: Path) -> None:
    broken = []
    for target in _LINK.findall(_INLINE.sub("", prose(document))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@every_document
def test_paths_in_documents_exist(document: Path) -> None:
    text = _INDENTED.sub("", prose(document))
    named = [word for word in _INLINE.findall(text) if _PATH.fullmatch(word)]
    found = {name: list(ROOT.glob(name.rstrip("/"))) for name in named}
    assert [name for name, files in found.items() if not files] == []


def test_readme_maps_every_folder() -> None:
    mapped = text_of(README).partition("## Map")[2]
    missing = [f for f in FOLDERS if (ROOT / f).is_dir() and f"`{f}/" not in mapped]
    assert missing == []


# ---- exit codes --------------------------------------------------------------------------


def exit_codes() -> dict[int, str]:
    found: dict[int, str] = {}
    pending: list[type[ShoalError]] = [ShoalError]
    while pending:
        cls = pending.pop()
        found.setdefault(cls.exit_code, cls.__name__)
        pending += [sub for sub in cls.__subclasses__() if sub.__module__ == ShoalError.__module__]
    return found


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\|\s*`?(\d+)`?\s*\|", text_of(OPERATING), re.MULTILINE)
    assert {code: name for code, name in exit_codes().items() if str(code) not in rows} == {}
