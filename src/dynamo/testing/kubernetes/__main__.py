"""Serves a cluster without pods' processes: `python -m dynamo.testing.kubernetes [PORT]`."""

import asyncio
import sys
from contextlib import suppress

from dynamo.testing.kubernetes.cluster import Cluster


async def serve(port: int) -> None:
    """Serve an empty cluster until cancelled, and print its URL."""
    async with Cluster({}, port=port) as cluster:
        print(cluster.server.url, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
