# SPDX-License-Identifier: Apache-2.0
"""The line with which another machine stands by for a run's coordinator.

    shoal-standby://HOST:PORT/RUN?fp=SHA256&token=…&expires=UNIX&also=HOST:PORT&dht=MULTIADDR

The same parts as a join link, but the token is a standby's: it gets the run's keys. It is kept in
a file that only the operator can read, and expires as join links do.
"""

import contextlib
import os
import secrets
from pathlib import Path

from shoal.protocol.atomic_file import storage_error
from shoal.protocol.errors import AdmissionError, ConfigError
from shoal.protocol.join_link import MAX_LINK_CHARS, SCHEME, JoinLink

LINK_FILE = "standby.link"

_SCHEME = "shoal-standby"


def render(link: JoinLink) -> str:
    """`link` carries a standby's token."""
    return f"{_SCHEME}{str(link).removeprefix(SCHEME)}"


def parse(text: str) -> JoinLink:
    """Raises `AdmissionError` naming the part that is wrong."""
    text = text.strip()
    if not text.startswith(f"{_SCHEME}://"):
        raise AdmissionError(
            f"{text[:20]!r} is no standby link: it begins with '{_SCHEME}://' and lies in the "
            f"file {LINK_FILE} of the run folder where the coordinator runs"
        )
    return JoinLink.parse(SCHEME + text.removeprefix(_SCHEME))


def read(argument: str) -> JoinLink:
    """From the link itself, or a file that holds it. Raises `AdmissionError`, `ConfigError`."""
    if argument.startswith(f"{_SCHEME}:"):
        return parse(argument)
    try:
        with Path(argument).open(encoding="utf-8") as file:
            return parse(file.read(MAX_LINK_CHARS + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--standby {argument[:80]}: neither a standby link nor a file that holds one ({error})"
        ) from None


def write(folder: Path, link: JoinLink) -> None:
    """Replace the folder's link file, mode 0600. Raises `StorageError`."""
    path = folder / LINK_FILE
    temporary = path.with_name(f".{LINK_FILE}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(render(link) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from None
