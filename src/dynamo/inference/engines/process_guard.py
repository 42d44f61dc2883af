"""The program that ends an engine's processes after the worker has ended, however that ended.

    python -I -S process_guard.py NAME=VALUE

The program waits until its standard input is closed. Then it kills all processes whose environment
has that variable. Only the standard library is imported, since the program stays in memory.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

SEARCH_INTERVAL_S = 0.05
QUIET_SEARCHES = 3
"""A process may just be starting another one, so that several searches must find none."""
MAX_DURATION_S = 10.0


def find_processes(variable: bytes) -> list[int]:
    """Return the ids of the processes that were started with an environment variable."""
    processes = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    processes.append(int(folder.name))
    return processes


def main() -> None:
    """Wait for the end of the standard input, then kill until nothing is left."""
    variable = sys.argv[1].encode()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)
    quiet, end_s = 0, time.monotonic() + MAX_DURATION_S
    while quiet < QUIET_SEARCHES and time.monotonic() < end_s:
        processes = find_processes(variable)
        for process in processes:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        quiet = 0 if processes else quiet + 1
        time.sleep(SEARCH_INTERVAL_S)


if __name__ == "__main__":
    main()
