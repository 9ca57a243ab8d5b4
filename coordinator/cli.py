# SPDX-License-Identifier: Apache-2.0
"""Commands for whoever launches a run: launch, check, export, run list."""

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.coordinator import standby_link
from shoal.coordinator.run_folder import (
    find_run,
    known_runs,
    read_live,
    run_id_of,
    runs_folder,
)
from shoal.protocol.errors import ConfigError
from shoal.protocol.fault_injector import FAULTS_VARIABLE
from shoal.protocol.spec import load_run_spec
from shoal.protocol.terminal import Terminal, quits_on_signals

# What imports tensor libraries is imported by the command that needs it.

OptionalRunFile = Annotated[
    Path | None, typer.Argument(metavar="RUN.toml", help="The run's spec; not for --standby.")
]
RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's spec.")]


@contextlib.contextmanager
def progress_reporter(terminal: Terminal) -> Iterator[Callable[[str, float], None]]:
    """A callback (phase, share done) that draws a bar, or prints a line a phase without a
    terminal."""
    console = terminal.console
    if not console.is_terminal:
        seen: set[str] = set()

        def plain(phase: str, share: float) -> None:
            if phase not in seen:
                seen.add(phase)
                terminal.line(phase)

        yield plain
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("reading", total=1.0)

    def draw(phase: str, share: float) -> None:
        if share >= 1.0:
            bar.stop()  # something else may draw now
            return
        bar.start()
        bar.update(task, description=phase, completed=share)

    try:
        yield draw
    finally:
        bar.stop()


def launch_command(
    run_file: OptionalRunFile = None,
    folder: Annotated[
        Path | None, typer.Option(help="Run folder; by default one per spec, so that it resumes.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on for nodes.")] = "127.0.0.1",
    advertise: Annotated[str, typer.Option(help="Host that join links name.")] = "",
    port: Annotated[
        int,
        typer.Option(min=0, max=65534, help="Admission port; sessions take the next one."),
    ] = 0,
    http_host: Annotated[str, typer.Option(help="Address of the dashboard.")] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the dashboard; 0 takes any.")
    ] = 0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A further host name under which the page is asked for."),
    ] = None,
    link_file: Annotated[Path | None, typer.Option(help="Write the join link here.")] = None,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Serve the dashboard after the run's end.")
    ] = False,
    discovery: Annotated[bool, typer.Option(help="Be found through the DHT.")] = True,
    faults: Annotated[
        Path | None, typer.Option(hidden=True, envvar=FAULTS_VARIABLE, help="For tests.")
    ] = None,
    standby: Annotated[
        str | None,
        typer.Option(metavar="LINK", help="Stand by for the run of this standby link, or file."),
    ] = None,
    takeover_s: Annotated[
        float, typer.Option(min=1, help="A standby takes over after so long without the leader.")
    ] = 10.0,
    force_term: Annotated[
        bool,
        typer.Option(
            "--force-term", help="Lead without asking. Only if no other coordinator lives."
        ),
    ] = False,
) -> None:
    """Coordinate a run: launch it, or resume it where it was."""
    if run_file is None and standby is None:
        raise ConfigError("give a RUN.toml, or --standby LINK to stand by for a run elsewhere")
    from shoal.coordinator.launch import launch
    from shoal.coordinator.run_view import audit
    from shoal.coordinator.serving import LaunchConfig

    spec = load_run_spec(run_file) if run_file is not None else None
    link = standby_link.read(standby) if standby is not None else None
    run_id = link.run_id if link is not None else run_id_of(spec) if spec is not None else ""
    if link is not None and spec is not None and run_id_of(spec) != run_id:
        raise ConfigError(f"{run_file} is run {run_id_of(spec)}, the standby link is for {run_id}")
    where = (folder or runs_folder() / run_id).absolute()
    config = LaunchConfig(
        folder=where,
        host=host,
        advertise=advertise,
        port=port,
        http_host=http_host,
        http_port=http_port,
        link_file=link_file,
        keep_running=keep_running,
        discovery=discovery,
        allowed_hosts=tuple(allow_host or ()),
        faults=faults,
        force_term=force_term,
        takeover_s=takeover_s,
    )
    terminal = Terminal()
    with quits_on_signals(), progress_reporter(terminal) as progress:
        if link is not None:
            from shoal.coordinator.standby import stand_by

            led = stand_by(link, config, terminal)
            if led is None:
                return
            conductor = led
        else:
            assert spec is not None
            conductor = launch(spec, config, terminal, progress)
    spec, state, earlier = conductor.run.spec, conductor.state, conductor.history.totals
    recent = [record for step, record in state.records.items() if step > earlier.last_step]
    missing, double = audit(conductor.run, recent)
    line = (
        f"step {state.step} of {spec.steps}; {earlier.missing + missing} microbatches missing, "
        f"{earlier.double + double} double"
    )
    if recent:
        first = recent[0].loss if earlier.first_loss is None else earlier.first_loss
        line += f"; loss {first:.3f} to {recent[-1].loss:.3f}"
    terminal.line(line)
    if state.step < spec.steps:
        again = f"shoal launch {shlex.quote(str(run_file or 'RUN.toml'))}"
        if folder is not None:
            again += f" --folder {shlex.quote(str(folder))}"
        terminal.line(f"resume with: {again}")


