"""Two vLLM engines with NixlConnector: one computes prompts, the other one loads their KV."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace
from tests.engines.test_vllm_cache_view import write_random_llama
from tests.engines.test_vllm_engine import make_engine, owned_processes

from dynamo.core.codec import pack_ids
from dynamo.core.errors import InvalidRequest, Overloaded
from dynamo.core.values import GenerateRequest
from dynamo.inference.vllm.engine import VllmEngine
from dynamo.inference.vllm.kv_connector import (
    LEASE_S,
    VllmKvConnector,
    decode_params,
    encode_params,
)
from dynamo_conformance.engines import (
    ENGINE_CONTEXT,
    OrderCheckingReply,
    generate_reply,
    make_request,
    settle,
)

PROMPTS = 20
TOKENS = 12
Answer = tuple[list[int], Any]
FEW_BLOCKS = {"num_gpu_blocks_override": 20, "max_model_len": 512}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("models") / "random")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefill(random_model: Path) -> AsyncIterator[VllmEngine]:
    engine = await make_engine(random_model, FEW_BLOCKS, role="prefill")
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decode(random_model: Path, prefill: VllmEngine) -> AsyncIterator[VllmEngine]:
    engine = await make_engine(random_model, role="decode")
    await engine.start()
    yield engine
    await engine.stop()
    assert not owned_processes(engine)


def connector(engine: VllmEngine) -> VllmKvConnector:
    assert engine.kv_connector is not None
    return engine.kv_connector


def prompt(number: int) -> GenerateRequest:
    """Return a request with a prompt of its own that ends within a block."""
    random = Random(number)
    ids = [random.randrange(20, 500) for _ in range(70 + 7 * number)]
    request = make_request(tokens=TOKENS)
    return replace(request, request_id=f"p{number}", token_ids=pack_ids(ids))


async def answer(decode: VllmEngine, request: GenerateRequest, kv: bytes) -> Answer:
    """Return token ids and log probabilities, which tell the KV of two prompts apart."""
    reply = await generate_reply(decode, replace(request, kv=kv, top_logprobs=0))
    logprobs = [token.logprob for extra in reply.extras for token in extra or ()]
    assert len(logprobs) == len(reply.ids) == TOKENS
    return reply.ids, pytest.approx(logprobs, abs=1e-3)


async def answer_alone(decode: VllmEngine, request: GenerateRequest) -> Answer:
    """Return the answer that the engine computes without another one."""
    ids, logprobs = await answer(decode, replace(request, salt=f"alone {request.request_id}"), b"")
    return ids, logprobs.expected


async def test_answers_are_those_of_one_engine(prefill: VllmEngine, decode: VllmEngine) -> None:
    different = set()
    for number in range(PROMPTS):
        request = prompt(number)
        kv = await connector(prefill).prefill(request, ENGINE_CONTEXT)
        alone = await answer_alone(decode, request)
        assert await answer(decode, request, kv) == alone
        different.add(round(alone[1][0], 2))
    assert len(different) > PROMPTS // 2
    assert connector(decode).loads == PROMPTS
    assert not connector(decode).failures


async def test_an_unknown_engine_is_not_needed(prefill: VllmEngine, decode: VllmEngine) -> None:
    request, failures = prompt(30), connector(decode).failures.total()
    kv = await connector(prefill).prefill(request, ENGINE_CONTEXT)
    wrong = encode_params(decode_params(kv) | {"remote_engine_id": "unknown"})
    assert await answer(decode, request, wrong) == await answer_alone(decode, request)
    await settle(lambda: connector(decode).failures.total() > failures)
    assert connector(decode).failures.total() > failures


async def test_a_cancelled_load_returns_at_once_and_leaves_a_well_engine(
    prefill: VllmEngine, decode: VllmEngine
) -> None:
    for turn in range(6):
        request = prompt(20 + turn)
        kv = await connector(prefill).prefill(request, ENGINE_CONTEXT)
        reply = OrderCheckingReply()
        task = asyncio.create_task(decode.generate(replace(request, kv=kv), ENGINE_CONTEXT, reply))
        for _ in range(turn * 3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert await answer(decode, prompt(50), b"") == await answer_alone(prefill, prompt(50))
    await settle(lambda: not decode.ranks[0]._running)
    assert decode.ranks[0]._running == 0


async def test_released_kv_frees_the_blocks_of_the_other_engine(
    prefill: VllmEngine, decode: VllmEngine
) -> None:
    """Hold more prompts than the prefill engine has blocks for, one after the other. Without a
    release, the third one waits for the end of a lease."""
    for number in range(6):
        request = replace(prompt(19), salt=str(number))  # 7 blocks each
        async with asyncio.timeout(LEASE_S / 2):
            kv = await connector(prefill).prefill(request, ENGINE_CONTEXT)
        connector(decode).release(kv)


async def test_cancelled_prompts_hold_no_blocks(prefill: VllmEngine, decode: VllmEngine) -> None:
    for number in range(6):
        request = replace(prompt(19), salt=f"cancelled {number}")  # 7 blocks each
        task = asyncio.create_task(connector(prefill).prefill(request, ENGINE_CONTEXT))
        while not prefill.ranks[0].answers:
            await asyncio.sleep(0)
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    async with asyncio.timeout(LEASE_S / 2):
        kv = await connector(prefill).prefill(prompt(19), ENGINE_CONTEXT)
    connector(decode).release(kv)


async def test_a_cache_with_kv_to_be_loaded_is_not_emptied(
    prefill: VllmEngine, decode: VllmEngine
) -> None:
    kv = await connector(prefill).prefill(prompt(26), ENGINE_CONTEXT)
    with pytest.raises(Overloaded, match="that another worker will load"):
        await prefill.clear_blocks()
    assert prefill.failure is None
    assert await answer(decode, prompt(26), kv) == await answer_alone(decode, prompt(26))


async def test_a_client_cannot_name_kv_itself(decode: VllmEngine) -> None:
    extra = {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}}
    with pytest.raises(InvalidRequest, match="kv_transfer_params are set by dynamo"):
        await generate_reply(decode, replace(prompt(60), extra=extra))


async def test_a_killed_prefill_engine_is_not_needed(
    prefill: VllmEngine, decode: VllmEngine
) -> None:
    request = prompt(40)
    kv = await connector(prefill).prefill(request, ENGINE_CONTEXT)
    for process in owned_processes(prefill):
        os.kill(process, signal.SIGKILL)
    while owned_processes(prefill):
        await asyncio.sleep(0.05)
    failures = connector(decode).failures.total()
    assert await answer(decode, request, kv) == await answer_alone(decode, request)
    await settle(lambda: connector(decode).failures.total() > failures)
    assert connector(decode).failures.total() > failures
    assert decode.failure is None
