"""The entry point of `python -m dynamo`."""

from __future__ import annotations

import gc
import signal
import sys

GC_THRESHOLD = 50_000
"""Startup creates many objects and no garbage; collections would take a tenth of its time."""


def main() -> int:
    """Run the command line and return its exit code. Late imports keep the startup short."""
    gc.set_threshold(GC_THRESHOLD)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not if the shell made us ignore the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C during imports
    from dynamo.cli import main as run

    signal.signal(signal.SIGINT, handler)
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
