"""The engine suite on a real vLLM, then what only vLLM can do. All tests share one engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.errors import InvalidRequest, WorkerFailed
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import StopConditions, StructuredOutput
from dynamo.inference.engine_registry import EngineInputs
from dynamo.inference.engines.process_guard import find_processes
from dynamo.inference.vllm.engine import VllmEngine
from dynamo.models.resolve import resolve_model
from dynamo.models.tokenization.tokenizer import load_tokenizer
from dynamo_conformance.engines import (
    ENGINE_CONTEXT,
    EngineConformance,
    OrderCheckingReply,
    generate_reply,
    make_request,
    settle,
)

ARGUMENTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 96,
    "max_model_len": 1024,
    "block_size": 32,
    "structured_outputs_config": {"disable_any_whitespace": True},
}
REASONING = {"reasoning_start_str": "<repo_name>", "reasoning_end_str": "<file_sep>"}
REASONING_IDS = (3, 5)
CANCELLED = 100


async def make_engine(
    model: Path, arguments: Mapping[str, Any] | None = None, **settings: Any
) -> VllmEngine:
    """Return an engine of few blocks that is not started yet."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two that wait for each other spin
    files = await resolve_model(str(model), with_weights=True)
    engine = EngineSettings(
        kind="vllm", max_num_seqs=16, args=ARGUMENTS | (arguments or {}), **settings
    )
    card = files.build_card(block_tokens=16)
    return VllmEngine(EngineInputs(Settings(engine=engine), card, files, SystemClock()))


def owned_processes(engine: VllmEngine) -> list[int]:
    """Return the processes that the engine has started and that are not gone."""
    return list(find_processes("=".join(engine.processes._variable).encode()))


