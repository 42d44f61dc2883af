"""Engines with tiers under random prompts, cancellations, clears and failures of the disk."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.invariants import check_pool, check_slots
from tests.support.token_time import KnownTokenTime
from tests.unit.inference.conftest import RecordingReply
from tests.unit.inference_tiers.blocks import ManualClock

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import (
    BlocksStored,
    GenerateRequest,
    KvEvent,
    SamplingParams,
    StopConditions,
)
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.memory.tier_control import PinRequest, pin_prompt, unpin
from dynamo.inference.mock.engine import KV_BYTES_PER_TOKEN, make_mock_engine
from dynamo.inference.tiers.disk import RETRY_S, DiskTier
from dynamo.inference.tiers.disk_part import DiskPart
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.opening import tier_opener

NO_CACHE = CacheSettings()
BLOCK_TOKENS = 4
BLOCK_BYTES = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
DEVICE_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 24, 30, 40
ENGINE = EngineSettings(
    kind="mock",
    block_size=BLOCK_TOKENS,
    num_blocks=DEVICE_BLOCKS,
    max_num_seqs=3,
    speedup_ratio=1e6,
)
Prompt = tuple[int, int, int]

prompts = st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(1, 20))
operations = st.one_of(
    st.tuples(st.just("answer"), st.lists(prompts, min_size=1, max_size=5)),
    st.tuples(st.just("cancel"), st.lists(prompts, min_size=1, max_size=4), st.integers(0, 6)),
    st.tuples(st.just("clear"), st.sampled_from(["host", "disk", "all"])),
    st.tuples(st.just("fail"), st.sampled_from(["read", "write", "corrupt"])),
    st.tuples(st.just("mend")),
    st.tuples(st.just("pin"), st.sampled_from(["host", "disk"]), prompts),
    st.tuples(st.just("unpin")),
)


def make_request(prompt: Prompt) -> GenerateRequest:
    """Return a request: prompts with the same first number begin alike."""
    start, length, max_tokens = prompt
    ids = pack_ids([100 + (start * 300 + index) % 800 for index in range(length)])
    stops = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest("r", "m", ids, SamplingParams(), stops)


async def answer(engine: BatchedEngine, prompt: Prompt) -> list[int]:
    reply = RecordingReply()
    await engine.generate(make_request(prompt), Context("r"), reply)
    return reply.ids


class Tiered:
    """An engine with host memory and a disk that fails on demand, beside one without tiers."""

    def __init__(self, folder: str, patch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.failing = ""
        self.held: set[tuple[str, int]] = set()
        cache = CacheSettings(
            cpu_size=HOST_BLOCKS * BLOCK_BYTES,
            ssd_size=DISK_BLOCKS * BLOCK_BYTES,
            ssd_path=folder,
            offload_policy="lru",
        )
        self.alone = self.make(NO_CACHE)
        self.engine = self.make(cache)
        self.engine._open_tiers = tier_opener(cache, ENGINE, self.clock, BLOCK_BYTES)
        self.patch_disk(patch)

    def make(self, cache: CacheSettings) -> BatchedEngine:
        return make_mock_engine(
            ENGINE,
            range(100, 900),
            SystemClock(),
            context_tokens=DEVICE_BLOCKS * BLOCK_TOKENS,
            vocab_size=1000,
            layout="x",
            cache=cache,
        )

    def patch_disk(self, patch: pytest.MonkeyPatch) -> None:
        read, write = DiskPart.read_block, DiskPart.write_block

        def read_block(part: DiskPart, slot: int, block: Any) -> None:
            if self.failing == "read":
                raise OSError(errno.EIO, "bad sector")
            if self.failing == "corrupt":
                part.file.write(slot, b"?" * 64, memoryview(part.file.buffer())[4096:])
            read(part, slot, block)

        def write_block(part: DiskPart, slot: int, generation: int, block: Any) -> bool:
            if self.failing == "write":
                raise OSError(errno.ENOSPC, "disk full")
            return write(part, slot, generation, block)

        patch.setattr(DiskPart, "read_block", read_block)
        patch.setattr(DiskPart, "write_block", write_block)

    async def start(self) -> None:
        await self.alone.start()
        await self.engine.start()
        self.engine.on_kv_events(self.apply)
        self.engine.timing_learner = KnownTokenTime(1.0)  # so that every load is worth it

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self.held.update((event.tier, block) for block in event.hashes)
            elif hasattr(event, "hashes"):
                self.held.difference_update((event.tier, block) for block in event.hashes)
            else:
                self.held.clear()

    async def answer(self, wanted: list[Prompt]) -> None:
        expected = [await answer(self.alone, prompt) for prompt in wanted]
        pinned = self.pinned()
        assert await run_all(*(answer(self.engine, prompt) for prompt in wanted)) == expected
        self.engine.publish_kv_events()
        assert self.failing or pinned <= self.held, "a pinned block was evicted"

    def pinned(self) -> set[tuple[str, int]]:
        """The pinned blocks that are in their tier."""
        pins = {tier.name: tier.pins or () for tier in self.engine.tiers.tiers}
        return {(name, block) for name, block in self.held if block in pins.get(name, ())}

    async def pin(self, name: str, prompt: Prompt) -> None:
        with suppress(DynamoError):  # too short, or too many blocks are pinned
            request = make_request(prompt)
            pin_prompt(self.engine, PinRequest(name, request.token_ids, ttl_s=1e9))

    async def unpin(self) -> None:
        unpin([self.engine], "all")

    async def cancel(self, wanted: list[Prompt], turns: int) -> None:
        tasks = BackgroundTasks()
        for prompt in wanted:
            tasks.start(answer(self.engine, prompt))
        for _ in range(turns):
            await asyncio.sleep(0)
        await tasks.close()

    async def clear(self, tier: str) -> None:
        if tier == "all":
            self.engine.clear_prefix_cache()
        else:
            self.engine.tiers.clear(tier)

    async def fail(self, how: str) -> None:
        self.failing = how

    async def mend(self) -> None:
        self.failing = ""
        self.clock.time_s += 2 * RETRY_S

    async def settle(self) -> None:
        tiers = self.engine.tiers
        assert tiers is not None
        prefetcher = tiers._prefetcher
        assert prefetcher is not None
        async with asyncio.timeout(20):
            while tiers.storing or prefetcher._current or self.engine.report_load().arriving:
                await asyncio.sleep(0.001)
        for _ in range(5):
            await asyncio.sleep(0)
        self.engine.publish_kv_events()

    def check(self) -> None:
        engine = self.engine
        load = engine.report_load()
        assert (load.running, load.waiting, load.arriving, load.active_blocks) == (0, 0, 0, 0)
        check_pool(engine.scheduler.pool)
        host, disk = engine.tiers.tiers
        assert isinstance(host, MemoryTier)
        assert isinstance(disk, DiskTier)
        check_slots(host.slots)
        assert host.blocks <= HOST_BLOCKS
        assert disk.blocks <= disk.capacity_blocks == DISK_BLOCKS
        check_slots(disk.slots)
        for tier in (host, disk):
            known = {block for name, block in self.held if name == tier.name}
            assert known == {block for _, block in tier.held_blocks()}

    async def stop(self) -> None:
        await self.engine.stop()
        await self.alone.stop()


@settings(max_examples=30, deadline=None)
@given(st.lists(operations, min_size=2, max_size=12))
def test_answers_and_blocks_are_right_whatever_happens(steps: list[tuple[Any, ...]]) -> None:
    async def run(folder: str, patch: pytest.MonkeyPatch) -> None:
        tiered = Tiered(folder, patch)
        await tiered.start()
        for name, *arguments in steps:
            await getattr(tiered, name)(*arguments)
            await tiered.settle()
            tiered.check()
        await tiered.stop()

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        asyncio.run(run(folder, patch))


@pytest.mark.parametrize("name", ["host", "disk"])
def test_pinned_blocks_outlive_all_others(name: str) -> None:
    async def run(folder: str, patch: pytest.MonkeyPatch) -> None:
        tiered = Tiered(folder, patch)
        await tiered.start()

        async def fill() -> None:
            for start in range(1, 8):
                await tiered.answer([(start, 48, 1)])
                await tiered.settle()
                tiered.check()

        await tiered.answer([(0, 41, 1)])
        await tiered.pin(name, (0, 41, 1))
        await tiered.settle()
        pinned = tiered.pinned()
        assert len(pinned) == 10
        await fill()
        assert pinned <= tiered.held
        await tiered.answer([(0, 41, 1)])
        await tiered.unpin()
        await fill()
        assert not pinned & tiered.held
        await tiered.stop()

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        asyncio.run(run(folder, patch))
