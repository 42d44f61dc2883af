"""A worker that is started again announces its disk before its first request."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.unit.inference.conftest import RecordingReply

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.hashing import block_hashes
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import GenerateRequest, Load, SamplingParams, StopConditions
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.mock.engine import make_mock_engine
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.workers.load_view import LoadView

PROMPTS = [pack_ids(range(first, first + 330)) for first in (100, 430, 100, 430, 100, 430)]
HASHES = block_hashes(PROMPTS[0], 16)
PLANES = RuntimeSettings(discovery="memory:", requests="memory:", events="memory:", namespace="ns")


def open_engine(folder: Path) -> BatchedEngine:
    settings = EngineSettings(kind="mock", block_size=16, num_blocks=26, speedup_ratio=1e6)
    cache = CacheSettings(ssd_size=1 << 30, ssd_path=str(folder))
    ids = range(100, 900)
    return make_mock_engine(
        settings, ids, SystemClock(), context_tokens=400, vocab_size=1000, layout="x", cache=cache
    )


async def fill_disk(folder: Path) -> None:
    engine = open_engine(folder)
    await engine.start()
    for prompt in PROMPTS:
        request = GenerateRequest("r", "m", prompt, SamplingParams(), StopConditions(max_tokens=2))
        await engine.generate(request, Context("r"), RecordingReply())
        while engine.tiers.storing:
            await asyncio.sleep(0.001)
    await engine.stop()


async def test_a_restarted_worker_announces_its_disk_at_once(tmp_path: Path) -> None:
    await fill_disk(tmp_path / "kv")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(b"{}")
    file = FileRef("tokenizer.json", "0" * 64, 2, str(tokenizer))
    card = ModelCard(names=("m",), context_tokens=400, vocab_size=1000, tokenizer=file)
    async with await DistributedRuntime.create(Settings(runtime=PLANES), role="worker") as runtime:
        view, loads = CacheView(runtime.clock), LoadView(runtime.clock)
        await view.subscribe(runtime.events, "ns.worker.kv_events")
        await loads.subscribe(runtime.events, "ns.worker")
        worker = EngineWorker(open_engine(tmp_path / "kv"), card)
        await worker.attach(runtime)
        name = runtime.instance_id
        async with asyncio.timeout(10):
            while name not in view.find_runs(HASHES, {}) or name not in loads.loads:
                await asyncio.sleep(0.01)
        (run,) = view.find_runs(HASHES, {})[name]
        assert run.tier == "disk"
        load: Load = loads.loads[name]
        assert [tier.name for tier in load.tiers] == ["disk"]
        assert load.tiers[0].block_s > 0
        await worker.close()
        view.close()
        loads.close()
