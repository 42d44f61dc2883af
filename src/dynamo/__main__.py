"""`python -m dynamo`."""

from __future__ import annotations

import gc
import signal
import sys

GC_THRESHOLD = 50_000
"""Starting makes many objects and no garbage; looking through them takes a tenth of its time."""


def main() -> int:
    """The command line; imports late, so that `dynamo` starts at once."""
    gc.set_threshold(GC_THRESHOLD)
    python = signal.getsignal(signal.SIGINT)
    if python is signal.default_int_handler:  # not where the shell has us ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C amid imports is no traceback
    from dynamo.cli import main as run

    signal.signal(signal.SIGINT, python)
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