def check_command(
    run_file: RunFile,
    flops: Annotated[
        float, typer.Option(min=0, help="FLOP/s of a node, to estimate time with.")
    ] = 0.0,
    mbit: Annotated[float, typer.Option(min=0.001, help="Mbit/s of a node's link.")] = 100.0,
    json_output: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Memory per stage, bytes per step and expected step time, before anything starts."""
    from shoal.coordinator.check import HardwareAssumption, check_run
    from shoal.coordinator.check_report import render

    spec = load_run_spec(run_file)
    hardware = HardwareAssumption(link_bps=mbit * 1e6)
    if flops:
        hardware = HardwareAssumption(link_bps=mbit * 1e6, flops=flops, measured=True)
    report = check_run(spec, hardware=hardware)
    if json_output:
        typer.echo(report.model_dump_json(indent=2))
    else:
        Terminal().console.print(render(report))


def export_command(
    run: Annotated[str, typer.Argument(help="A run's id or folder.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
    stored: Annotated[
        bool,
        typer.Option("--stored", help="Take the newest stored snapshot; ask no coordinator."),
    ] = False,
    wait: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for a coordinator's snapshot.")
    ] = 300.0,
) -> None:
    """Write the newest committed weights as a Hugging Face LLaMA folder."""
    from shoal.coordinator.export import export_run
    from shoal.coordinator.fresh_snapshot import store_newest

    terminal = Terminal()
    folder = find_run(run)
    with quits_on_signals(), progress_reporter(terminal) as progress:
        live = None if stored else read_live(folder)
        step = None
        if live is not None:
            step = store_newest(folder, live.dashboard, progress, deadline_s=wait)
        report = export_run(
            folder, out, lambda done, total: progress("exporting", done / max(total, 1)), step=step
        )
    terminal.line(
        f"wrote {report.folder}: step {report.step}, {report.num_parameters:,} parameters, "
        f"{report.num_bytes:,} bytes in {report.num_shards} weight file"
        f"{'s' * (report.num_shards != 1)}, SHA-256 {report.weights_sha256}"
    )
    if not report.is_llama:
        terminal.line(
            "transformers alone cannot load it: the learned codec's halves are part of the model; "
            f"see {report.folder / 'README.md'}"
        )


def list_command(
    json_output: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Runs on this machine, and who serves them."""
    runs = known_runs()
    if json_output:
        rows = [
            {"folder": str(folder), "live": live.model_dump(exclude={"link"}) if live else None}
            for folder, live in runs
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    terminal = Terminal()
    for folder, live in runs:
        name = live.run_id if live else folder.name
        state = f"{live.dashboard}  pid {live.pid}" if live else "not running"
        terminal.line(f"{name}  {state}  {folder}")
    if not runs:
        terminal.line(f"no runs in {runs_folder()}; `shoal launch RUN.toml` begins one")


def example_command() -> None:
    """A RUN.toml to start from."""
    text = resources.files("shoal.coordinator").joinpath("example.toml").read_text("utf-8")
    typer.echo(text, nl=False)
