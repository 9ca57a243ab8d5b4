# SPDX-License-Identifier: Apache-2.0
"""Commands for whoever lends a GPU: join, and finish for a daemon that runs."""

import asyncio
import contextlib
import difflib
import os
import threading
import time
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.node.config import NodeConfig, default_folder
from shoal.node.daemon_file import FINISH_SIGNAL
from shoal.node.finish import finish
from shoal.protocol.errors import AdmissionError, ConfigError, HandOverError
from shoal.protocol.fault_injector import FAULTS_VARIABLE, Faults, faults_from
from shoal.protocol.join_link import MAX_LINK_CHARS, JoinLink
from shoal.protocol.spec import parse_spec
from shoal.protocol.terminal import STOP_SIGNALS, Terminal, quit_now, quits_on_signals

ENVIRONMENT_PREFIX = "SHOAL_NODE_"

_LINK_FILE_PATIENCE_S = 600.0
_QUIT_LIMIT_S = 3.0


def join_command(
    link: Annotated[
        str | None, typer.Argument(help="The link that `shoal launch` printed.")
    ] = None,
    link_file: Annotated[
        Path | None, typer.Option(help="Read the link from here, once it is there.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Identity, caches and node.toml; one daemon each.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes any.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Host at which others reach this node.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for computation.")] = None,
    max_memory_gb: Annotated[float | None, typer.Option(help="Memory to use at most.")] = None,
    discovery: Annotated[bool | None, typer.Option(help="Take part in the DHT.")] = None,
    grace_s: Annotated[
        float | None,
        typer.Option("--grace-s", "--grace", help="Seconds that handing over may take at the end."),
    ] = None,
    faults: Annotated[
        Path | None, typer.Option(hidden=True, envvar=FAULTS_VARIABLE, help="For tests.")
    ] = None,
    donate_mb_per_s: Annotated[
        float | None, typer.Option(help="MB/s at which joiners may copy this node's state.")
    ] = None,
) -> None:
    """Lend this machine to a run, until it is over or you press Ctrl-C."""
    flags = {
        "folder": folder,
        "host": host,
        "port": port,
        "advertise": advertise,
        "device": device,
        "threads": threads,
        "max_memory_gb": max_memory_gb,
        "discovery": discovery,
        "grace_s": grace_s,
        "donate_mb_per_s": donate_mb_per_s,
    }
    terminal = Terminal()
    with quits_on_signals():
        config = load_config(flags, os.environ, folder)
        parsed = JoinLink.parse(_link_text(link, link_file, terminal))
        parsed.require_fresh(time.time())
        asyncio.run(_run(config, parsed, terminal, faults_from(faults)))


def finish_command(
    folder: Annotated[
        Path | None, typer.Option(help="The daemon's folder; by default that of `shoal join`.")
    ] = None,
    grace_s: Annotated[
        float | None,
        typer.Option("--grace", "--grace-s", min=0.1, help="Seconds it may take at most."),
    ] = None,
) -> None:
    """Let the node that runs here hand over its work and leave; returns when it has ended."""
    with quits_on_signals():
        finish(load_config({"folder": folder}, os.environ, folder).folder, grace_s, Terminal().line)


def load_config(
    flags: Mapping[str, Any], environment: Mapping[str, str], folder: Path | None
) -> NodeConfig:
    """Flag over environment (SHOAL_NODE_HOST, …) over node.toml over default."""
    given = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    known = list(NodeConfig.model_fields)
    for name in given.keys() - set(known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {ENVIRONMENT_PREFIX}{close[0].upper()}?" if close else "unset it"
        raise ConfigError(f"{ENVIRONMENT_PREFIX}{name.upper()}: no such setting; {hint}")
    path = Path(folder or given.get("folder") or default_folder()) / "node.toml"
    values: dict[str, Any] = {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        pass  # the folder is made, or refused, when the daemon starts
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    values |= given
    values |= {name: value for name, value in flags.items() if value is not None}
    return parse_spec(NodeConfig, values, f"node configuration (flags, environment, {path})")


async def _run(config: NodeConfig, link: JoinLink, terminal: Terminal, faults: Faults) -> None:
    if config.device in ("auto",) or config.device.startswith("cuda"):
        # Without it cuBLAS may give other bits from run to run. Read when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from shoal.node.daemon import NodeDaemon  # imports torch; a wrong link fails before that

    daemon = NodeDaemon(config, link, terminal.line, faults)
    running = asyncio.create_task(daemon.run())
    loop = asyncio.get_running_loop()
    presses = 0

    def stop() -> None:
        nonlocal presses
        presses += 1
        if presses == 1 and daemon.is_attached:
            daemon.leave()
        else:
            running.cancel()
            loop.call_later(_QUIT_LIMIT_S, quit_now)

    def finish() -> None:
        if not daemon.finish():
            running.cancel()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    # Before the daemon takes its folder's lock, without which nobody sends this signal.
    loop.add_signal_handler(FINISH_SIGNAL, finish)
    with terminal.live(daemon.status_line):
        try:
            await running
            if not daemon.handed_over:
                raise HandOverError(
                    "left without handing over, so the run computes again what only this node "
                    "held; a longer --grace gives the others more time"
                )
            return
        except asyncio.CancelledError:
            pass
    terminal.line("quit")
    quit_now()


def _link_text(link: str | None, link_file: Path | None, terminal: Terminal) -> str:
    if link and not link_file:
        return link
    if link or not link_file:
        raise ConfigError("give a join link or --link-file FILE; `shoal launch` prints the link")
    deadline = time.monotonic() + _LINK_FILE_PATIENCE_S
    said = False
    while time.monotonic() < deadline:
        try:
            with contextlib.suppress(FileNotFoundError), link_file.open(encoding="utf-8") as file:
                if text := file.read(MAX_LINK_CHARS + 1).strip():
                    return text
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--link-file {link_file}: {error}") from None
        if not said:
            said = True
            # It imports for seconds; by the time that the link is there it is ready.
            threading.Thread(target=import_module, args=("shoal.node.daemon",), daemon=True).start()
            terminal.line(f"waiting for a join link in {link_file}")
        time.sleep(0.2)
    raise AdmissionError(
        f"no join link in {link_file} after {_LINK_FILE_PATIENCE_S:.0f} s; is the run launched "
        "with --link-file, and the file in a folder that this machine sees?"
    )
