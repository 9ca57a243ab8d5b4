# SPDX-License-Identifier: Apache-2.0
"""What killed writers leave is cleaned up; what others are writing is not."""

import os
import subprocess
import sys
from pathlib import Path

from shoal.protocol.atomic_file import AtomicFile, remove_leftovers


def test_unfinished_files_of_the_killed_go_those_of_the_living_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = tmp_path / "shards"
    folder.mkdir()
    leftover = folder / f".a.bin.{ended.pid}-0011aabb.tmp"
    own = folder / f".a.bin.{os.getpid()}-0011aabb.tmp"
    others = folder / f".a.bin.{os.getppid()}-0011aabb.tmp"
    unrelated = [folder / "a.bin", folder / ".hidden.tmp", tmp_path / "notes.tmp"]
    for path in (leftover, own, others, *unrelated):
        path.write_bytes(b"x")
    remove_leftovers(tmp_path)
    assert not leftover.exists()
    assert not own.exists()
    assert others.exists()
    assert all(path.exists() for path in unrelated)


def test_the_name_of_an_unfinished_file_tells_whose_it_is(tmp_path: Path) -> None:
    file = AtomicFile(tmp_path / "a.bin")
    remove_leftovers(tmp_path)  # at a start, nothing of one's own is under way
    assert list(tmp_path.iterdir()) == []
    file.discard()
