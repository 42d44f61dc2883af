"""Disk and object store below a native engine with few blocks: the same tokens, also after a
restart of the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.servers import S3Process
from tests.support.token_time import KnownTokenTime
from tests.unit.inference_native.test_native_tiers import answer, check_idle

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.values import BlocksStored, SamplingParams
from dynamo.inference.engine import BatchedEngine

rng = np.random.default_rng(8)
PREFIXES = [rng.integers(0, 320, 60).tolist() for _ in range(3)]
PROMPTS = [prefix + rng.integers(0, 320, 5).tolist() for _ in range(2) for prefix in PREFIXES]
PREFIX_BLOCKS = 15
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(params=["disk", "shared", "host and disk"])
def cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CacheSettings:
    """Settings with one or two tiers."""
    if request.param == "shared":
        server: S3Process = request.getfixturevalue("s3_server")
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        return CacheSettings(remote_url=f"s3://{server.bucket}/{tmp_path.name}")
    host_size = 200 * 2048 if request.param == "host and disk" else 0
    return CacheSettings(ssd_size=1 << 20, ssd_path=str(tmp_path / "kv"), cpu_size=host_size)


async def start(make_engine: Any, cache: CacheSettings, num_blocks: int) -> BatchedEngine:
    engine: BatchedEngine = make_engine(cache, num_blocks=num_blocks)
    await engine.start()
    engine.timing_learner = KnownTokenTime(1.0)  # so that every load is worth it
    return engine


async def stored_hashes(engine: BatchedEngine) -> set[int]:
    """Return the blocks in the last tier, when what it knows is complete."""
    tier = engine.tiers.tiers[-1]
    if tier.name == "shared":
        await tier._refresh()  # type: ignore[attr-defined]
    events = tier.snapshot_events()
    return {value for event in events if isinstance(event, BlocksStored) for value in event.hashes}


@pytest.mark.timeout(90)
async def test_answers_are_the_same_before_and_after_a_restart(
    make_engine: Any, make_request: Any, cache: CacheSettings
) -> None:
    requests = [make_request(prompt, 8, sampling=GREEDY) for prompt in PROMPTS]
    alone = make_engine()
    await alone.start()
    expected = [await answer(alone, request) for request in requests]
    await alone.stop()

    engine = await start(make_engine, cache, num_blocks=60)
    for _ in range(3):
        assert [await answer(engine, request) for request in requests] == expected
    stored = await stored_hashes(engine)
    assert len(stored) >= PREFIX_BLOCKS, "blocks that were used twice went down"
    check_idle(engine)
    await engine.stop()

    engine = await start(make_engine, cache, num_blocks=60)
    assert await stored_hashes(engine) == stored
    for number in (0, 1):
        assert [await answer(engine, request) for request in requests] == expected, number
    await asyncio.sleep(0.05)
    assert engine.tiers.tiers[-1].counters.loaded_blocks >= PREFIX_BLOCKS
    check_idle(engine)
    await engine.stop()


async def test_stores_that_cannot_work_are_errors_at_start(
    make_engine: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for cache, message in (
        (CacheSettings(ssd_size=1 << 20, ssd_path=str(tmp_path / "file")), "cannot be stored"),
        (CacheSettings(ssd_size=1 << 50, ssd_path=str(tmp_path)), "has room for"),
        (CacheSettings(ssd_size=10, ssd_path=str(tmp_path)), "one KV block takes"),
        (CacheSettings(remote_url="http://host"), "is not an object store"),
    ):
        engine = make_engine(cache)
        with pytest.raises(ConfigError, match=message):
            await engine.start()
        await engine.stop()
