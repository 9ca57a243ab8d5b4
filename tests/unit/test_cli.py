# SPDX-License-Identifier: Apache-2.0
"""The command line without any process: versions, the example, and errors in one line."""

import sys
from pathlib import Path

import pytest

from shoal import cli
from shoal.protocol.spec import RunSpec, load_run_spec
from shoal.version import PROTOCOL_VERSION, __version__


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shoal", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_version_names_release_and_protocol(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"shoal {__version__} (protocol {PROTOCOL_VERSION})\n"


def test_the_example_is_the_defaults_spelt_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "run", "example") == 0
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_run_spec(file) == RunSpec(name="example", steps=200)


def test_a_missing_run_file_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "check", str(tmp_path / "none.toml")) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "no such file" in line
    assert "shoal run example" in line
