#!/usr/bin/env python3
"""Measure the operator of Kubernetes on the test cluster: the creation of graphs, a restart among
many, memory, and what it does while nothing changes.

    benchmarks/kubernetes_operator.py [--created 20] [--graphs 100] [--minutes 10]

The operator is a process of its own with its shipped rights. Each graph has 5 components, and pods
are ready at once. Prints one JSON object. Exits with 1 if a figure misses its bar:

- all objects of a graph after 50 ms of wall time (median)
- 5 s of CPU and no write for the restart
- 90 MB of memory
- no list while idle, and no write but those of the Lease
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.kubernetes_graphs import GraphCluster, component, graph

from dynamo.testing.kubernetes.store import Change

BARS = {"created_wall_ms": 50.0, "restart_cpu_s": 5.0, "restart_writes": 0, "memory_mb": 90.0,
        "idle_writes": 0, "idle_lists": 0}  # fmt: skip
LABEL = "nvidia.com/dynamo-graph-deployment-name"
NOT_MADE = ("pods", "replicasets.apps", "endpointslices.discovery.k8s.io", "events")
"""Kinds that others than the operator make, or that are no part of a graph."""
QUIET_S = 3.0
TICKS = os.sysconf("SC_CLK_TCK")


class Operator:
    """The operator as a process."""

    def __init__(self, cluster: GraphCluster, folder: Path) -> None:
        command = [sys.executable, "-P", "-m", "dynamo", "kubernetes", "operator"]
        environ = {**os.environ, **cluster.account()}
        self._log = (folder / "operator.log").open("ab")
        self._process = subprocess.Popen(command, env=environ, stdout=self._log, stderr=self._log)

    @property
    def cpu_s(self) -> float:
        """CPU time of the process since its start."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    @property
    def thread_cpu_s(self) -> float:
        """CPU time of its first thread, to the nanosecond."""
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e9

    @property
    def memory_mb(self) -> float:
        """Most memory that the process has had."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return kib * 1024 / 1e6

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
        self._log.close()


class Creations:
    """The times of the last object of each graph: wall, CPU of the operator, CPU of the server."""

    def __init__(self, cluster: GraphCluster, operator: Operator) -> None:
        self._operator = operator
        self.last: dict[str, tuple[float, float, float]] = {}
        self.objects: dict[str, int] = {}
        cluster.server.store.watchers[""].add(self._on_change)

    def now(self) -> tuple[float, float, float]:
        """Return the times now."""
        return time.monotonic(), self._operator.thread_cpu_s, time.process_time()

    def _on_change(self, change: Change) -> None:
        name = (change.after["metadata"].get("labels") or {}).get(LABEL)
        if name and change.before is None and change.kind not in NOT_MADE:
            self.last[name] = self.now()
            self.objects[name] = self.objects.get(name, 0) + 1


def manifest(name: str) -> dict[str, Any]:
    """Return a graph of 5 components."""
    parts = [component(f"part-{number}", "worker") for number in range(3)]
    decode = component("decode", "decode", scalingAdapter={})
    return graph(component("Frontend", "frontend"), decode, *parts, name=name)


def is_lease(request: str) -> bool:
    return "/leases" in request


def writes(requests: list[str]) -> list[str]:
    """Return the requests that write, without those of the Lease."""
    return [line for line in requests if not line.startswith("GET ") and not is_lease(line)]


def lists(requests: list[str]) -> list[str]:
    """Return the requests that read, but the watches."""
    return [line for line in requests if line.startswith("GET ") and "watch=true" not in line]


async def until_quiet(cluster: GraphCluster) -> None:
    """Wait until nothing but the Lease was asked for during some seconds."""
    since, count = time.monotonic(), -1
    while time.monotonic() < since + QUIET_S:
        now = sum(not is_lease(line) for line in cluster.server.requests)
        if now != count:
            since, count = time.monotonic(), now
        await asyncio.sleep(0.05)


async def create(cluster: GraphCluster, names: list[str]) -> None:
    """Create graphs, one after the other, and wait until all are ready."""
    for name in names:
        await cluster.apply(manifest(name))
        while cluster.state(name) != "successful":
            await asyncio.sleep(0.02)


async def measure_creation(
    cluster: GraphCluster, operator: Operator, names: list[str]
) -> dict[str, Any]:
    """Create graphs one after the other. Returns the times until all objects were there, and the
    CPU time until all were ready."""
    creations = Creations(cluster, operator)
    await create(cluster, ["first"])
    await until_quiet(cluster)
    times, cpu_s = [], operator.cpu_s
    for name in names:
        began = creations.now()
        await create(cluster, [name])
        await asyncio.sleep(0.2)
        last = creations.last[name]
        times.append([(end - begin) * 1000 for begin, end in zip(began, last, strict=True)])
    walls, operator_ms, server_ms = zip(*times, strict=True)
    return {
        "objects_a_graph": sorted(set(creations.objects.values())),
        "created_wall_ms": round(statistics.median(walls), 1),
        "created_wall_ms_worst": round(max(walls), 1),
        "created_operator_cpu_ms": round(statistics.median(operator_ms), 1),
        "created_server_cpu_ms": round(statistics.median(server_ms), 1),
        "ready_operator_cpu_ms": round((operator.cpu_s - cpu_s) * 1000 / len(names), 1),
    }


async def measure_rest(cluster: GraphCluster, operator: Operator, minutes: float) -> dict[str, Any]:
    """Return the figures of a new operator among graphs that are ready, and then of its rest."""
    while not any(map(is_lease, cluster.server.requests)):
        await asyncio.sleep(0.05)
    await until_quiet(cluster)
    restart, cpu_s = list(cluster.server.requests), operator.cpu_s
    cluster.server.requests.clear()
    await asyncio.sleep(minutes * 60)
    idle = list(cluster.server.requests)
    return {
        "restart_cpu_s": round(cpu_s, 2),
        "restart_requests": len(restart),
        "restart_writes": len(writes(restart)),
        "memory_mb": round(operator.memory_mb, 1),
        "idle_minutes": minutes,
        "idle_cpu_s": round(operator.cpu_s - cpu_s, 2),
        "idle_lease_writes": sum(map(is_lease, idle)),
        "idle_watches": sum("watch=true" in line for line in idle),
        "idle_writes": len(writes(idle)),
        "idle_lists": len(lists(idle)),
    }


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures."""
    nodes = {"node": {"cpu": "10000", "memory": "100Ti", "pods": "10000"}}
    names = [f"graph-{number}" for number in range(1, args.graphs)]
    async with GraphCluster(folder, nodes) as cluster:
        operator = Operator(cluster, folder)
        try:
            figures = await measure_creation(cluster, operator, names[: args.created])
            await create(cluster, names[args.created :])
            await until_quiet(cluster)
            operator.stop()
            cluster.server.requests.clear()
            operator = Operator(cluster, folder)
            rest = await measure_rest(cluster, operator, args.minutes)
            return {"graphs": args.graphs, **figures, **rest}
        finally:
            operator.stop()


def main() -> int:
    """Measure, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--created", type=int, default=20, help="graphs whose creation is timed")
    parser.add_argument("--graphs", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=10.0, help="time without changes")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        figures = asyncio.run(measure(args, Path(folder)))
    missed = [name for name, bar in BARS.items() if figures[name] > bar]
    print(json.dumps({**figures, "missed": missed}, indent=2))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
