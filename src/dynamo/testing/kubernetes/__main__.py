"""Serves a cluster whose pods are processes: `python -m dynamo.testing.kubernetes`."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

from dynamo.testing.kubernetes.cluster import NODE, Cluster
from dynamo.testing.kubernetes.kubelet.cluster import PodCluster

USE = """\
A Kubernetes API server runs at {url}. Its pods are processes of this host. In another terminal:

    export KUBECONFIG={kubeconfig}
    kubectl get nodes

Images begin with `dynamo`. Pods and Services have addresses 10.x.y.z, which are 127.x.y.z on this
host. Ctrl-C ends the cluster and all of its processes.
"""


async def serve(arguments: argparse.Namespace) -> None:
    """Serve an empty cluster until SIGINT or SIGTERM, and print how to use it."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    resources: Mapping[str, str] = {**NODE, "nvidia.com/gpu": str(arguments.gpus)}
    nodes = {f"node-{number}": resources for number in range(arguments.nodes)}
    if arguments.no_pods:
        async with Cluster(nodes, port=arguments.port) as cluster:
            print(cluster.server.url, flush=True)  # noqa: T201
            await stopped.wait()
        return
    async with PodCluster(nodes, images=tuple(arguments.images), port=arguments.port) as running:
        text = USE.format(url=running.url, kubeconfig=running.kubeconfig)
        print(text, flush=True)  # noqa: T201
        await stopped.wait()


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser("python -m dynamo.testing.kubernetes", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port of the API server (a free one)")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (1)")
    parser.add_argument("--gpus", type=int, default=8, help="nvidia.com/gpu of each node (8)")
    parser.add_argument("--images", nargs="+", default=["dynamo"], metavar="NAME",
                        help="beginnings of the images that exist (dynamo)")  # fmt: skip
    parser.add_argument("--no-pods", action="store_true", help="pods are objects without processes,"
                        " and the server needs no token")  # fmt: skip
    return parser


if __name__ == "__main__":
    parsed = parser().parse_args()
    if not parsed.no_pods and shutil.which("openssl") is None:
        sys.exit("the cluster needs the program openssl: install it, or use --no-pods")
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(parsed))
