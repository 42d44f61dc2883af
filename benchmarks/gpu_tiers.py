"""The steps of gpu.py with copies of KV blocks: their bytes, their speed, and decode beside them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from gpu_setup import BLOCK_TOKENS, Bench


def check_copies(bench: Bench) -> None:
    """Move blocks to the host, within the region, and back, beside work of the card."""
    from dynamo.inference.torch.device_region import DeviceRegion

    torch, stop = bench.torch, threading.Event()
    shape = (64, bench.size(1 << 21, 1 << 12))
    blocks = torch.randint(0, 255, shape, dtype=torch.uint8, device=bench.device)
    expected, region = blocks.cpu(), DeviceRegion.over(blocks, 64)
    slots = torch.randperm(64).tolist()
    host = [64 + slot for slot in reversed(range(64))]
    region.copy(slots, host, stop)
    matrix = torch.ones(bench.size(4096, 64), bench.size(4096, 64), device=bench.device)
    for slot in range(64):
        matrix @ matrix  # the next write comes late
        blocks[slot].zero_()
        region.generations[slot] += 1
    with region.writing(slots[:4]) as views:
        for view, slot in zip(views, slots, strict=False):
            view[:] = bytes(expected[slot].numpy())
    region.copy(host[4:], slots[4:], stop)
    with region.reading(range(64)) as views:
        for view, row in zip(views, expected, strict=True):
            assert bytes(view) == bytes(row.numpy()), "a block came back with other bytes"
    region.close()


async def measure_tiers(bench: Bench, plain: Any) -> None:
    """Measure loads from host memory, and decode while blocks go there."""
    from native_engine import answer, decode, rng

    from dynamo.core.settings.schema_cache import CacheSettings

    cache = CacheSettings(cpu_size=bench.size(8 << 30, 1 << 24), offload_policy="lru")
    prompt, batch, tokens = bench.size(4096, 200), bench.size(16, 2), bench.size(128, 8)
    blocks = max(prompt * 3 // 2, batch * (256 + tokens)) // BLOCK_TOKENS + 8
    tiered = await bench.engine(bench.model("qwen"), cache, num_blocks=blocks)
    rates: dict[Any, list[float]] = {plain: [], tiered: []}
    for _ in range(bench.size(3, 1)):
        for engine, measured in rates.items():
            measured.append(await decode(engine, batch, bench.size(256, 32), tokens))
    ratio = max(rates[tiered]) / max(rates[plain])
    bench.figure("decode with a host tier, of that without", ratio, "share", least=0.97)
    (tier,) = tiered.tiers.tiers
    state = rng.bit_generator.state
    for _ in range(blocks * BLOCK_TOKENS // prompt + 2):  # the last ones evict the first
        await answer(tiered, prompt, 1)
        stored = -1
        while stored != tier.counters.stored_blocks:
            stored = tier.counters.stored_blocks
            await asyncio.sleep(0.1)
    rng.bit_generator.state = state
    before, load_s = tier.counters.loaded_blocks, tier.counters.load_s
    await answer(tiered, prompt, 1)
    loaded, load_s = tier.counters.loaded_blocks - before, tier.counters.load_s - load_s
    assert loaded, f"nothing came from the tier, which has {stored} blocks"
    speed = loaded * tiered.runner.region.slot_bytes / load_s / 1e9
    bench.figure("loads from host memory", speed, "GB/s", least=0.8 * bench.speeds["to the card"])
    await measure_stores(bench, tiered, batch, tokens)
    await tiered.stop()


async def measure_stores(bench: Bench, engine: Any, batch: int, tokens: int) -> None:
    """Measure copies of blocks to host memory, and decode while they follow each other. The
    content of the tier is lost."""
    from native_engine import decode

    from dynamo.core.clock import SystemClock
    from dynamo.inference.tiers.copies import RegionCopies

    region, blocks = engine.runner.region, engine.scheduler.pool.num_blocks
    copies, copied = RegionCopies(region, blocks, SystemClock()), 0
    pairs = [(slot, slot) for slot in range(blocks)]

    async def store() -> None:
        nonlocal copied
        while True:
            await copies.store(pairs)
            copied += len(pairs)

    alone = beside = speed = 0.0
    for _ in range(bench.size(3, 1)):
        alone = max(alone, await decode(engine, batch, bench.size(256, 32), tokens))
        stores, began, copied = asyncio.ensure_future(store()), time.perf_counter(), 0
        beside = max(beside, await decode(engine, batch, bench.size(256, 32), tokens))
        speed = copied * region.slot_bytes / (time.perf_counter() - began) / 1e9
        stores.cancel()
        await asyncio.wait([stores])
    copies.close()
    least = 0.8 * bench.speeds["from the card"]
    bench.figure("stores to host memory beside decode", speed, "GB/s", least=least)
    bench.figure("decode beside them, of that without", beside / alone, "share", least=0.97)
