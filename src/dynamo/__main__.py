"""The entry point of `python -m dynamo`."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence

GC_THRESHOLD = 50_000
"""Startup creates many objects and no garbage; collections would take a tenth of its time."""


def open_standard_streams() -> None:
    """Open /dev/null for closed descriptors 0 to 2, else sockets would get these numbers and
    receive what is printed. Children inherit the open ones."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the lowest closed descriptor, which the next open() returns
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            stream = open(number, "r" if number == 0 else "w", closefd=False, errors="replace")  # noqa: SIM115
            setattr(sys, name, stream)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Late imports keep the startup short."""
    open_standard_streams()
    gc.set_threshold(GC_THRESHOLD)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not if the shell made us ignore the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C during imports
    from dynamo.cli import main as run

    signal.signal(signal.SIGINT, handler)
    return run(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
