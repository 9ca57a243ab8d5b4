# SPDX-License-Identifier: Apache-2.0
"""healthcheck.py coordinator|node: exit code 0 while the container's process does its work.

A coordinator answers on its HTTP port. A node has none: it is healthy once it listens for peers,
which it does from the moment it was admitted to the run.
"""

import sys
import urllib.request
from pathlib import Path

DEADLINE_S = 3.0
COORDINATOR_URL = "http://127.0.0.1:7602/healthz"
SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

_LISTENING = "0A"
_CONTAINER_DNS = "0B00007F"  # 127.0.0.11: the container engine's resolver, not ours


def coordinator_answers(url: str = COORDINATOR_URL) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def node_listens(tables: tuple[Path, ...] = SOCKET_TABLES) -> bool:
    for table in tables:
        if not table.exists():
            continue
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTENING and local.partition(":")[0] != _CONTAINER_DNS:
                return True
    return False


def main(arguments: list[str]) -> int:
    match arguments:
        case ["coordinator"]:
            return 0 if coordinator_answers() else 1
        case ["node"]:
            return 0 if node_listens() else 1
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
