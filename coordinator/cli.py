# SPDX-License-Identifier: Apache-2.0
"""Commands for whoever launches a run: launch, check, export, run list."""

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.coordinator.check import check_run, render
from shoal.coordinator.export import export_run
from shoal.coordinator.launch import LaunchConfig, launch
from shoal.coordinator.run_folder import live_runs, run_id_of, runs_folder
from shoal.coordinator.run_view import audit
from shoal.protocol.spec import load_run_spec

console = Console()

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's spec.")]


@contextlib.contextmanager
def progress_reporter():  # type: ignore[no-untyped-def]
    """A callback (phase, share done) that draws a bar, or prints a line a phase without a
    terminal."""
    if not console.is_terminal:
        seen: set[str] = set()

        def plain(phase: str, share: float) -> None:
            if phase not in seen:
                seen.add(phase)
                console.print(phase)

        yield plain
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=1.0)
        yield lambda phase, share: bar.update(task, description=phase, completed=share)


def launch_command(
    run_file: RunFile,
    folder: Annotated[
        Path | None, typer.Option(help="Run folder; by default one per spec, so that it resumes.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on for nodes.")] = "127.0.0.1",
    advertise: Annotated[str, typer.Option(help="Host that join links name.")] = "",
    port: Annotated[int, typer.Option(help="Admission port; sessions take the next one.")] = 0,
    http_host: Annotated[str, typer.Option(help="Address of the dashboard.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="Port of the dashboard; 0 takes any.")] = 0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A further host name under which the page is asked for."),
    ] = None,
    link_file: Annotated[Path | None, typer.Option(help="Write the join link here.")] = None,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Serve the dashboard after the run's end.")
    ] = False,
    discovery: Annotated[bool, typer.Option(help="Be found through the DHT.")] = True,
) -> None:
    """Coordinate a run: launch it, or resume it where it was."""
    spec = load_run_spec(run_file)
    where = (folder or runs_folder() / run_id_of(spec)).absolute()
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
    )
    with progress_reporter() as progress:
        conductor = asyncio.run(launch(spec, config, _line, progress))
    state = conductor.state
    records = [state.records[s] for s in sorted(state.records)]
    missing, double = audit(conductor.run, records)
    _line(
        f"step {state.step} of {spec.steps}; {missing} microbatches missing, {double} double"
        + (f"; loss {records[0].loss:.3f} to {records[-1].loss:.3f}" if records else "")
    )
    if state.step < spec.steps:
        _line(f"resume with: shoal launch {run_file}")


def _line(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def check_command(
    run_file: RunFile,
    flops: Annotated[float, typer.Option(help="FLOP/s of a node, to estimate time with.")] = 0.0,
    mbit: Annotated[float, typer.Option(help="Mbit/s of a node's link.")] = 100.0,
    json_output: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Memory per stage, bytes per step and expected step time, before anything starts."""
    spec = load_run_spec(run_file)
    report = check_run(spec, flops_per_s=flops or None, link_bps=mbit * 1e6)
    if json_output:
        typer.echo(report.model_dump_json(indent=2))
    else:
        console.print(render(report))


def export_command(
    run: Annotated[str, typer.Argument(help="A run's id or folder.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
) -> None:
    """Write the newest committed weights as a Hugging Face LLaMA folder."""
    folder = Path(run) if Path(run).is_dir() else runs_folder() / run
    with progress_reporter() as progress:
        report = export_run(
            folder, out, lambda done, total: progress("exporting", done / max(total, 1))
        )
    _line(
        f"wrote {report.out}: step {report.step}, {report.num_parameters:,} parameters, "
        f"{report.num_bytes:,} bytes"
    )


def list_command() -> None:
    """Runs that coordinators on this machine serve."""
    for live in live_runs(runs_folder()):
        _line(f"{live.run_id}  {live.dashboard}  pid {live.pid}")
