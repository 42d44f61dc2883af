#!/usr/bin/env python3
"""Update a graph under load on the test cluster, with proxies that are late.

    benchmarks/kubernetes_update.py [--workers 16] [--frontends 4] [--clients 20] [--streams 2000]

All pods are processes of this host. Prints how long the update took and how many streams ended.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import write_tiny_model
from tests.support.graph_processes import GraphProcesses, Load, make_graph

PROXY_LAG_S = 1.0


async def run(args: argparse.Namespace, model: Path) -> None:
    """Update the graph while clients read streams, until there are enough of these."""
    sizes = {"workers": args.workers, "frontends": args.frontends}
    async with GraphProcesses() as pods:
        pods.cluster.proxy.lag_s = PROXY_LAG_S
        await pods.apply(make_graph(model, **sizes))
        await wait(pods)
        await asyncio.sleep(PROXY_LAG_S)
        async with Load(pods, args.clients) as load:
            await load.more(args.clients)
            began = time.monotonic()
            await pods.apply(make_graph(model, **sizes, VERSION="2"))
            await wait(pods)
            seconds = time.monotonic() - began
            while len(load.answers) < args.streams:
                await asyncio.sleep(0.1)
    bad = [answer for answer in load.answers if not answer.complete]
    texts = len({answer.text for answer in load.answers})
    print(f"updated in {seconds:.0f} s; {len(load.answers)} streams, {len(bad)} not complete,")
    print(f"{texts} texts of {args.clients} prompts")
    print(*bad[:3], sep="\n")


async def wait(pods: GraphProcesses) -> None:
    """Wait until all pods of the present manifest are ready."""
    await asyncio.sleep(1.0)
    while not pods.is_successful("llm"):
        await asyncio.sleep(0.1)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--streams", type=int, default=2000)
    with TemporaryDirectory() as folder:
        asyncio.run(run(parser.parse_args(), write_tiny_model(Path(folder) / "tiny")))


if __name__ == "__main__":
    main()
