# SPDX-License-Identifier: Apache-2.0
"""How a run folder comes to be, who serves it, and what a full disk does to it."""

import errno
import json
import os
from pathlib import Path

import pytest

from shoal.coordinator import run_folder
from shoal.coordinator.run_folder import (
    LIVE_FILE,
    Live,
    find_run,
    known_runs,
    live_runs,
    open_run,
    read_live,
    read_previous,
    remove_live,
    run_id_of,
    write_file,
    write_live,
)
from shoal.protocol.errors import ConfigError, StorageError, VersionError
from shoal.protocol.spec import BatchSpec, DataSpec, ModelSpec, PipelineSpec, RunSpec


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200, encoding="utf-8")
    return tmp_path


def make_spec(home: Path, *, steps: int = 4) -> RunSpec:
    return RunSpec(
        steps=steps,
        model=ModelSpec(dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32, seq_len=16),
        data=DataSpec(source=f"text:{home / 'text.txt'}", tokenizer="byte"),
        batch=BatchSpec(microbatches=2, microbatch_size=1),
        pipeline=PipelineSpec(stages=2),
    )


def silent(phase: str, share: float) -> None:
    pass


def make_live(folder: Path, pid: int) -> Live:
    return Live(
        run_id="run-00000000", pid=pid, dashboard="http://127.0.0.1:1/", admission="127.0.0.1:2",
        session="127.0.0.1:3", link="shoal://x", folder=str(folder),
    )  # fmt: skip


def test_the_same_spec_opens_the_same_run(home: Path) -> None:
    spec = make_spec(home)
    made = open_run(spec, home / "run", silent)
    assert made.run_id == run_id_of(spec)
    assert made.spec.pipeline.cuts is not None
    assert open_run(spec, home / "run", silent) == made


def test_another_spec_is_refused_naming_what_differs(home: Path) -> None:
    open_run(make_spec(home), home / "run", silent)
    before = (home / "run" / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=r"steps \(5, was 4\)"):
        open_run(make_spec(home, steps=5), home / "run", silent)
    assert (home / "run" / "run.json").read_bytes() == before


def test_a_run_of_another_spec_version_is_refused(home: Path) -> None:
    spec = make_spec(home)
    open_run(spec, home / "run", silent)
    path = home / "run" / "run.json"
    raw = json.loads(path.read_bytes())
    raw["spec"] |= {"version": 99, "a_key_of_the_future": 1}
    path.write_text(json.dumps(raw))
    with pytest.raises(VersionError, match="version 99"):
        open_run(spec, home / "run", silent)


def test_a_full_disk_leaves_the_old_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / "live.json"
    write_file(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="free some space"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in home.glob("*live*")] == ["live.json"]


def test_a_full_disk_while_a_run_is_made_leaves_no_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError):
            open_run(make_spec(home), home / "run", silent)
    assert not (home / "run" / "run.json").exists()
    open_run(make_spec(home), home / "run", silent)


def test_a_live_coordinator_is_found_wherever_its_folder_is(home: Path) -> None:
    folder = home / "elsewhere"
    open_run(make_spec(home), folder, silent)
    live = make_live(folder, os.getpid())
    write_live(folder, live)
    assert read_live(folder) == live
    assert live_runs() == [live]
    assert known_runs() == [(folder, live)]
    assert find_run(live.run_id) == folder
    remove_live(os.getpid())
    assert live_runs() == []
    assert read_previous(folder) == live, "the next launch takes the same ports"


def test_a_process_that_got_the_pid_later_is_no_coordinator(home: Path) -> None:
    write_live(home / "run", make_live(home / "run", os.getpid()))
    assert read_live(home / "run") is not None
    os.utime(home / "run" / LIVE_FILE, (0, 0))
    assert read_live(home / "run") is None


def test_a_dead_or_damaged_live_file_is_nobody(home: Path) -> None:
    write_live(home / "run", make_live(home / "run", 2**22 + 1))
    assert read_live(home / "run") is None
    (home / "run" / LIVE_FILE).write_text("{")
    assert read_live(home / "run") is None
    assert read_previous(home / "run") is None


def test_a_registry_that_cannot_be_written_stops_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_registry", lambda: home / "text.txt" / "live")
    write_live(home / "run", make_live(home / "run", os.getpid()))
    assert read_live(home / "run") is not None


def test_an_unknown_run_is_a_config_error(home: Path) -> None:
    with pytest.raises(ConfigError, match="shoal run list"):
        find_run("nothing")
