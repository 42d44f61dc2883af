#!/usr/bin/env python3
"""The transfer plane between two processes, beside memcpy and a blocking socket of the same run.

    benchmarks/transfer.py [--rounds N] [--slot-kib 1024 720] [--slots 64] [--table]

Each round copies the same scattered blocks in turn: by memcpy in this process, by one blocking TCP
socket into the same places, and by each backend. The ratios are medians over the rounds, so that
a busy machine slows both sides. "In a thread" is the same work behind a hop to a thread and back, which
no pull can avoid: its copies must not hold the event loop. "nixl alone" is the library without this project: one
transfer for each of as many agents as `nixl:` uses, all prepared before. `held` is the longest callback of an event loop, of this process
and of the owner's, by CPU time; the wall time of a shared machine contains other processes.
`--table` prints what pulls of several sizes cost, `--merged` what consecutive slots of 16 KiB gain.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np

from dynamo.communication.transfer import (
    MemoryRegion,
    RegionDescriptor,
    RegionPeer,
    SlotRead,
    TransferPlane,
    open_transfer,
)

BACKENDS = ("shm", "nixl", "tcp")
AGENTS = max(1, min(4, os.cpu_count() or 1))
MERGED_SLOTS = 1024
MERGED_SLOT_BYTES = 16 << 10
TABLE_BLOCKS = (1, 8, 32, 96, 512)
TABLE_BLOCK_BYTES = 720 << 10


class LoopTimer:
    """The longest callback of the event loop by CPU time of its thread, while `running`."""

    def __init__(self) -> None:
        self.held_s = 0.0
        self.running = False
        run = asyncio.Handle._run  # noqa: SLF001

        def timed(handle: asyncio.Handle) -> None:
            started_s = time.thread_time()
            run(handle)
            if self.running:
                self.held_s = max(self.held_s, time.thread_time() - started_s)

        asyncio.Handle._run = timed  # type: ignore[method-assign]  # noqa: SLF001


def serve_blocking(listening: socket.socket, region: MemoryRegion) -> None:
    """Send the slots that the client asks for, by sendall, until it leaves."""
    client, _ = listening.accept()
    with client:
        while header := client.recv(4, socket.MSG_WAITALL):
            order = client.recv(4 * int.from_bytes(header, "little"), socket.MSG_WAITALL)
            for slot in memoryview(order).cast("I"):
                client.sendall(region.slot(slot))


async def own(slots: int, slot_bytes: int) -> None:
    """Expose a region by all backends and by a blocking socket, until stdin ends."""
    timer = LoopTimer()
    region = MemoryRegion.allocate(slots, slot_bytes)
    region.memory[:] = random.Random(1).randbytes(1 << 20) * (len(region.memory) // (1 << 20)) + (
        bytes(len(region.memory) % (1 << 20))
    )
    planes = {scheme: await open_transfer(f"{scheme}:") for scheme in BACKENDS}
    descriptors = {name: await plane.expose(region, "bench") for name, plane in planes.items()}
    alone = NixlAlone(region, 1)
    threading.Thread(target=alone.answer, daemon=True).start()
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_blocking, args=(listening, region), daemon=True).start()
    hello = {
        "port": listening.getsockname()[1],
        "peers": msgspec.to_builtins(descriptors),
        "nixl": alone.describe(),
    }
    print(json.dumps(hello), flush=True)
    await asyncio.sleep(0)
    timer.running = True
    await asyncio.to_thread(sys.stdin.read)
    timer.running = False
    print(json.dumps(timer.held_s), flush=True)
    for plane in planes.values():
        await plane.close()


class NixlAlone:
    """The library without this project: prepared lists of all slots, one transfer an agent."""

    def __init__(self, region: MemoryRegion, count: int) -> None:
        # Imported here: `nixl_agent` sets the environment that UCX reads.
        from dynamo.communication.transfer.nixl_agent import _new_agent, descriptors

        os.environ.setdefault("UCX_TLS", "^ib")
        self.table = partial(descriptors, size=region.slot_bytes, count=region.slots)
        self.address = region.address
        self.agents = [_new_agent(f"alone-{os.getpid()}-{number}", {}) for number in range(count)]
        for agent in self.agents:
            agent.register_memory([(region.address, len(region.memory), 0, "")], "DRAM")
        self.threads = ThreadPoolExecutor(count)
        self.lists: list[tuple[Any, Any]] = []

    def describe(self) -> tuple[str, int]:
        """Return what `connect` needs."""
        return b64encode(self.agents[0].get_agent_metadata()).decode(), self.address

    def answer(self) -> None:
        """Answer the network for ever: readers connect at their first read."""
        while True:
            self.agents[0].get_new_notifs()
            time.sleep(0.001)

    def connect(self, metadata: str, address: int) -> None:
        """Let the agents read from the owner."""
        for agent in self.agents:
            owner = agent.add_remote_agent(b64decode(metadata)).decode()
            own = agent.prep_xfer_dlist("", self.table(self.address), "DRAM")
            self.lists.append((own, agent.prep_xfer_dlist(owner, self.table(address), "DRAM")))

    def read(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Read slots, an equal share by each agent."""
        share = -(-len(sources) // len(self.agents))
        list(self.threads.map(partial(self._read, sources, targets, share), range(len(self.lists))))

    def _read(
        self, sources: Sequence[int], targets: Sequence[int], share: int, number: int
    ) -> None:
        agent, (own, peers) = self.agents[number], self.lists[number]
        part = slice(number * share, (number + 1) * share)
        ids = (np.asarray(numbers[part], np.int32) for numbers in (targets, sources))
        handle = agent.make_prepped_xfer("READ", own, next(ids), peers, next(ids), b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)


class Reader:
    """This process: a region, the peers, the buffers of memcpy and the blocking socket."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.region = MemoryRegion.allocate(slots, slot_bytes)
        self.slot_bytes = slot_bytes
        self.peers: dict[str, RegionPeer] = {}
        self.planes: list[TransferPlane] = []
        self._private = [mmap.mmap(-1, slots * slot_bytes, mmap.MAP_PRIVATE) for _ in range(2)]
        for buffer in (*self._private, self.region.memory):
            buffer[:] = b"\1" * (slots * slot_bytes)
        self._source, self._target = (
            ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in self._private
        )
        self.socket = socket.socket()
        self.nixl = NixlAlone(self.region, AGENTS)

    async def connect(self, hello: dict[str, Any]) -> None:
        """Connect to the owner."""
        for scheme, descriptor in hello["peers"].items():
            plane = await open_transfer(f"{scheme}:")
            await plane.expose(self.region, "bench")
            self.planes.append(plane)
            self.peers[scheme] = await plane.connect(msgspec.convert(descriptor, RegionDescriptor))
        self.socket.connect(("127.0.0.1", hello["port"]))
        self.nixl.connect(*hello["nixl"])

    def memcpy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy between two private buffers."""
        size = self.slot_bytes
        for source, target in zip(sources, targets, strict=True):
            ctypes.memmove(self._target + target * size, self._source + source * size, size)

    def blocking(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Receive the slots through the blocking socket."""
        order = memoryview(bytearray(4 * len(sources))).cast("I")
        for index, source in enumerate(sources):
            order[index] = source
        self.socket.sendall(len(sources).to_bytes(4, "little") + bytes(order))
        for target in targets:
            view = self.region.slot(target)
            while view:
                view = view[self.socket.recv_into(view) :]

    async def close(self) -> None:
        """Close the planes."""
        for plane in self.planes:
            await plane.close()
        self.socket.close()


async def measure(rounds: int, slots: int, slot_bytes: int) -> None:
    """Print throughput and ratios for one size of blocks."""
    rng = random.Random(2)
    owner, reader, timer = await start(2 * slots, slot_bytes)
    baselines = {"memcpy": reader.memcpy, "socket": reader.blocking}
    names = (*baselines, *(f"{name} in a thread" for name in baselines), "nixl alone", *BACKENDS)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        sources, targets = (rng.sample(range(2 * slots), slots) for _ in range(2))
        reads = [SlotRead(s, 0, t) for s, t in zip(sources, targets, strict=True)]
        seconds = {}
        for name, baseline in baselines.items():
            seconds[name] = timed(partial(baseline, sources, targets))
            started_s = time.perf_counter()
            await asyncio.to_thread(baseline, sources, targets)
            seconds[f"{name} in a thread"] = time.perf_counter() - started_s
        seconds["nixl alone"] = timed(partial(reader.nixl.read, sources, targets))
        await asyncio.sleep(0)
        timer.running = True
        for scheme, peer in reader.peers.items():
            started_s = time.perf_counter()
            await peer.pull(reads, timeout_s=60)
            seconds[scheme] = time.perf_counter() - started_s
        await asyncio.sleep(0)
        timer.running = False
        if number:
            for name, value in seconds.items():
                speeds[name].append(slots * slot_bytes / value / 1e9)
    held = {"reader": timer.held_s, "owner": await stop(owner, reader)}
    print(f"{slots} scattered blocks of {slot_bytes >> 10} KiB, median of {rounds} rounds")
    for name, values in speeds.items():
        print(f"  {name:18} {statistics.median(values):6.2f} GB/s")
    for scheme, base in (("shm", "memcpy"), ("nixl", "memcpy"), ("tcp", "socket")):
        for name in (base, f"{base} in a thread"):
            print_ratio(speeds, scheme, name)
    print_ratio(speeds, "nixl", "nixl alone")
    print_ratio(speeds, "nixl alone", "memcpy")
    print("  held: " + ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in held.items()))


def print_ratio(speeds: Mapping[str, Sequence[float]], name: str, base: str) -> None:
    """Print the median of the ratios of each round."""
    ratios = [a / b for a, b in zip(speeds[name], speeds[base], strict=True)]
    print(f"  {name} / {base}: {statistics.median(ratios):.2f}")


async def table(rounds: int) -> None:
    """Print the milliseconds of pulls of several sizes as a Markdown table."""
    slots = 2 * TABLE_BLOCKS[-1]
    owner, reader, _ = await start(slots, TABLE_BLOCK_BYTES)
    names = " | ".join(f"{name} ms | {name} GB/s" for name in BACKENDS)
    print(f"| blocks of 720 KiB | MiB | {names} |")
    print(f"|{' --- |' * (2 + 2 * len(BACKENDS))}")
    for blocks in TABLE_BLOCKS:
        size = blocks * TABLE_BLOCK_BYTES
        cells = [str(blocks), f"{size / (1 << 20):.1f}"]
        for peer in reader.peers.values():
            seconds = []
            for _ in range(rounds):
                first = random.randrange(slots - blocks)
                reads = [SlotRead(first + n, 0, first + n) for n in range(blocks)]
                started_s = time.perf_counter()
                await peer.pull(reads, timeout_s=60)
                seconds.append(time.perf_counter() - started_s)
            middle = statistics.median(seconds)
            cells += [f"{middle * 1e3:.2f}", f"{size / middle / 1e9:.2f}"]
        print(f"| {' | '.join(cells)} |")
    await stop(owner, reader)


async def merged(rounds: int) -> None:
    """Print the milliseconds of consecutive and of scattered slots."""
    rng = random.Random(3)
    owner, reader, _ = await start(2 * MERGED_SLOTS, MERGED_SLOT_BYTES)
    scattered = [rng.sample(range(2 * MERGED_SLOTS), MERGED_SLOTS) for _ in range(2)]
    orders = {"consecutive": [range(MERGED_SLOTS)] * 2, "scattered": scattered}
    print(f"{MERGED_SLOTS} blocks of {MERGED_SLOT_BYTES >> 10} KiB, median of {rounds} rounds")
    for scheme in ("nixl alone", *reader.peers):
        seconds: dict[str, list[float]] = {name: [] for name in orders}
        for _ in range(rounds + 1):
            for name, (sources, targets) in orders.items():
                reads = [SlotRead(s, 0, t) for s, t in zip(sources, targets, strict=True)]
                started_s = time.perf_counter()
                if scheme in reader.peers:
                    await reader.peers[scheme].pull(reads, timeout_s=60)
                else:
                    reader.nixl.read(sources, targets)
                seconds[name].append(time.perf_counter() - started_s)
        middles = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        text = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in middles.items())
        print(f"  {scheme}: {text}, ratio {middles['scattered'] / middles['consecutive']:.2f}")
    await stop(owner, reader)


async def start(slots: int, slot_bytes: int) -> tuple[subprocess.Popen[str], Reader, LoopTimer]:
    """Start an owner and connect to it."""
    command = [sys.executable, __file__, "--own", str(slots), str(slot_bytes)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    hello = json.loads(await asyncio.to_thread(owner.stdout.readline))
    reader = Reader(slots, slot_bytes)
    await reader.connect(hello)
    return owner, reader, LoopTimer()


async def stop(owner: subprocess.Popen[str], reader: Reader) -> float:
    """Stop both ends. Returns how long the owner's loop was held."""
    await reader.close()
    output, _ = await asyncio.to_thread(owner.communicate)
    return float(json.loads(output))


def timed(work: Callable[[], None]) -> float:
    """Return the seconds of `work`."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def main() -> None:
    """Run the benchmark, or the owner that it starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--slot-kib", type=int, nargs="+", default=[1024, 720])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--merged", action="store_true")
    parser.add_argument("--own", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        asyncio.run(own(*args.own))
    elif args.merged:
        asyncio.run(merged(args.rounds))
    elif args.table:
        asyncio.run(table(args.rounds))
    else:
        for kib in args.slot_kib:
            asyncio.run(measure(args.rounds, args.slots, kib << 10))


if __name__ == "__main__":
    main()
