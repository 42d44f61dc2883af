"""The vLLM engine with a fake AsyncLLM: aborts of requests with KV, and emptied prefix caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.engine_cache import STYLES, FakeEngineCache
from tests.support.external_inputs import make_inputs

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InvalidRequest, Overloaded, WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.engines.engine import NEUTRAL_SAMPLING
from dynamo.inference.engines.engine_events import decode_batch
from dynamo.inference.engines.rank import ViewedRank
from dynamo.inference.vllm.engine import CORE_DIED, VllmEngine
from dynamo.inference.vllm.kv_connector import COMPUTE_FOR_ANOTHER, encode_params
from dynamo.telemetry.trace_context import make_span_id
from dynamo.testing.fakes import CollectedReply
from dynamo_conformance.engines import ENGINE_CONTEXT, make_request

OLD, NEW = [*range(9)], [*range(50, 59)]
PINNED = (
    "Call to reset_prefix_cache method failed: Failed to reset KV cache even when all the running "
    "requests are preempted and moved to the waiting queue."
)


class RefusedByVllm(Exception):
    """An error of the request, which is no `ValueError`."""


class FullVllm(Exception):
    http_status = 503


class FakeStream:
    """The outputs of one request, of which none comes. `aborted`: the caller has closed it.
    `error`: what is raised instead of the first one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.aborted = False
        self.release = asyncio.Event()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Any:
        if self.error is not None:
            raise self.error
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.aborted = True
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.aborted = True


class FakeLlm:
    """The part of AsyncLLM that the engine needs to compute and to empty its cache. `on_reset`
    is called by `reset_prefix_cache`, which returns its result."""

    def __init__(self) -> None:
        self.errored = False
        self.streams: list[FakeStream] = []
        self.options: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.on_reset: Any = None
        self.sleep_calls: list[tuple[Any, ...]] = []
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(
                num_gpu_blocks=66, block_size=4, enable_prefix_caching=True
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=4, max_num_batched_tokens=64, policy="fcfs"
            ),
            model_config=SimpleNamespace(
                max_model_len=90,
                get_vocab_size=lambda: 100,
                enable_sleep_mode=True,
                get_diff_sampling_param=lambda: {"temperature": 0.6, "max_tokens": 70},
            ),
        )

    def generate(self, *_: Any, **options: Any) -> FakeStream:
        self.options.append(options)
        self.streams.append(FakeStream(self.error))
        return self.streams[-1]

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert reset_running_requests
        done: bool = await self.on_reset()
        return done

    async def sleep(self, level: int) -> None:
        self.sleep_calls.append(("sleep", level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.sleep_calls.append(("wake_up", tags))

    async def collective_rpc(self, method: str) -> None:
        self.sleep_calls.append((method,))

    def shutdown(self) -> None:
        pass


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLlm:
    llm = FakeLlm()
    translator = SimpleNamespace(
        sampling_params=lambda *_: None, refusals=(ValueError, RefusedByVllm)
    )
    monkeypatch.setattr("dynamo.inference.vllm.engine.start_llm", lambda *_: llm)
    monkeypatch.setattr("dynamo.inference.vllm.engine.RequestTranslator", lambda: translator)
    return llm


@pytest.fixture
async def engine(llm: FakeLlm, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    """An engine of two ranks that hands KV over."""
    arguments = {"data_parallel_size": 2, "otlp_traces_endpoint": "http://127.0.0.1:1"}
    engine = VllmEngine(make_inputs("vllm", tmp_path, role="prefill", args=arguments))
    await engine.start()
    yield engine
    await engine.stop()


async def test_vllm_says_what_it_samples_by_default(engine: VllmEngine) -> None:
    assert engine._info is not None
    sampling = engine._info.sampling
    assert sampling == NEUTRAL_SAMPLING | {"temperature": 0.6, "max_tokens": 70}


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


async def test_vllm_gets_the_trace_of_a_request(engine: VllmEngine, llm: FakeLlm) -> None:
    llm.error = RefusedByVllm("this test needs no answer")
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    context = Context("r", trace=trace, metadata={"tracestate": "v=1"})
    for each in (Context("r"), context):
        with pytest.raises(InvalidRequest):
            await engine.generate(make_request(), each, CollectedReply())
    assert not llm.options[0]["trace_headers"]
    assert llm.options[1]["trace_headers"] == {"traceparent": trace, "tracestate": "v=1"}
    engine._exported = True
    with pytest.raises(InvalidRequest):
        await engine.generate(make_request(), context, CollectedReply())
    below = f"00-{'a' * 32}-{make_span_id('r/0/0')}-01"
    assert llm.options[2]["trace_headers"]["traceparent"] == below
    engine._traced = False  # vLLM warns of headers that it has no use for
    with pytest.raises(InvalidRequest):
        await engine.generate(make_request(), context, CollectedReply())
    assert "trace_headers" not in llm.options[3]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RefusedByVllm("no grammar"), InvalidRequest),
        (FullVllm("too many requests"), Overloaded),
        (RuntimeError("broken"), WorkerFailed),
    ],
)
async def test_only_failures_of_vllm_are_failures_of_the_worker(
    engine: VllmEngine, llm: FakeLlm, error: Exception, raised: type[DynamoError]
) -> None:
    llm.error = error
    with pytest.raises(DynamoError, match=str(error)) as caught:
        await engine.generate(make_request(), ENGINE_CONTEXT, CollectedReply())
    assert type(caught.value) is raised


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


