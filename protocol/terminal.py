# SPDX-License-Identifier: Apache-2.0
"""What daemons show their owner, and how they quit: plain lines, one live line, two signals."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, NoReturn

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.protocol.printable import printable

EXIT_INTERRUPTED: Final = 130
"""Ended by a signal before anything was handed over: a second Ctrl-C, or one with nothing begun."""

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Terminal:
    """Lines for the owner. On a terminal, `live` draws a changing one below them."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def line(self, text: str) -> None:
        self.console.print(Text(printable(text, instead=" ")), soft_wrap=True)

    @contextlib.contextmanager
    def live(self, status: Callable[[], str]) -> Iterator[None]:
        """Show `status()` twice a second; nothing when the output is no terminal."""
        if not self.console.is_terminal:
            yield
            return

        def draw() -> Text:
            return Text(
                printable(status(), instead=" "), style="bold", no_wrap=True, overflow="ellipsis"
            )

        with Live(console=self.console, get_renderable=draw, refresh_per_second=2, transient=True):
            yield


def quit_now(exit_code: int = EXIT_INTERRUPTED) -> NoReturn:
    """End at once: threads may be inside a kernel or a name lookup, and nobody waits for them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


@contextlib.contextmanager
def quits_on_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM unwind the body and end the process with `EXIT_INTERRUPTED`."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before: dict[int, Any] = {n: signal.signal(n, interrupt) for n in STOP_SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        quit_now()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
