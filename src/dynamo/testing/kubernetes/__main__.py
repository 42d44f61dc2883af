"""Serves a cluster without pods' processes: `python -m dynamo.testing.kubernetes [PORT]`."""

import asyncio
import sys
from contextlib import suppress

from dynamo.testing.kubernetes.server import serve

if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
