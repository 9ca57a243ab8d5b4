# SPDX-License-Identifier: Apache-2.0
"""What lies in a run's folder, and how a run comes to be there.

run.json (the resolved run), tokenizer.json and shards/ (the data), events.sqlite (the log),
snapshots/, keys/ (authority and the coordinator's identity), operator.token, and live.json while
a coordinator serves the run.
"""

import contextlib
import hashlib
import json
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import psutil
from platformdirs import user_cache_path, user_data_path
from pydantic import BaseModel, ConfigDict, Field

from shoal.protocol.atomic_file import AtomicFile, storage_error
from shoal.protocol.errors import ConfigError, StorageError
from shoal.protocol.identity import load_or_create_secret
from shoal.protocol.ids import RunId
from shoal.protocol.spec import ResolvedRun, RunSpec, canonical_json

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

RUN_FILE = "run.json"
LIVE_FILE = "live.json"
TOKEN_FILE = "operator.token"

_CLOCK_STEP_S = 5.0
"""By how much a clock may have been set back between a process's start and its live.json."""


class Live(BaseModel):
    """Where a running coordinator can be reached; for tools on the same machine."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    pid: int
    dashboard: str
    admission: Annotated[str, Field(description="host:port of the admission port")]
    session: str
    link: str
    discovery_port: int = 0
    """0 without discovery."""
    folder: str = ""


def runs_folder() -> Path:
    return user_data_path("shoal") / "runs"


def data_cache() -> Path:
    return user_cache_path("shoal") / "data"


def run_id_of(spec: RunSpec) -> RunId:
    """The same RUN.toml gives the same run: launching it again resumes."""
    digest = hashlib.sha256(canonical_json(spec.model_dump(mode="json"))).hexdigest()
    return RunId(f"{spec.name}-{digest[:8]}")


def open_run(spec: RunSpec, folder: Path, progress: Progress) -> ResolvedRun:
    """The run in `folder`, made there if there is none. Raises `ConfigError` for another one."""
    # Only a launch needs these, and what they import.
    from shoal.coordinator.data.prepare import prepare_data
    from shoal.coordinator.export import read_run
    from shoal.coordinator.planner import plan_cuts

    if (folder / RUN_FILE).exists():
        run = read_run(folder)
        differing = _differences(_planned(spec, run), run.spec)
        if differing:
            raise ConfigError(
                f"{folder} holds run {run.run_id}, whose {', '.join(differing)} differ. A run's "
                "spec is fixed once it has started: use another --folder, or the old values."
            )
        return run
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from None
    batch = spec.batch
    data = prepare_data(
        spec.data,
        seq_len=spec.model.seq_len,
        min_sequences=batch.microbatch_size * batch.microbatches,
        folder=folder,
        cache=data_cache(),
        progress=progress,
    )
    if spec.model.vocab_size not in (0, data.vocab_size):
        raise ConfigError(
            f"model.vocab_size = {spec.model.vocab_size}, the tokenizer's is {data.vocab_size}; "
            "leave it out, or choose the tokenizer's"
        )
    resolved = spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"vocab_size": data.vocab_size}),
            "pipeline": spec.pipeline.model_copy(update={"cuts": None}),
        }
    )
    cuts = spec.pipeline.cuts or plan_cuts(resolved)
    resolved = resolved.model_copy(
        update={"pipeline": spec.pipeline.model_copy(update={"cuts": cuts})}
    )
    run = ResolvedRun(run_id=run_id_of(spec), spec=resolved, data=data)
    write_file(folder / RUN_FILE, run.to_json())
    return run


def _planned(spec: RunSpec, run: ResolvedRun) -> RunSpec:
    """The spec with what the run decided at its launch, where it leaves that open."""
    model, pipeline = spec.model, spec.pipeline
    if model.vocab_size == 0:
        model = model.model_copy(update={"vocab_size": run.spec.model.vocab_size})
    if pipeline.cuts is None:
        pipeline = pipeline.model_copy(update={"cuts": run.spec.pipeline.cuts})
    return spec.model_copy(update={"model": model, "pipeline": pipeline})


def _differences(one: BaseModel, other: BaseModel, prefix: str = "") -> list[str]:
    found = []
    for name in type(one).model_fields:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, BaseModel) and isinstance(b, BaseModel):
            found += _differences(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append(f"{prefix}{name} ({a!r}, was {b!r})")
    return found


def operator_token(folder: Path) -> str:
    """Who has it may pause, resume and stop the run. Made once."""
    return load_or_create_secret(
        folder / TOKEN_FILE, lambda: secrets.token_urlsafe(24).encode()
    ).decode()


def write_file(path: Path, content: bytes) -> None:
    with AtomicFile(path) as file:
        file.write(content)


def write_live(folder: Path, live: Live) -> None:
    """For tools on this machine; and where it isn't, a pointer that `live_runs` finds."""
    content = live.model_dump_json().encode()
    write_file(folder / LIVE_FILE, content)
    try:
        write_file(_registry() / f"{live.pid}.json", content)
    except StorageError as error:  # a service without a home
        log.info("`shoal status` won't find this run by itself: %s", error)


def remove_live(pid: int) -> None:
    """The coordinator ends. Its folder keeps live.json: the next launch takes the same ports."""
    with contextlib.suppress(OSError):
        (_registry() / f"{pid}.json").unlink(missing_ok=True)


def read_previous(folder: Path) -> Live | None:
    """Where the last coordinator of this run was, whether it lives or not."""
    return _read_live(folder / LIVE_FILE)


def read_live(folder: Path) -> Live | None:
    """The coordinator that serves the run in `folder`, if it is alive."""
    return _alive(folder / LIVE_FILE)


def live_runs() -> list[Live]:
    """This user's coordinators on this machine, the one started last first."""
    found = [(path, live) for path in _registry().glob("*.json") if (live := _alive(path))]
    found.sort(key=lambda pair: pair[0].stat().st_mtime, reverse=True)
    return [live for _, live in found]


def known_runs() -> list[tuple[Path, Live | None]]:
    """Run folders on this machine and who serves them: those in `runs_folder`, and live ones."""
    folders = {path.parent for path in runs_folder().glob(f"*/{RUN_FILE}")}
    folders |= {Path(live.folder) for live in live_runs()}
    return [(folder, read_live(folder)) for folder in sorted(folders)]


def find_run(name: str) -> Path:
    """The folder of a run given by its folder or id. Raises `ConfigError`."""
    candidates = [Path(name), runs_folder() / name]
    candidates += [Path(live.folder) for live in live_runs() if live.run_id == name]
    for folder in candidates:
        if (folder / RUN_FILE).is_file():
            return folder
    raise ConfigError(
        f"{name}: neither a run's folder nor the id of one in {runs_folder()}; "
        "`shoal run list` shows those on this machine"
    )


def _registry() -> Path:
    return user_data_path("shoal") / "live"


def _read_live(path: Path) -> Live | None:
    try:
        return Live.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _alive(path: Path) -> Live | None:
    """What the file says, if its process lives; another process may have got the same pid."""
    live = _read_live(path)
    try:
        if live is not None and psutil.Process(live.pid).create_time() <= (
            path.stat().st_mtime + _CLOCK_STEP_S
        ):
            return live
    except (psutil.Error, OSError, ValueError):
        pass
    return None
