"""The vLLM engine with a fake AsyncLLM: aborts of requests with KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.external_inputs import make_inputs

from dynamo.core.context import Context
from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.vllm.engine import VllmEngine
from dynamo.inference.vllm.kv_connector import COMPUTE_FOR_ANOTHER, encode_params
from dynamo.testing.conformance.engines import ENGINE_CONTEXT, make_request
from dynamo.testing.fakes import CollectedReply


class FakeStream:
    """The outputs of one request, of which none comes. `aborted`: the caller has closed it."""

    def __init__(self) -> None:
        self.aborted = False
        self.release = asyncio.Event()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Any:
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.aborted = True
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.aborted = True


class FakeLlm:
    """The part of AsyncLLM that the engine needs to compute."""

    def __init__(self) -> None:
        self.errored = False
        self.streams: list[FakeStream] = []
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(
                num_gpu_blocks=66, block_size=4, enable_prefix_caching=True
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=4, max_num_batched_tokens=64, policy="fcfs"
            ),
            model_config=SimpleNamespace(max_model_len=90, get_vocab_size=lambda: 100),
        )

    def generate(self, *_: Any, **__: Any) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def shutdown(self) -> None:
        pass


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLlm:
    llm = FakeLlm()
    translator = SimpleNamespace(sampling_params=lambda *_: None)
    monkeypatch.setattr("dynamo.inference.vllm.engine.start_llm", lambda *_: llm)
    monkeypatch.setattr("dynamo.inference.vllm.engine.RequestTranslator", lambda: translator)
    return llm


@pytest.fixture
async def engine(llm: FakeLlm, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    """An engine of two ranks that hands KV over."""
    arguments = {"data_parallel_size": 2}
    engine = VllmEngine(make_inputs("vllm", tmp_path, role="prefill", args=arguments))
    await engine.start()
    yield engine
    await engine.stop()


async def cancel_before_the_first_output(task: asyncio.Task[Any], llm: FakeLlm) -> FakeStream:
    while not llm.streams:
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    return llm.streams[0]


async def test_a_cancelled_prefill_is_aborted_at_once(engine: VllmEngine, llm: FakeLlm) -> None:
    assert engine.kv_connector is not None
    async with BackgroundTasks() as tasks:
        task = tasks.start(engine.kv_connector.prefill(make_request(), Context("r")))
        stream = await cancel_before_the_first_output(task, llm)
    assert stream.aborted


async def test_a_cancelled_load_is_not_aborted_before_its_output(
    engine: VllmEngine, llm: FakeLlm
) -> None:
    kv = encode_params({**COMPUTE_FOR_ANOTHER, "do_remote_prefill": True})
    request = replace(make_request(), kv=kv)
    async with BackgroundTasks() as tasks:
        task = tasks.start(engine.generate(request, ENGINE_CONTEXT, CollectedReply()))
        stream = await cancel_before_the_first_output(task, llm)
        assert not stream.aborted
        stream.release.set()
        while not stream.aborted:
            await asyncio.sleep(0)
