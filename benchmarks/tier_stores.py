#!/usr/bin/env python3
"""Store and load rates of the KV tiers on disk and in a local S3 server, beside memcpy.

    benchmarks/tier_stores.py [--blocks 96] [--block-kib 720] [--rounds 5] [--path FOLDER] [--metadata]

Each round stores the blocks of a new prompt and loads them into other slots. Reads bypass the page
cache, or find it dropped. GB/s are medians over the rounds; `codec` is the encoding of the tier.
The last lines are the start of a disk tier with 100,000 blocks and its memory per block. `--metadata`
measures the Python memory of 100,000 blocks in each tier instead, and exits with 1 above 250 bytes a block.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.servers import S3Process

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.clock import SystemClock
from dynamo.inference.model_runner import BlockShape
from dynamo.inference.tiers.block_table import BlockTable, RunTable
from dynamo.inference.tiers.codecs import BlockCodec, open_codec
from dynamo.inference.tiers.disk import DiskTier
from dynamo.inference.tiers.remote import RemoteTier
from dynamo.inference.tiers.resident_blocks import ResidentBlocks
from dynamo.inference.tiers.tier import KvTier, TierBlock

SHAPE = BlockShape(tokens=16, channels=64)
INDEX_BLOCKS = 100_000
RUN_BLOCKS = 4
MAX_METADATA_BYTES = 250


class Prompts:
    """A region with room for the blocks of a prompt twice, filled with numbers like those of KV."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.blocks = blocks
        self.region = MemoryRegion.allocate(2 * blocks, block_bytes)
        numbers = np.frombuffer(self.region.memory, np.float32)[: blocks * block_bytes // 4]
        numbers[:] = np.random.default_rng(0).standard_normal(len(numbers), np.float32)
        self.region.slot(2 * blocks - 1)[:] = bytes(block_bytes)

    def make(self, name: int, first_slot: int) -> list[TierBlock]:
        """Return the blocks of a prompt in slots from `first_slot` on."""
        start = name << 32 | 1
        return [
            TierBlock(start + index, start + index - 1, first_slot + index)
            for index in range(self.blocks)
        ]


async def measure(
    prompts: Prompts, rounds: int, open_tier: Callable[[BlockCodec], Awaitable[KvTier]], codec: str
) -> str:
    """Store and load a prompt several times. Returns the rates."""
    size = prompts.region.slot_bytes
    tier = await open_tier(open_codec(codec, size, SHAPE))
    stores, loads = [], []
    for name in range(1, rounds + 1):
        started_s = time.perf_counter()
        stored = await tier.store(prompts.make(name, 0))
        stores.append(time.perf_counter() - started_s)
        assert stored == prompts.blocks, tier.problem
        started_s = time.perf_counter()
        await tier.load(prompts.make(name, prompts.blocks), lambda _: None)
        loads.append(time.perf_counter() - started_s)
    await tier.close()
    total = prompts.blocks * size / 1e9
    store_s, load_s = statistics.median(stores), statistics.median(loads)
    return (
        f"{tier.name:7}{codec:6} store {total / store_s:5.2f} GB/s, load {total / load_s:5.2f} GB/s, "
        f"{1e3 * load_s:6.1f} ms for {prompts.blocks} blocks"
    )


def measure_memcpy(prompts: Prompts, rounds: int) -> str:
    """Copy the prompt within memory, as a measure of the machine."""
    half = prompts.blocks * prompts.region.slot_bytes
    memory = np.frombuffer(prompts.region.memory, np.uint8)
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        memory[half:] = memory[:half]
        times.append(time.perf_counter() - started_s)
    return f"memcpy {half / 1e9 / statistics.median(times):.2f} GB/s"


async def measure_start(folder: str) -> str:
    """Open a disk tier with a large index. Returns the seconds and the bytes per block."""
    region = MemoryRegion.allocate(1, 64)
    clock, capacity = SystemClock(), INDEX_BLOCKS * 8192

    async def open_tier() -> DiskTier:
        return await DiskTier.open(folder, region, capacity, "start", clock)

    tier = await open_tier()
    tier._part.index.append([(slot, slot + 1, slot, slot) for slot in range(INDEX_BLOCKS)])  # noqa: SLF001
    await tier.close()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    tier = await open_tier()
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    assert tier.blocks == INDEX_BLOCKS
    await tier.close()
    tracemalloc.start()
    tier = await open_tier()
    gc.collect()
    memory = tracemalloc.get_traced_memory()[0] / INDEX_BLOCKS
    await tier.close()
    return f"start with {INDEX_BLOCKS} blocks: {wall_s:.2f} s, {cpu_s:.2f} s of CPU; {memory:.0f} bytes a block"


def measure_metadata() -> int:
    """Print the bytes of metadata of a block in each tier. Returns the exit code."""

    def fill_resident() -> object:
        resident = ResidentBlocks(
            "host", INDEX_BLOCKS, memoryview(bytearray(8 * INDEX_BLOCKS)).cast("Q")
        )
        for at, block in zip(resident.reserve(INDEX_BLOCKS), make_blocks(), strict=True):
            resident.add(block, at)
        return resident

    def fill_table() -> object:
        table = BlockTable()
        for slot, block in enumerate(make_blocks()):
            table.insert(slot, block.block_hash, block.parent_hash, slot)
        return table

    def fill_runs() -> object:
        table, hashes = RunTable(), [block.block_hash for block in make_blocks()]
        for start in range(0, INDEX_BLOCKS, RUN_BLOCKS):
            table.add(hashes[start - 1], hashes[start : start + RUN_BLOCKS])
        return table

    total = 0.0
    for name, fill in {"host": fill_resident, "disk": fill_table, "shared": fill_runs}.items():
        gc.collect()
        tracemalloc.start()
        filled = fill()
        gc.collect()
        size = tracemalloc.get_traced_memory()[0] / INDEX_BLOCKS
        tracemalloc.stop()
        del filled
        total += size
        print(f"{name:7}{size:6.0f} bytes of metadata a block")
    print(f"all    {total:6.0f} bytes (at most {MAX_METADATA_BYTES})")
    return int(total > MAX_METADATA_BYTES)


def make_blocks() -> Iterator[TierBlock]:
    """Yield the blocks of a chain with random hashes."""
    rng, parent = random.Random(1), 0
    for _ in range(INDEX_BLOCKS):
        block_hash = rng.getrandbits(64)
        yield TierBlock(block_hash, parent, 0, tokens=block_hash.to_bytes(16))
        parent = block_hash


async def main() -> int:
    """Measure all and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--block-kib", type=int, default=720)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", default=None, help="folder on the disk to measure")
    parser.add_argument("--metadata", action="store_true", help="memory of the tiers' indexes only")
    args = parser.parse_args()
    if args.metadata:
        return measure_metadata()
    prompts, clock = Prompts(args.blocks, args.block_kib << 10), SystemClock()
    print(measure_memcpy(prompts, args.rounds))
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        size = 4 * args.blocks * (prompts.region.slot_bytes + 4096)
        for codec in ("none", "zstd", "int8"):

            async def open_disk(block_codec: BlockCodec) -> KvTier:
                region = prompts.region
                return await DiskTier.open(folder, region, size, "bench", clock, block_codec)

            print(await measure(prompts, args.rounds, open_disk, codec))
        print(await measure_start(folder))
    with S3Process() as server:
        os.environ |= server.environ
        for codec in ("none", "zstd", "int8"):

            async def open_remote(block_codec: BlockCodec) -> KvTier:
                url = f"s3://{server.bucket}/bench"
                return await RemoteTier.open(url, prompts.region, "bench", clock, block_codec)

            print(await measure(prompts, args.rounds, open_remote, codec))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
