"""A native engine that sleeps: its memory is given back, its answers stay the same."""

from __future__ import annotations

import asyncio
import shutil
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.shared_memory import MemoryUsers
from tests.support.token_time import KnownTokenTime
from tests.unit.inference_native.test_native_runner import PROMPTS, generate_all
from tests.unit.inference_native.test_native_tiers import BLOCK_BYTES, answer, check_idle
from tests.unit.inference_native.test_native_tiers import PROMPTS as TIER_PROMPTS

from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.values import BlocksCleared, BlocksStored
from dynamo.inference.data_parallel import DataParallelEngine
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native import shared_weights
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.native.shared_weights import SharedWeights
from dynamo.models.checkpoint.weights import open_weights
from dynamo.runtime.shared_memory import SUPPORTED

SETTINGS = EngineSettings(threads=2, num_blocks=64, block_size=4)
COUNT = 6


@pytest.fixture
async def users() -> AsyncIterator[MemoryUsers]:
    memory_users = MemoryUsers(keep_s=0.0)
    yield memory_users
    memory_users.close()


def open_runner(folder: Path, shared: SharedWeights | None = None) -> NativeRunner:
    return NativeRunner(lambda: open_weights(folder), SETTINGS, shared_weights=shared)


async def answers(engine: Any, make_request: Any) -> list[list[int]]:
    requests = [make_request(prompt, COUNT) for prompt in PROMPTS]
    return [reply.ids for reply in await generate_all(engine, requests)]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["private", "shared", "data parallel"])
async def test_answers_after_sleep_are_those_before(
    tiny_llama: Path, users: MemoryUsers, make_request: Any, kind: str, level: int
) -> None:
    shared = SharedWeights(users.start(), tiny_llama) if kind == "shared" and SUPPORTED else None
    runners = [open_runner(tiny_llama, shared) for _ in range(1 + (kind == "data parallel"))]
    ranks = [BatchedEngine(runner) for runner in runners]
    engine = ranks[0] if len(ranks) == 1 else DataParallelEngine(ranks)
    await engine.start()
    before = await answers(engine, make_request)
    assert engine.sleep_refusal(level) == ""
    for _ in range(2):
        models = [weakref.ref(runner._model) for runner in runners]
        await engine.sleep(level)
        for runner in runners:
            assert hasattr(runner, "_model") == (level == 1)
            assert (models[0]() is None) == (level == 2)
            assert not runner._kv_storage.blocks.any()
            assert not runner._kv_storage.areas.any()
        await engine.wake_up()
        assert await answers(engine, make_request) == before
    await engine.stop()


async def test_a_peer_s_read_of_a_block_fails_once_the_worker_sleeps(
    tiny_llama: Path, make_request: Any
) -> None:
    runner = open_runner(tiny_llama)
    engine = BatchedEngine(runner)
    await engine.start()
    await answers(engine, make_request)
    assert runner.region is not None
    generations = list(runner.region.generations)
    await engine.sleep(1)
    assert all(new > old for new, old in zip(runner.region.generations, generations, strict=True))
    await engine.stop()


@pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
async def test_shared_weights_are_given_back_when_all_sleep_without_them(
    tiny_llama: Path, users: MemoryUsers, make_request: Any
) -> None:
    shared = [SharedWeights(users.start(), tiny_llama) for _ in range(2)]
    engines = [BatchedEngine(open_runner(tiny_llama, each)) for each in shared]
    for engine in engines:
        await engine.start()
    mappings = [weakref.ref(each._mapped) for each in shared if each._mapped is not None]
    before = await answers(engines[0], make_request)
    await engines[0].sleep(2)
    assert await answers(engines[1], make_request) == before
    await engines[1].sleep(1)  # its weights stay
    assert users.broker.size_bytes
    await engines[1].wake_up()
    users.changed.clear()
    await engines[1].sleep(2)
    await users.changed.wait()
    assert users.broker.size_bytes == 0
    for thread in threading.enumerate():
        if thread.name == "huge-pages":
            thread.join()
    assert [mapping() for mapping in mappings] == [None, None]
    for engine in engines:
        await engine.wake_up()
        assert await answers(engine, make_request) == before
        await engine.stop()


async def test_weights_that_have_changed_meanwhile_are_not_served(
    tiny_llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    engine = BatchedEngine(open_runner(folder))
    await engine.start()
    await engine.sleep(2)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(np.full(1024, 0.5, np.float32).tobytes())
    with pytest.raises(ModelUnavailable, match="have changed"):
        await engine.wake_up()
    await engine.stop()


async def test_blocks_on_disk_stay_and_are_announced_again(
    make_engine: Any, make_request: Any, tmp_path: Path
) -> None:
    """The engine falls asleep while blocks are on their way down."""
    cache = CacheSettings(
        cpu_size=200 * BLOCK_BYTES, ssd_size=400 * BLOCK_BYTES, ssd_path=str(tmp_path)
    )
    requests = [make_request(prompt, 10) for prompt in TIER_PROMPTS]
    alone = make_engine()
    await alone.start()
    expected = [await answer(alone, request) for request in requests]
    await alone.stop()

    engine = make_engine(cache, num_blocks=24)
    await engine.start()
    engine.timing_learner = KnownTokenTime(1.0)
    for _ in range(3):
        ids = [reply.ids for reply in await generate_all(engine, requests)]
        assert ids == expected
        events: list[Any] = []
        engine.on_kv_events(events.extend)
        await engine.sleep(1)
        assert isinstance(events[0], BlocksCleared)
        assert {tier.name: bool(tier.blocks) for tier in engine.tiers.tiers}["host"] is False
        events.clear()
        await engine.wake_up()
        assert {event.tier for event in events if isinstance(event, BlocksStored)} <= {"disk"}
    assert engine.tiers.tiers[-1].counters.loaded_blocks > 0
    check_idle(engine)
    await engine.stop()


@pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
async def test_nothing_asks_for_huge_pages_while_the_worker_sleeps(
    tiny_llama: Path, users: MemoryUsers, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedWeights(users.start(), tiny_llama)
    engine = BatchedEngine(open_runner(tiny_llama, shared))
    await engine.start()
    monkeypatch.setattr(shared_weights, "HUGE_PAGE_BYTES", 4096)
    page_requests = threading.Semaphore(0)
    leaves = threading.Event()
    count = 0

    def advise(address: int, size: int, advice: int) -> None:
        nonlocal count
        if advice == shared_weights.MADV_COLLAPSE:
            count += 1
            page_requests.release()
            leaves.wait()

    monkeypatch.setattr(shared_weights, "_madvise", advise)
    for pieces in (1, 2):  # the pages are asked for again after sleep
        await answers(engine, make_request)
        await answers(engine, make_request)  # its first step releases the sequences before
        await asyncio.to_thread(page_requests.acquire)
        threads = [each for each in threading.enumerate() if each.name == "huge-pages"]
        await engine.sleep(1)
        leaves.set()
        for thread in threads:
            thread.join()
        leaves.clear()
        assert count == pieces
        await engine.wake_up()
    leaves.set()
    await engine.stop()
