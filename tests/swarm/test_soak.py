# SPDX-License-Identifier: Apache-2.0
"""The short, seeded soak: under one fault after another nothing changes, and nothing piles up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(280)]

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
MAX_FILES = 150
"""Of one process: sessions, peers and databases of a swarm of five, and what waits to be closed."""


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_faults_one_after_another_change_no_bit_and_leak_no_file(tmp_path: Path, seed: int) -> None:
    file, marker = tmp_path / "soak.json", str(tmp_path)
    environment = os.environ | {
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "SOAK_TEST": marker,
    }
    process = subprocess.run(
        [sys.executable, str(SOAK), "--short", "--seed", str(seed), "--json", str(file),
         "--folder", str(tmp_path / "swarm")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    left = [p for p in psutil.process_iter(["environ"])
            if (p.info["environ"] or {}).get("SOAK_TEST") == marker]  # fmt: skip
    _, remaining = psutil.wait_procs(left, timeout=10)
    for straggler in remaining:
        straggler.kill()
    assert process.returncode == 0, process.stdout
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["faults"], process.stdout
    assert report["weights_equal"]
    assert report["compared_steps"] >= report["steps"] > 0
    assert report["steps_lost"] == 0
    assert report["microbatches_missing"] == report["microbatches_double"] == 0
    most = max(s["num_files"] for life in report["lives"] for s in life["samples"])
    assert 0 < most < MAX_FILES
    assert remaining == []
