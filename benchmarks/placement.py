#!/usr/bin/env python3
"""Measure placement: gangs in one rack, gangs refused and time a gang, on 1,024 GPUs.

    .venv/bin/python benchmarks/placement.py [--seeds 8] [--arrivals 600]

Four blocks of four racks of eight hosts of eight GPUs. Gangs of eight shapes (6 to 48 GPUs) arrive
at random. Before each arrival, gangs drawn at random leave while more than the load of all GPUs is
in use. A gang that does not fit is refused, and another one leaves.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from dynamo.operations.placement.fit import Gang, PlacedGang, PodGroup, place, release
from dynamo.operations.placement.quantity import GPU
from dynamo.operations.placement.topology import HOST, Node, Topology

LEVELS = ("block", "rack", HOST)
SHAPES = ([8] * 2, [4] * 4, [2] * 8, [8] * 4, [4, 4, 2, 2, 2, 2], [1] * 6, [8] * 6, [2] * 3)
GPUS = 1024


def make_topology() -> Topology:
    """Return 128 hosts of eight GPUs."""
    nodes = []
    for host in range(GPUS // 8):
        labels = {"block": f"b{host // 32}", "rack": f"r{host // 8}"}
        room = {GPU: 8000}
        nodes.append(Node(f"n{host}", labels, room, room))
    return Topology(nodes, LEVELS)


def make_gang(name: str, pods: list[int]) -> Gang:
    """Return a gang with a group for each number of GPUs."""
    groups = [
        PodGroup(f"g{gpus}", pods.count(gpus), {GPU: gpus * 1000})
        for gpus in sorted(set(pods), reverse=True)
    ]
    return Gang(name, groups)


def run(seed: int, arrivals: int, load: float) -> tuple[float, float, float]:
    """Return the share of all gangs in one rack, the share refused, and seconds a gang."""
    rng, topology = random.Random(seed), make_topology()
    live: list[tuple[PlacedGang, int]] = []
    used = in_rack = refused = 0
    spent = 0.0
    for number in range(arrivals):
        while live and used > load * GPUS:
            placed, gpus = live.pop(rng.randrange(len(live)))
            release(topology, placed)
            used -= gpus
        pods = rng.choice(SHAPES)
        gang = make_gang(f"gang-{number}", pods)
        begin = time.perf_counter()
        answer = place(topology, gang)
        spent += time.perf_counter() - begin
        if answer is None:
            refused += 1
            placed, gpus = live.pop(rng.randrange(len(live)))
            release(topology, placed)
            used -= gpus
            continue
        live.append((answer, sum(pods)))
        used += sum(pods)
        in_rack += answer.level in {"rack", HOST}
    return in_rack / arrivals, refused / arrivals, spent / arrivals


def main() -> None:
    """Print a line for each load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--arrivals", type=int, default=600)
    args = parser.parse_args()
    for load in (0.85, 0.95):
        rows = [run(100 + seed, args.arrivals, load) for seed in range(args.seeds)]
        in_rack, refused, spent = (statistics.mean(column) for column in zip(*rows, strict=True))
        worst = min(row[0] for row in rows)
        print(
            f"load {load}: in one rack {in_rack:.3f} (worst {worst:.3f}), refused {refused:.3f}, "
            f"{spent * 1e6:.0f} us a gang"
        )


if __name__ == "__main__":
    main()
