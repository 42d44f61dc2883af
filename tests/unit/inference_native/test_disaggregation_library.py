"""`PrefillEngine`, `KVCacheTransfer` and `DecodeEngine` over real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support.invariants import check_pool
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, TransferFailed, Unsupported
from dynamo.core.values import SamplingParams
from dynamo.inference import (
    DecodeEngine,
    KVCacheTransfer,
    KvMetadata,
    PrefillEngine,
    PrefillResult,
)
from dynamo.inference.engine import BatchedEngine

PROMPT = list(range(3, 26))  # five blocks of four tokens, and three tokens
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, seed=9, frequency_penalty=0.4)


@pytest.fixture(params=["auto", "shm:", "tcp://127.0.0.1:0"])
async def engines(
    make_engine: Any, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[PrefillEngine, DecodeEngine]]:
    device = {"transfer_plane": request.param, "tp_size": 1}
    async with AsyncExitStack() as stack:
        opened: list[BatchedEngine] = [make_engine(), make_engine()]
        for engine in opened:
            await engine.start()
            stack.push_async_callback(engine.stop)
        prefill, decode = PrefillEngine(opened[0], device), DecodeEngine(opened[1], device)
        await stack.enter_async_context(decode)
        await stack.enter_async_context(prefill)
        yield prefill, decode
        await prefill.release(KvMetadata(token_ids=(), region=prefill.region))
        assert [engine.report_load().active_blocks for engine in opened] == [0, 0]
        for engine in opened:
            check_pool(engine.scheduler.pool)


async def alone(make_engine: Any, make_request: Any, sampling: SamplingParams) -> list[int]:
    """Return the answer of one engine that does both."""
    engine, reply = make_engine(), RecordingReply()
    await engine.start()
    await engine.generate(make_request(PROMPT, 12, sampling=sampling), Context("r"), reply)
    await engine.stop()
    return list(reply.ids)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_the_three_steps_give_the_tokens_of_one_engine(
    engines: tuple[PrefillEngine, DecodeEngine],
    make_engine: Any,
    make_request: Any,
    sampling: SamplingParams,
) -> None:
    prefill, decode = engines
    expected = await alone(make_engine, make_request, sampling)
    result = await prefill.process_prefill_request({"prompt": PROMPT, "sampling_params": sampling})
    assert (result.sequence_length, len(result.kv_blocks)) == (23, 6)
    assert prefill.engine.report_load().active_blocks == 6
    as_json = msgspec.json.encode(result.transfer_metadata)  # as between processes
    metadata = msgspec.json.decode(as_json, type=KvMetadata)

    moved = await KVCacheTransfer({}).transfer_kv_cache(metadata, decode)
    await prefill.release(metadata)
    assert len(moved.target_metadata.blocks) == 5
    assert moved.transfer_time > 0
    assert prefill.engine.report_load().active_blocks == 0

    request = SimpleNamespace(last_token=metadata.first_token, max_new_tokens=11, stop_tokens=[])
    answer = await decode.process_decode_request(request, moved.target_metadata)
    assert [metadata.first_token, *answer.generated_tokens] == expected
    assert answer.cached_tokens == 20
    assert len(answer.updated_kv_cache.blocks) == (23 + 11) // 4


async def test_an_answer_ends_with_its_stop_token(
    engines: tuple[PrefillEngine, DecodeEngine], make_engine: Any, make_request: Any
) -> None:
    prefill, decode = engines
    expected = await alone(make_engine, make_request, GREEDY)
    result = await prefill.process_prefill_request({"prompt": PROMPT, "sampling_params": GREEDY})
    await KVCacheTransfer().transfer_kv_cache(result.transfer_metadata, decode)
    await prefill.release(result.transfer_metadata)
    request = {"stop_tokens": [expected[4]], "max_new_tokens": 11}
    answer = await decode.process_decode_request(request, result.transfer_metadata)

    end = expected.index(expected[4])
    assert answer.generated_tokens == expected[1 : max(end, 1) + 1]


async def test_blocks_that_are_not_held_any_more_are_refused(
    engines: tuple[PrefillEngine, DecodeEngine],
) -> None:
    prefill, decode = engines
    result = await prefill.process_prefill_request({"prompt": PROMPT})
    await prefill.release(result.transfer_metadata)
    prefill.engine.clear_prefix_cache()
    await take_all_blocks(prefill)

    with pytest.raises(TransferFailed):
        await KVCacheTransfer().transfer_kv_cache(result.transfer_metadata, decode)
    assert decode.engine.scheduler.pool.cached == 0


async def take_all_blocks(prefill: PrefillEngine) -> PrefillResult:
    """Give the blocks to another prompt."""
    result = await prefill.process_prefill_request({"input_ids": list(range(50, 250))})
    await prefill.release(result.transfer_metadata)
    return result


async def test_a_model_is_opened_by_its_path(tiny_model: Path) -> None:
    config = {"path": str(tiny_model), "kind": "mock", "num_blocks": 64, "speedup_ratio": 1000.0}
    async with PrefillEngine(config) as prefill, DecodeEngine(config) as decode:
        result = await prefill.process_prefill_request({"prompt": "hello there " * 20})
        moved = await KVCacheTransfer().transfer_kv_cache(result.transfer_metadata, decode)
        answer = await decode.process_decode_request({"max_new_tokens": 5}, moved.target_metadata)

        assert result.sequence_length == len(result.transfer_metadata.token_ids) > 16
        assert len(answer.generated_tokens) == 5
        assert answer.cached_tokens >= 16


async def test_what_cannot_work_is_refused(make_engine: Any) -> None:
    with pytest.raises(Unsupported, match="tp_size 4"):
        PrefillEngine("model", {"tp_size": 4})
    engine = make_engine()
    await engine.start()
    async with PrefillEngine(engine) as prefill:
        with pytest.raises(ConfigError, match="without a tokenizer"):
            await prefill.process_prefill_request({"prompt": "a text"})
    await engine.stop()
    await asyncio.sleep(0)
