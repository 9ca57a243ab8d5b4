# SPDX-License-Identifier: Apache-2.0
"""Commands for whoever lends a GPU: join."""

import asyncio
import contextlib
import os
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.node.config import NodeConfig, default_folder
from shoal.protocol.errors import AdmissionError, ConfigError
from shoal.protocol.join_link import JoinLink
from shoal.protocol.spec import parse_spec

console = Console()

_LINK_FILE_PATIENCE_S = 600.0


def join_command(
    link: Annotated[
        str | None, typer.Argument(help="The link that `shoal launch` printed.")
    ] = None,
    link_file: Annotated[
        Path | None, typer.Option(help="Read the link from here, once it is there.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Identity and caches.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes any.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Host at which others reach this node.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for computation.")] = None,
    max_memory_gb: Annotated[float | None, typer.Option(help="Memory to use at most.")] = None,
    discovery: Annotated[bool | None, typer.Option(help="Take part in the DHT.")] = None,
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
    }
    config = load_config(flags, os.environ, folder)
    asyncio.run(_run(config, link, link_file))


def load_config(
    flags: dict[str, Any], environment: "os._Environ[str] | dict[str, str]", folder: Path | None
) -> NodeConfig:
    """Flag over environment (SHOAL_NODE_HOST, …) over node.toml over default."""
    path = (folder or default_folder()) / "node.toml"
    values: dict[str, Any] = {}
    if path.exists():
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
    for name in NodeConfig.model_fields:
        if (value := environment.get(f"SHOAL_NODE_{name.upper()}")) is not None:
            values[name] = value
    values.update({name: value for name, value in flags.items() if value is not None})
    return parse_spec(NodeConfig, values, "node configuration")


async def _run(config: NodeConfig, link: str | None, link_file: Path | None) -> None:
    parsed = JoinLink.parse(await _link_text(link, link_file))
    from shoal.node.daemon import NodeDaemon  # imports torch; a wrong link fails before that

    daemon = NodeDaemon(config, parsed, _line)
    running = asyncio.create_task(daemon.run())
    loop = asyncio.get_running_loop()
    presses = 0

    def stop() -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            daemon.leave()
        else:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await running
    except asyncio.CancelledError:
        _line("quit")
        sys.exit(130)


async def _link_text(link: str | None, link_file: Path | None) -> str:
    if link and not link_file:
        return link
    if link or not link_file:
        raise AdmissionError("give a join link or --link-file FILE; `shoal launch` prints the link")
    deadline = time.monotonic() + _LINK_FILE_PATIENCE_S
    said = False
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if text := link_file.read_text(encoding="utf-8").strip():
                return text
        if not said:
            said = True
            _line(f"waiting for a join link in {link_file}")
        await asyncio.sleep(0.5)
    raise AdmissionError(f"no join link in {link_file} after {_LINK_FILE_PATIENCE_S:.0f} s")


def _line(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
