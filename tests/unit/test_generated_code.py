# SPDX-License-Identifier: Apache-2.0
"""The committed protocol code is what protoc makes of the committed .proto files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/protoc", "--check"],
        cwd=root,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_generated_code_is_current() -> None:
    answer = check(ROOT)
    assert answer.returncode == 0, answer.stderr


def test_a_changed_proto_without_regeneration_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "protoc", tmp_path / "scripts")
    shutil.copytree(ROOT / "protocol" / "proto", tmp_path / "protocol" / "proto")
    (tmp_path / "src" / "shoal").mkdir(parents=True)
    (tmp_path / "src" / "shoal" / "protocol").symlink_to("../../protocol")
    types = tmp_path / "protocol" / "proto" / "types.proto"
    types.write_text(types.read_text() + "\nmessage Added { uint32 number = 1; }\n")

    answer = check(tmp_path)

    assert answer.returncode != 0
    assert "run scripts/protoc" in answer.stderr
