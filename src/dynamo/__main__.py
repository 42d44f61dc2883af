"""`python -m dynamo`."""

from __future__ import annotations

import sys


def main() -> int:
    """The command line; imports late, so that `dynamo` starts at once."""
    from dynamo.cli import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