def publish(view: ViewedRank, *steps: list[int] | None) -> None:
    """Let the view receive the events of an engine that computes prompts. None: it is emptied."""
    cache = FakeEngineCache(STYLES["vllm_0.32"], block_tokens=4)
    for ids in steps:
        if ids is None:
            cache.reset()
        else:
            cache.compute(ids)
    view.blocks.apply_batch(decode_batch(cache.drain_payload()))


def predict(view: ViewedRank) -> list[int]:
    return [view.blocks.predict(pack_ids(ids)) for ids in (OLD, NEW)]


async def test_a_view_whose_event_came_during_the_reset_is_left_alone(
    engine: VllmEngine, llm: FakeLlm
) -> None:
    fast, slow = engine.ranks
    for view in (fast, slow):
        publish(view, OLD)

    async def reset() -> bool:
        publish(fast, None, NEW)
        return True

    llm.on_reset = reset
    assert await engine.clear_blocks() == 4
    assert predict(fast) == [0, 8]
    publish(fast, OLD)
    assert predict(fast) == [8, 8]
    assert (predict(slow), slow.snapshot_kv_events()) == ([0, 0], [])
    publish(slow, OLD)  # was computed before the reset
    assert predict(slow) == [0, 0]
    publish(slow, OLD, None, NEW)
    assert predict(slow) == [0, 8]


async def test_pinned_kv_is_no_failure(engine: VllmEngine, llm: FakeLlm) -> None:
    async def reset() -> bool:
        raise Exception(PINNED)  # noqa: TRY002 - as vLLM's client does

    publish(engine.ranks[0], OLD)
    llm.on_reset = reset
    with pytest.raises(Overloaded, match="that another worker will load"):
        await engine.clear_blocks()
    assert predict(engine.ranks[0]) == [8, 0]
    assert engine.failure is None


@pytest.mark.parametrize("errored", [True, False])
async def test_another_failure_of_a_reset_is_reported(
    engine: VllmEngine, llm: FakeLlm, errored: bool
) -> None:
    async def reset() -> bool:
        llm.errored = errored
        raise RuntimeError("EngineCore encountered an issue")

    llm.on_reset = reset
    with pytest.raises(WorkerFailed, match=CORE_DIED if errored else "encountered an issue"):
        await engine.clear_blocks()
    await asyncio.sleep(0)
    assert (engine.failure is not None) == errored
    if errored:
        with pytest.raises(WorkerFailed, match=CORE_DIED):
            await engine.clear_blocks()


async def test_a_reset_that_a_dead_core_does_not_answer_ends(
    engine: VllmEngine, llm: FakeLlm
) -> None:
    async def reset() -> bool:
        llm.errored = True
        await asyncio.Event().wait()
        return True

    llm.on_reset = reset
    with pytest.raises(WorkerFailed, match=CORE_DIED):
        async with asyncio.timeout(10):
            await engine.clear_blocks()


async def test_vllm_loads_weights_again_that_it_has_given_back(
    engine: VllmEngine, llm: FakeLlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that another worker loads is waited for."""
    monkeypatch.setattr("dynamo.inference.vllm.engine.EMPTY_RETRY_S", 0.0)
    resets = iter([False, True, True])

    async def reset() -> bool:
        return next(resets)

    llm.on_reset = reset
    assert engine.sleep_refusal(2) == ""
    for level in (1, 2):
        await engine.sleep(level)
        await engine.wake_up()
    assert llm.sleep_calls == [
        ("sleep", 1),
        ("wake_up", None),
        ("sleep", 2),
        ("wake_up", ["weights"]),
        ("reload_weights",),
        ("wake_up", ["kv_cache"]),
    ]
    assert next(resets, None) is None


async def test_vllm_without_sleep_mode_cannot_sleep(engine: VllmEngine, llm: FakeLlm) -> None:
    llm.vllm_config.model_config.enable_sleep_mode = False
    assert "enable_sleep_mode=true" in engine.sleep_refusal(1)
