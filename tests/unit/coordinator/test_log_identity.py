# SPDX-License-Identifier: Apache-2.0
"""A folder keeps its log's id; a copy of it gets another."""

import shutil
from pathlib import Path

from shoal.coordinator.log_identity import LOG_ID_FILE, log_identity


def test_the_id_stays(tmp_path: Path) -> None:
    assert log_identity(tmp_path / "run") == log_identity(tmp_path / "run")


def test_a_copied_folder_has_another_id(tmp_path: Path) -> None:
    first = log_identity(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert log_identity(tmp_path / "copy") != first
    assert log_identity(tmp_path / "run") == first


def test_a_folder_that_was_renamed_keeps_its_id(tmp_path: Path) -> None:
    first = log_identity(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert log_identity(tmp_path / "moved") == first


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    first = log_identity(tmp_path)
    (tmp_path / LOG_ID_FILE).write_text("{", encoding="ascii")
    assert log_identity(tmp_path) != first
