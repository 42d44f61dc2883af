"""`python -m dynamo.frontend`, a process of NVIDIA Dynamo 1.x (`dynamo/cli/entry_points`)."""

from __future__ import annotations

import sys

from dynamo.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["_frontend", *sys.argv[1:]]))
