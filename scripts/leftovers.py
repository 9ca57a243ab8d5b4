# SPDX-License-Identifier: Apache-2.0
"""leftovers.py SESSION: fails, and ends them, if processes that the tests started still run.

Every process started under scripts/test carries SHOAL_TEST_SESSION=SESSION in its environment,
however deep below pytest and whoever its parent is by now.
"""

import os
import sys

import psutil

GRACE_S = 5.0
"""A process that has been told to end may need so long."""


def leftovers(session: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("SHOAL_TEST_SESSION") == session
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue  # somebody else's, or gone by now
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [process for process in found if process.pid not in ours]


def main(session: str) -> int:
    _, remaining = psutil.wait_procs(leftovers(session), timeout=GRACE_S)
    for process in remaining:
        try:
            described = f"{process.pid} {' '.join(process.cmdline())[:200]}"
            process.kill()
        except psutil.Error:
            continue
        print(f"shoal: the tests left a process behind: {described}", file=sys.stderr)
    return 1 if remaining else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