@pytest.mark.asyncio(loop_scope="class")
class TestVllm(EngineConformance):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, engine_model: Path) -> AsyncIterator[VllmEngine]:
        engine = await make_engine(engine_model, {"reasoning_config": REASONING})
        await engine.start()
        yield engine
        await engine.stop()
        assert not owned_processes(engine)

    async def test_reasoning_ends_at_its_limit(self, engine: VllmEngine) -> None:
        assert engine._info is not None
        assert "thinking_budget" in engine._info.features
        start, end = REASONING_IDS
        prompt = make_request((*range(300, 320), start), 24)
        assert end not in (await generate_reply(engine, prompt)).ids
        for limit in (1, 7, 15):
            form = StructuredOutput("text", reasoning_end=pack_ids([end]), reasoning_limit=limit)
            reply = await generate_reply(engine, replace(prompt, structured=form))
            assert reply.ids.index(end) == limit
            assert len(reply.ids) == 24

    async def test_logprobs_are_those_of_the_greedy_tokens(self, engine: VllmEngine) -> None:
        reply = await generate_reply(engine, replace(make_request(tokens=4), top_logprobs=3))
        entries = [entry for extra in reply.extras for entry in extra or ()]
        assert [entry.token for entry in entries] == reply.ids
        assert all(entry.top[0] == (entry.token, entry.logprob) for entry in entries)
        assert all(len(entry.top) == 3 for entry in entries)

    async def test_a_stop_token_ends_the_answer_and_is_not_sent(self, engine: VllmEngine) -> None:
        whole = (await generate_reply(engine, make_request(tokens=8))).ids
        stop = next(token for token in whole if whole.index(token) > 0)
        count = whole.index(stop)
        stops = StopConditions(max_tokens=8, stop_token_ids=(stop,), ignore_eos=True)
        reply = await generate_reply(engine, replace(make_request(), stops=stops))
        assert reply.ids == whole[:count]
        assert reply.end is not None
        assert (reply.end.reason, reply.end.stop_token) == ("stop", stop)
        assert reply.end.completion_tokens == count + 1

    async def test_structured_output_is_obeyed(self, engine: VllmEngine) -> None:
        tokenizer = load_tokenizer(engine.inputs.card.tokenizer)
        stops = StopConditions(max_tokens=60, stop_token_ids=engine.inputs.card.eos_token_ids)
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        for structured, check in (
            (StructuredOutput("json_schema", json.dumps(schema)), json.loads),
            (StructuredOutput("choice", '["red", "blue"]'), {"red": 1, "blue": 1}.__getitem__),
            (StructuredOutput("regex", "[0-9]{3}"), int),
        ):
            request = replace(make_request(), structured=structured, stops=stops)
            reply = await generate_reply(engine, request)
            check(tokenizer.decode(reply.ids))

    async def test_calls_are_forced_by_their_grammar(self, engine: VllmEngine) -> None:
        assert "calls" in engine._info.features
        tokenizer = load_tokenizer(engine.inputs.card.tokenizer)
        stops = StopConditions(max_tokens=60, stop_token_ids=engine.inputs.card.eos_token_ids)
        grammar = 'start: <[1]> "call " r0\nr0: %json {"enum": ["red", "blue"]}\n'
        form = StructuredOutput("calls", grammar)
        reply = await generate_reply(engine, replace(make_request(), structured=form, stops=stops))
        assert reply.ids[0] == 1
        assert tokenizer.decode(reply.ids[1:]) in ('call "red"', 'call "blue"')

    async def test_logprobs_of_the_prompt(self, engine: VllmEngine) -> None:
        request = replace(make_request(range(3, 103), 2), prompt_logprobs=2)
        for _ in range(2):  # a cached prompt has them, too
            reply = await generate_reply(engine, request)
            assert reply.end is not None
            entries = reply.end.prompt_logprobs
            assert [entry.token for entry in entries] == [*range(4, 103)]
            assert {len(entry.top) for entry in entries} == {2}
            best = [entry for entry in entries if entry.rank == 1]
            assert all(entry.top[0] == (entry.token, entry.logprob) for entry in best)
            assert all(entry.logprob <= entry.top[0][1] <= 0 for entry in entries)

    async def test_vllm_samples_as_the_model_says(self, engine: VllmEngine) -> None:
        sampling = engine._info.sampling
        assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (1.0, 0, 1.0)

    async def test_ids_beyond_the_vocabulary_are_refused(self, engine: VllmEngine) -> None:
        with pytest.raises(InvalidRequest, match="not in the vocabulary"):
            await generate_reply(engine, make_request((3, 1 << 20)))

    async def test_unknown_parameters_name_the_nearest(self, engine: VllmEngine) -> None:
        request = replace(make_request(), extra={"bad_word": ["x"]})
        with pytest.raises(InvalidRequest) as caught:
            await generate_reply(engine, request)
        assert caught.value.hint == "did you mean 'bad_words'?"

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"structured": StructuredOutput("grammar", "root ::= (")}, "vLLM refuses"),
            ({"structured": StructuredOutput("regex", "(")}, "vLLM refuses"),
            ({"stops": StopConditions(4, stop_token_ids=(1 << 20,))}, "vLLM refuses"),
            ({"extra": {"bad_words": 3}}, "bad_words: Expected"),
            ({"extra": {"temperature": 1.0}}, "set by dynamo"),
        ],
    )
    async def test_refusals_are_errors_of_the_request(
        self, engine: VllmEngine, change: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=reason):
            await generate_reply(engine, replace(make_request(), **change))
        await generate_reply(engine, make_request())

    async def test_predictions_equal_the_cached_tokens(self, engine: VllmEngine) -> None:
        view = engine.ranks[0]
        wrong = view.drift.counts["too_high"]
        for _ in range(2):
            requests = [
                replace(make_request(range(3, 3 + length), 2), salt=salt)
                for length in (33, 64, 97, 200)
                for salt in ("", "a")
            ]
            await run_all(*(generate_reply(engine, request) for request in requests))
            await settle(lambda: False)
        assert view.drift.counts["checked"] > 0
        assert view.drift.counts["too_high"] == wrong

    async def test_cancelled_requests_leave_an_idle_engine(self, engine: VllmEngine) -> None:
        for turn in range(CANCELLED):
            reply = OrderCheckingReply()
            request = make_request(tokens=400)
            task = asyncio.create_task(engine.generate(request, ENGINE_CONTEXT, reply))
            if turn % 2:
                await reply.first_token.wait()
            else:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        rank = engine.ranks[0]
        await generate_reply(engine, make_request(tokens=2))
        await settle(lambda: not rank._running)
        assert rank._running == 0

    async def test_stop_fails_requests_in_flight(self, engine: VllmEngine) -> None:
        """Kill the engine core, which fails them as `stop` does."""
        failed = asyncio.Event()
        engine.on_failure(failed.set)
        replies = [OrderCheckingReply() for _ in range(4)]
        tasks = [
            asyncio.create_task(engine.generate(make_request(tokens=400), ENGINE_CONTEXT, reply))
            for reply in replies
        ]
        for reply in replies:
            await reply.first_token.wait()
        core = engine._llm.engine_core.resources.engine_manager.processes[0].pid
        os.kill(core, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, WorkerFailed) for result in results)
        await failed.wait()
        assert engine.failure is not None
        with pytest.raises(WorkerFailed):
            await generate_reply(engine, make_request())
        await engine.stop()
        assert not owned_processes(engine)


@pytest.mark.asyncio(loop_scope="class")
class TestVllmRanks(EngineConformance):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, engine_model: Path) -> AsyncIterator[VllmEngine]:
        engine = await make_engine(engine_model, data_parallel_size=2)
        await engine.start()
        yield engine
        await engine.stop()
