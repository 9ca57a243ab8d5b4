# SPDX-License-Identifier: Apache-2.0
"""What a killed starter started ends too."""

import signal
import subprocess
import sys

STARTED = """
import os, signal, sys
from shoal.lifeline import end_with_stdin

def leave(number, frame):
    os.write(1, b"left\\n")  # at once: another writes to the same pipe
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
end_with_stdin()
print("started", flush=True)
signal.pause()
"""

STARTER = f"""
import subprocess, sys, signal
from shoal.lifeline import lifeline
code = {STARTED!r}
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", code], stdin=lifeline(), start_new_session=True)
signal.pause()
"""


def test_processes_end_when_their_starter_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        lines = [starter.stdout.readline() for _ in range(2)]
        assert lines == ["started\n"] * 2
        starter.send_signal(signal.SIGKILL)
        # Their stdout is the same pipe: it ends when the last of them has ended.
        assert starter.stdout.read() == "left\n" * 2
    finally:
        starter.kill()
        starter.wait()
        if starter.stdout is not None:
            starter.stdout.close()
