# SPDX-License-Identifier: Apache-2.0
"""A swarm of real processes for one test, and the check that nothing of it is left.

Waits are for facts (the run's view, its event log, a process's end), each with a deadline; no
wait is for time to pass. Whatever goes wrong, the tails of all logs are in the failure's text.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import psutil
import pytest

from shoal.coordinator.dashboard.views import NodeView, RunView
from shoal.coordinator.export import read_run
from shoal.coordinator.run_folder import TOKEN_FILE, Live, read_live
from shoal.coordinator.run_view import audit
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.sqlite_store import read_event_log, read_log_and_history
from shoal.coordinator.state import (
    EVENT_KINDS,
    Event,
    NodeFenced,
    StageAssigned,
    StepApplied,
    StepCommitted,
    StepOpened,
)
from shoal.coordinator.step_row import StepRow
from shoal.protocol.errors import StorageError
from shoal.protocol.identity import NodeIdentity
from shoal.protocol.ids import Incarnation, PeerId

from .reference import Reference

E = TypeVar("E", bound=Event)

DEADLINE_S = 90.0
"""For anything that happens at all: a process starts, a step is made. A loaded machine is slow."""

GONE_S = 10.0
"""For processes that were told to end, or whose parent was killed."""

_POLL_S = 0.02
_SETTLE_S = 0.2  # without a change for so long, nothing is under way
_LOG_TAIL = 25
_MARKER = "SHOAL_SWARM_UNDER_TEST"

TEXT = (
    "A node may leave at any moment, and another takes its place; the sums do not change. "
    "What was computed is kept, what was lost is computed again, and counted once.\n"
)


def spec(**changes: dict[str, Any] | str | int) -> dict[str, Any]:
    """The tiny run: two stages twice, about thirty steps a second on one core. `changes` replace
    top-level keys, or keys within a table."""
    tiny: dict[str, Any] = {
        "name": "tiny",
        "steps": 12,
        "model": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 128,
                  "seq_len": 32},
        "data": {"tokenizer": "byte", "validation_fraction": 0.1},
        "batch": {"microbatches": 4, "microbatch_size": 2},
        "pipeline": {"stages": 2, "replicas": 2, "boundary": "bf16"},
        "optimizer": {"warmup_steps": 4},
        "validation": {"every": 5, "microbatches": 2},
        "fault": {"snapshot_every": 1000},
    }  # fmt: skip
    for key, value in changes.items():
        tiny[key] = {**tiny[key], **value} if isinstance(value, dict) else value
    return tiny


ENDLESS = 100_000
"""Steps of a run that is stopped when the test has seen what it wants."""


def _toml(values: dict[str, Any]) -> str:
    def literal(value: object) -> str:
        return f'"{value}"' if isinstance(value, str) else str(value).lower()

    lines = [f"{k} = {literal(v)}" for k, v in values.items() if not isinstance(v, dict)]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{k} = {literal(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


@dataclass(eq=False)
class Process:
    """A `shoal` command that was started."""

    name: str
    popen: "subprocess.Popen[bytes]"
    log: Path
    folder: Path
    was_signalled: bool = False

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    @property
    def peer_id(self) -> PeerId:
        """Of a node that has started once."""
        return NodeIdentity.load_or_create(self.folder).peer_id

    def signal(self, number: signal.Signals) -> None:
        if self.is_running:
            self.was_signalled = True
            os.kill(self.pid, number)

    @property
    def has_crashed(self) -> bool:
        return not self.was_signalled and self.popen.poll() not in (None, 0)


@dataclass(eq=False)
class Swarm:
    """`async with Swarm(folder, spec()) as swarm: …`; the end checks that nothing is left."""

    folder: Path
    spec: dict[str, Any]
    discovery: bool = False
    """Off, a process starts twice as fast; the tests of what p2pd leaves behind want it."""
    processes: list[Process] = field(default_factory=list)
    _marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    _reference: Reference | None = None
    _sockets: set[Path] = field(default_factory=set)
    _addresses: set[str] = field(default_factory=set)
    _killed: bool = False

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    # ---- processes -----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        corpus = self.folder / "corpus.txt"
        corpus.write_text("".join(f"{i} {TEXT}" for i in range(120)), encoding="utf-8")
        values = {**self.spec, "data": {**self.spec["data"], "source": f"text:{corpus}"}}
        (self.folder / "run.toml").write_text(_toml(values), encoding="utf-8")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(Exception):
            self._note_resources()
        if kind is None:
            try:
                await self.end()
                self._check_nothing_left()
                return
            except BaseException as late:
                error = late
        self._put_down()
        assert error is not None
        if isinstance(error, Exception | pytest.fail.Exception):
            error.add_note(self.logs())
        if kind is None:
            raise error

    def _start(
        self, name: str, folder: Path, *arguments: str, program: Sequence[str] = ("-m", "shoal.cli")
    ) -> Process:
        log = self.folder / f"{name}.log"
        environment = {
            **os.environ,
            "XDG_DATA_HOME": str(self.folder / "xdg-data"),
            "XDG_CACHE_HOME": str(self.folder / "xdg-cache"),
            "XDG_CONFIG_HOME": str(self.folder / "xdg-config"),
            _MARKER: self._marker,
        }
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [sys.executable, *program, "-v", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
        process = Process(name, popen, log, folder)
        self.processes.append(process)
        return process

    @property
    def _discovery_flag(self) -> str:
        return "--discovery" if self.discovery else "--no-discovery"

    def start_coordinator(self, *arguments: str) -> Process:
        """`shoal launch`; again for the same folder to resume."""
        (self.folder / "link").unlink(missing_ok=True)  # nodes started now wait for the new one
        return self._start(
            "coordinator", self.run_folder, "launch", str(self.folder / "run.toml"),
            "--folder", str(self.run_folder), "--link-file", str(self.folder / "link"),
            self._discovery_flag, *arguments,
        )  # fmt: skip

    def start_node(self, name: str, *, arguments: Sequence[str] = (), version: str = "") -> Process:
        """`shoal join`; the same name is the same identity. `version` are statements that change
        `shoal.version` in that process, which so is of another release."""
        other = ("-c", f"import shoal.version as v; {version}; import shoal.cli; shoal.cli.main()")
        return self._start(
            name, self.folder / name, "join", "--link-file", str(self.folder / "link"),
            "--folder", str(self.folder / name), "--device", "cpu", self._discovery_flag,
            *arguments, program=other if version else ("-m", "shoal.cli"),
        )  # fmt: skip

    async def start(self, *names: str) -> list[Process]:
        """A coordinator and nodes; returns the nodes once the first step is made."""
        self.start_coordinator()
        nodes = [self.start_node(name) for name in names]
        await self.started(nodes)
        return nodes

    async def started(self, nodes: Sequence[Process]) -> None:
        """Wait until all of these have a stage and the first step is made."""
        await self.wait_until(
            lambda: len(self.events(StageAssigned)) >= len(nodes), "every node has a stage"
        )
        self._note_resources()
        await self.committed(1)

    @property
    def coordinator(self) -> Process:
        return [p for p in self.processes if p.name == "coordinator"][-1]

    @property
    def nodes(self) -> list[Process]:
        return [p for p in self.processes if p.name != "coordinator" and p.is_running]

    def kill(self, *processes: Process) -> None:
        """SIGKILL, all at once."""
        self._note_resources()
        self._killed = True
        for process in processes:
            process.signal(signal.SIGKILL)
        for process in processes:
            process.popen.wait(GONE_S)

    async def stop_in_mid_step(self, victim: Process) -> RunView:
        """Freeze the node while a step is open, some of its receipts in and others not.

        The step can't end without the victim, so the swarm stands still in it until the victim's
        lease ends, some seconds later: time to kill what is to be killed.
        """
        while True:
            victim.signal(signal.SIGSTOP)
            view = await self.view()
            while (again := await self._a_little_later()) and _position(again) != _position(view):
                view = again
            if 0 < view.receipts_done < view.receipts_total:
                return view
            victim.signal(signal.SIGCONT)
            await self.committed(view.step + 1)

    async def _a_little_later(self) -> RunView:
        await asyncio.sleep(_SETTLE_S)
        return await self.view()

    async def ended(self, process: Process, deadline_s: float = DEADLINE_S) -> int:
        """Wait for a process to end by itself; its exit code."""
        await self.wait_until(lambda: not process.is_running, f"{process.name} ends", deadline_s)
        return int(process.popen.returncode)

    async def finished(self) -> None:
        """The run is over, and everybody has left by himself with code 0."""
        for process in [self.coordinator, *self.nodes]:
            code = await self.ended(process)
            if code != 0:
                raise AssertionError(f"{process.name} ended with code {code}")

    async def end(self) -> None:
        """Stop what still runs as an owner would: Ctrl-C to the coordinator, then to the rest."""
        for process in [p for p in self.processes if p.name == "coordinator" and p.is_running]:
            process.signal(signal.SIGINT)
        for process in [p for p in self.processes if p.name == "coordinator"]:
            await self.ended(process, 30)
        for process in self.nodes:
            # Dismissed by the coordinator, or alone: then the first Ctrl-C is enough.
            with contextlib.suppress(AssertionError):
                await self.ended(process, 5)
            process.signal(signal.SIGINT)
            await self.ended(process, 15)

    # ---- facts ---------------------------------------------------------------------------

    @property
    def live(self) -> Live:
        live = read_live(self.run_folder)
        assert live is not None, "no coordinator is up"
        return live

    async def view(self) -> RunView:
        """What the HTTP API says now. Raises `httpx.HTTPError` or AssertionError without one."""
        async with httpx.AsyncClient(base_url=self.live.dashboard, timeout=10) as client:
            reply = await client.get("/api/run")
            reply.raise_for_status()
            return RunView.model_validate_json(reply.content)

    async def status(self) -> RunView:
        """The same by `shoal status --json`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "shoal.cli", "status", self.live.dashboard, "--json",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0
        return RunView.model_validate_json(output)

    async def operate(self, action: str) -> None:
        """POST /api/run/ACTION as the operator."""
        token = (self.run_folder / TOKEN_FILE).read_text(encoding="ascii").strip()
        headers = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=self.live.dashboard, timeout=10) as client:
            (await client.post(f"/api/run/{action}", headers=headers)).raise_for_status()

    async def pause(self) -> None:
        """Until the open step is over and no other is opened."""
        await self.operate("pause")
        await self.see(lambda v: v.state == "paused", "the run is paused")

    async def resume(self) -> None:
        await self.operate("resume")

    async def advance(self, num_steps: int = 3) -> None:
        """Wait until so many more steps are committed."""
        await self.committed(self.last_step + num_steps)

    async def wait_until(
        self, holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S
    ) -> None:
        deadline = time.monotonic() + deadline_s
        while not holds():
            self._check_waiting(what, deadline)
            await asyncio.sleep(_POLL_S)

    def _check_waiting(self, what: str, deadline: float) -> None:
        """Whether it makes sense to go on waiting."""
        if crashed := [p.name for p in self.processes if p.has_crashed]:
            raise AssertionError(f"{', '.join(crashed)} crashed; waited until {what}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not so in time")

    async def see(
        self, holds: Callable[[RunView], bool], what: str, deadline_s: float = DEADLINE_S
    ) -> RunView:
        """The first view for which `holds`. While no coordinator answers, nothing holds."""
        deadline = time.monotonic() + deadline_s
        while True:
            view = None
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                view = await self.view()
            if view is not None and holds(view):
                return view
            self._check_waiting(what, deadline)
            await asyncio.sleep(_POLL_S)

    async def committed(self, step: int) -> None:
        """Wait until `step` is in the event log."""
        await self.wait_until(lambda: self.last_step >= step, f"step {step} is committed")

    @property
    def last_step(self) -> int:
        """The highest committed step."""
        return max((e.step for e in self.events(StepCommitted)), default=0)

    def events(self, kind: type[E]) -> list[E]:
        """The log's events of a kind, in order. Also while a coordinator writes it."""
        return [event for event in self.log() if isinstance(event, kind)]

    def log(self) -> list[Event]:
        try:
            stored = list(read_event_log(self.run_folder / "events.sqlite"))
        except StorageError:
            return []  # not there yet
        return [EVENT_KINDS[event.kind].model_validate(event.payload) for event in stored]

    def node_in(self, view: RunView, process: Process) -> NodeView:
        return next(node for node in view.nodes if node.peer_id == process.peer_id)

    def process_of(self, node: NodeView) -> Process:
        return next(p for p in self.nodes if p.peer_id == node.peer_id)

    async def placed(self, process: Process) -> NodeView:
        """Wait until the node holds a stage."""
        await self.wait_until(
            (process.folder / "identity.pem").exists, f"{process.name} has an identity"
        )
        view = await self.see(
            lambda v: any(
                n.peer_id == process.peer_id and n.state in ("ready", "training") for n in v.nodes
            ),
            f"{process.name} holds a stage",
        )
        return self.node_in(view, process)

    # ---- the truth -----------------------------------------------------------------------

    @property
    def reference(self) -> Reference:
        if self._reference is None:
            self._reference = Reference(read_run(self.run_folder), self.run_folder)
        return self._reference

    def check_exact(self, *, finished: bool = True) -> None:
        """Every committed step, recomputed ones too, has the undisturbed run's bits, and every
        microbatch counts once. With `finished` the final weights as well."""
        stored, rows = read_log_and_history(self.run_folder / "events.sqlite")
        log = [EVENT_KINDS[event.kind].model_validate(event.payload) for event in stored]
        records = [event for event in log if isinstance(event, StepCommitted)]
        assert records, "nothing was committed"
        for row in rows:
            self._check_row(row)
        for record in records:
            truth = self.reference.truth(record.step)
            assert record.sums_digests == truth.sums_digests, f"sums of step {record.step}"
            assert (
                record.loss, record.validation_loss, record.grad_norm, record.learning_rate,
                record.clip_scale,
            ) == (
                truth.loss, truth.validation_loss, truth.grad_norm, truth.learning_rate,
                truth.clip_scale,
            ), f"record of step {record.step}"  # fmt: skip
        for applied in (event for event in log if isinstance(event, StepApplied)):
            step = applied.step
            expected = (
                self.reference.truth(step).weights_digests
                if step
                else self.reference.initial_digests
            )
            assert applied.weights_digests == expected, f"weights after step {step}"
        run = self.reference.run
        assert audit(run, records) == (0, 0), "microbatches missing or double"
        steps = {r.step for r in (*rows, *records)}
        assert steps == set(range(1, records[-1].step + 1)), "steps are lost"
        if finished:
            assert records[-1].step == run.spec.steps
            self.check_snapshot(run.spec.steps)

    def _check_row(self, row: StepRow) -> None:
        """A step whose record was compacted away."""
        truth = self.reference.truth(row.step)
        assert (
            row.sums_digests, row.loss, row.validation_loss, row.grad_norm, row.learning_rate,
        ) == (
            truth.sums_digests, truth.loss, truth.validation_loss, truth.grad_norm,
            truth.learning_rate,
        ), f"row of step {row.step}"  # fmt: skip
        assert row.weights_digests in ((), truth.weights_digests), f"weights of step {row.step}"
        assert (row.missing, row.double) == (0, 0), f"slots of step {row.step}"

    def check_snapshot(self, step: int) -> None:
        """The weights that the coordinator stored, by SHA-256."""
        store = SnapshotStore(self.run_folder, self.reference.run, read_only=True)
        assert store.weights_sha256(step) == self.reference.weights_sha256(step)

    def fenced_in_open_step(self) -> list[Incarnation]:
        """Incarnations that were fenced after a step was opened and before it was committed."""
        found: list[Incarnation] = []
        is_open = False
        for event in self.log():
            match event:
                case StepOpened():
                    is_open = True
                case StepCommitted():
                    is_open = False
                case NodeFenced() if is_open:
                    found.append(event.incarnation)
        return found

    async def stop_and_check(self) -> int:
        """Stop after the open step; everything so far is exact. Returns the last step."""
        self.coordinator.signal(signal.SIGINT)
        await self.finished()
        self.check_exact(finished=False)
        self.check_snapshot(self.last_step)
        return self.last_step

    # ---- the end -------------------------------------------------------------------------

    def survivors(self) -> list[psutil.Process]:
        """Everything that descends from what was started here, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(_MARKER) == self._marker
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def _note_resources(self) -> None:
        """Remember sockets and addresses, to look for them when their owners are gone."""
        for process in self.survivors():
            with contextlib.suppress(psutil.Error):
                for argument in process.cmdline():
                    if "/unix/" in argument:
                        self._sockets.add(Path("/" + argument.partition("/unix/")[2]))
                for connection in process.net_connections(kind="inet"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr:
                        self._addresses.add(f"{connection.laddr.ip}:{connection.laddr.port}")

    def p2pds(self) -> list[psutil.Process]:
        found = []
        for process in self.survivors():
            with contextlib.suppress(psutil.Error):
                if process.name() == "p2pd":
                    found.append(process)
        return found

    def _check_nothing_left(self) -> None:
        _, remaining = psutil.wait_procs(self.survivors(), timeout=GONE_S)
        assert not remaining, f"processes are left: {_describe(remaining)}"
        assert self._addresses, "no listening port was ever seen"
        listening = _listening()
        assert not self._addresses & listening, f"ports are left: {self._addresses & listening}"
        stale = [path for path in self._sockets if path.exists()]
        if self._killed:  # the killed can't remove theirs
            for path in stale:
                path.unlink(missing_ok=True)
        else:
            assert not stale, f"sockets are left: {stale}"
            assert not self.temporary_files()

    def temporary_files(self) -> list[Path]:
        """Unfinished files and scratch folders in the swarm's folders."""
        patterns = ("**/.*.tmp", "**/incoming-*", "*/state-*")
        return sorted({path for pattern in patterns for path in self.folder.glob(pattern)})

    def _put_down(self) -> None:
        for process in self.survivors():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for started in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.popen.wait(GONE_S)
        for path in self._sockets:
            path.unlink(missing_ok=True)

    def logs(self) -> str:
        """The last lines of every process."""
        return "\n".join(_tails(sorted({p.log for p in self.processes})))


def _position(view: RunView) -> tuple[int, int, int]:
    return view.step, view.attempt, view.receipts_done


def _tails(logs: Iterable[Path]) -> Iterator[str]:
    for log in logs:
        yield f"---- {log.name}"
        with contextlib.suppress(OSError):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            yield from (line[:300] for line in lines[-_LOG_TAIL:])


def _describe(processes: Iterable[psutil.Process]) -> list[str]:
    described = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            described.append(f"{process.pid} {' '.join(process.cmdline())[:150]}")
    return described


def _listening() -> set[str]:
    """Addresses that somebody listens on; where the owner is known, it is not a swarm's."""
    return {
        f"{c.laddr.ip}:{c.laddr.port}"
        for c in psutil.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN and c.laddr and c.pid is None
    }
