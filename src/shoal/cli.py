# SPDX-License-Identifier: Apache-2.0
"""The `shoal` command. Heavy modules are imported by the commands that need them."""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):  # before a syntax that others don't know
    sys.stderr.write(
        "shoal: Python %d.%d runs this; Shoal needs 3.11 to 3.13. Install it with one of these.\n"  # noqa: UP031 - older ones shall read it too
        % sys.version_info[:2]
    )
    sys.exit(5)

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from shoal.lifeline import end_with_stdin
from shoal.protocol.errors import ShoalError, UnreachableError
from shoal.protocol.printable import printable
from shoal.protocol.terminal import EXIT_INTERRUPTED, quits_on_signals
from shoal.version import PROTOCOL_VERSION, __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one language model together, on the GPUs in people's homes.",
)
run_app = typer.Typer(no_args_is_help=True, help="Runs on this machine.")
app.add_typer(run_app, name="run")
node_app = typer.Typer(no_args_is_help=True, help="The node that runs on this machine.")
app.add_typer(node_app, name="node")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"shoal {__version__} (protocol {PROTOCOL_VERSION})")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the release.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
    with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
) -> None:
    if with_stdin:
        end_with_stdin()
    level = logging.INFO if verbose or os.environ.get("SHOAL_LOG") == "info" else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", stream=sys.stderr
    )
    if level > logging.INFO:  # it warns of every stream that a leaving server ends
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.ERROR)


def _register() -> None:
    from shoal.coordinator import cli as coordinator
    from shoal.node import cli as node

    app.command("launch")(coordinator.launch_command)
    app.command("check")(coordinator.check_command)
    app.command("export")(coordinator.export_command)
    run_app.command("list")(coordinator.list_command)
    run_app.command("example")(coordinator.example_command)
    app.command("join")(node.join_command)
    node_app.command("finish")(node.finish_command)


@app.command()
def status(
    url: Annotated[
        str, typer.Argument(help="The dashboard's address; by default a run here.")
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """The swarm in one screen."""
    from rich.console import Console

    from shoal.status import fetch_view, render_status

    view = asyncio.run(fetch_view(url or _local_dashboard()))
    if json_output:
        typer.echo(view.model_dump_json(indent=2))
    else:
        Console().print(render_status(view))


@app.command()
def top(
    url: Annotated[
        str, typer.Argument(help="The dashboard's address; by default a run here.")
    ] = "",
) -> None:
    """The swarm, live."""
    from shoal.status import watch

    with quits_on_signals():
        asyncio.run(watch(url or _local_dashboard()))


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 20,
    stages: Annotated[int, typer.Option(min=1, max=16, help="Pipeline stages.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, max=8, help="Nodes per stage.")] = 2,
    kill: Annotated[
        str | None,
        typer.Option(help="never, or the step to kill a node in; a third of the way by default."),
    ] = None,
    chaos: Annotated[
        int | None,
        typer.Option(min=0, metavar="SEED", help="Faults drawn by this seed, not one kill."),
    ] = None,
    boundary: Annotated[str, typer.Option(help="Codec between stages.")] = "bf16",
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data order.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the summary for programs.")
    ] = None,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Leave the dashboard up afterwards.")
    ] = False,
    folder: Annotated[Path | None, typer.Option(help="Folder of this demo's run.")] = None,
) -> None:
    """A real swarm on this machine: coordinator, nodes, real text, one node killed on the way."""
    from shoal import demo as swarm_demo

    config = swarm_demo.DemoConfig(
        steps=steps,
        stages=stages,
        replicas=replicas,
        kill=swarm_demo.parse_trouble(kill, chaos, steps),
        chaos=chaos,
        boundary=boundary,
        seed=seed,
        json_file=json_file,
        keep_running=keep_running,
        folder=folder,
    )
    sys.exit(swarm_demo.demo(config))


def _local_dashboard() -> str:
    from shoal.coordinator.run_folder import live_runs, read_live

    here = read_live(Path())
    live = [here] if here else live_runs()
    if not live:
        raise UnreachableError(
            "no coordinator runs on this machine; give the dashboard's address that "
            "`shoal launch` printed"
        )
    return live[0].dashboard


def main() -> None:
    """Errors end in one line with cause and remedy, and their documented exit code."""
    _register()
    try:
        app()
    except ShoalError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # `shoal status | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is flushed at exit goes there
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        logging.getLogger(__name__).info("unexpected error", exc_info=True)
        _say(
            f"unexpected {type(error).__name__}: {error}. This is a bug in Shoal: please report "
            "it, with what `shoal -v …` shows."
        )
        sys.exit(1)


def _say(text: str) -> None:
    """One line, whatever a peer put into the error's text."""
    line = " ".join(printable(text, instead=" ").split())
    typer.echo(f"shoal: {line}", err=True)


if __name__ == "__main__":
    main()
