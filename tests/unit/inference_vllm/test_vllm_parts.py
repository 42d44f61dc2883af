"""The parts of the vLLM engine that need no vLLM: outputs, load and reasons of failed starts."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.external_inputs import install_module, make_inputs

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, InvalidRequest, ModelUnavailable, WorkerFailed
from dynamo.core.reply import Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    EngineTotals,
    Finish,
    GenerateRequest,
    PromptTokenLogprob,
    SamplingParams,
    Started,
    TokenLogprobs,
)
from dynamo.inference.engines.answer import ForeignAnswer
from dynamo.inference.engines.startup import start_error, without_collections
from dynamo.inference.vllm.engine import HUNG_S, VllmEngine, VllmRank
from dynamo.inference.vllm.kv_connector import VllmKvConnector, decode_params, encode_params
from dynamo.inference.vllm.requests import PARAMETERS, RequestTranslator, forward_output
from dynamo.inference.vllm.startup import ADVICE
from dynamo.testing.fakes import CollectedReply
from dynamo_conformance.engines import make_request


def foreign_answer(reply: Reply, request: GenerateRequest | None = None) -> ForeignAnswer:
    return ForeignAnswer(request or make_request(), reply, EngineTotals())


class FakeParams(msgspec.Struct, kw_only=True):
    """The fields of vLLM's SamplingParams that the tests name."""

    temperature: float
    seed: int | None = None
    n: int = 1
    logit_bias: dict[int, float] | None = None
    structured_outputs: Any = None
    bad_words: list[str] | None = None


def translator(monkeypatch: pytest.MonkeyPatch) -> RequestTranslator:
    """A translator for the fake of vLLM."""
    install_module(monkeypatch, "vllm")
    install_module(
        monkeypatch,
        "vllm.sampling_params",
        SamplingParams=FakeParams,
        StructuredOutputsParams=SimpleNamespace,
        RequestOutputKind=SimpleNamespace(DELTA="delta"),
    )
    translator = RequestTranslator()
    translator._params = SimpleNamespace
    return translator


@pytest.mark.parametrize("name", ["temperature", "seed", "logit_bias", "structured_outputs", "n"])
def test_a_caller_sets_no_parameter_beside_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(make_request(), extra={name: 1})  # is greedy, so that no seed is sent
    with pytest.raises(InvalidRequest, match=f"{name} is set by dynamo"):
        translator(monkeypatch).sampling_params(request)


def test_a_caller_sets_other_parameters_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = translator(monkeypatch)
    params = vllm.sampling_params(replace(make_request(), extra={"bad_words": ["x"]}))
    assert (params.bad_words, params.temperature, params.detokenize) == (["x"], 0, False)
    for extra, message in ({"bad_words": 1}, "bad_words: Expected"), ({"bad": 1}, "no parameter"):
        with pytest.raises(InvalidRequest, match=message):
            vllm.sampling_params(replace(make_request(), extra=extra))


def output(ids: list[int], reason: str | None = None, logprobs: Any = None) -> Any:
    part = SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=logprobs)
    return SimpleNamespace(outputs=[part], num_cached_tokens=32)


def test_a_stop_token_is_reported_and_not_sent() -> None:
    reply = CollectedReply()
    answer = foreign_answer(reply)
    assert forward_output(output([5, 6]), answer)
    assert not forward_output(output([7, 2], "stop"), answer)
    assert reply.started == Started(cached_tokens=32, prompt_tokens=40)
    assert reply.ids == [5, 6, 7]
    assert reply.end == Finish("stop", 4, 2)


def test_an_answer_of_a_stop_token_alone_is_empty() -> None:
    reply = CollectedReply()
    assert not forward_output(output([2], "stop"), foreign_answer(reply))
    assert (reply.ids, reply.end) == ([], Finish("stop", 1, 2))
    assert reply.started == Started(cached_tokens=32, prompt_tokens=40)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_vllm_gives_up_fails(reason: str) -> None:
    with pytest.raises(WorkerFailed, match=reason):
        forward_output(output([5], reason), foreign_answer(CollectedReply()))


def test_logprobs_are_sorted_by_rank_and_cut() -> None:
    position = {
        8: SimpleNamespace(logprob=-3.0, rank=3),
        5: SimpleNamespace(logprob=-0.5, rank=1),
        6: SimpleNamespace(logprob=-1.0, rank=2),
    }
    reply = CollectedReply()
    request = replace(make_request(), top_logprobs=2)
    forward_output(output([8], None, [position]), foreign_answer(reply, request))
    assert reply.extras == [[TokenLogprobs(8, -3.0, ((5, -0.5), (6, -1.0)))]]


@pytest.mark.parametrize("resumed", [0, 1])
def test_prompt_logprobs_come_with_the_end(resumed: int) -> None:
    def entry(logprob: float, rank: int) -> Any:
        return SimpleNamespace(logprob=logprob, rank=rank)

    first = output([5])
    first.prompt_token_ids = [4, 8, 9]
    first.prompt_logprobs = [
        None,
        {8: entry(-3.0, 9), 6: entry(-0.5, 1)},
        {9: entry(-0.25, 1)},
    ]
    last = output([2], "stop")
    last.prompt_logprobs = []
    request, reply = replace(make_request(), prompt_logprobs=1, resumed=resumed), CollectedReply()
    answer = foreign_answer(reply, request)
    assert forward_output(first, answer)
    assert not forward_output(last, answer)
    whole = (
        PromptTokenLogprob(8, -3.0, 9, ((6, -0.5),)),
        PromptTokenLogprob(9, -0.25, 1, ((9, -0.25),)),
    )
    assert reply.end is not None
    assert reply.end.prompt_logprobs == whole[: 2 - resumed]


def enter(rank: VllmRank) -> ForeignAnswer:
    """Return the answer to a request that the rank gets."""
    answer = foreign_answer(CollectedReply())
    rank.enter(answer)
    return answer


def test_an_idle_rank_is_idle_whatever_its_last_statistics_said() -> None:
    rank = VllmRank(16, 32)
    rank.total_blocks = 100
    answers = [enter(rank) for _ in range(2)]
    statistics = SimpleNamespace(num_running_reqs=1, kv_cache_usage=0.25)
    rank.on_statistics(statistics, None)
    assert answers[0].send([5])
    load = rank.report_load()
    assert (load.running, load.waiting, load.prefill_tokens) == (1, 1, 40)
    assert (load.active_blocks, load.steps) == (25, 1)
    for answer in answers:
        rank.leave(answer)
    load = rank.report_load()
    assert (load.running, load.waiting, load.prefill_tokens, load.active_blocks) == (0, 0, 0, 0)


def test_a_rank_hangs_if_it_has_requests_and_makes_no_step() -> None:
    rank = VllmRank(16, 32)
    assert not rank.hangs(0.0)
    assert not rank.hangs(1000.0)
    enter(rank)
    assert not rank.hangs(1000.0)
    assert not rank.hangs(1000.0 + HUNG_S)
    assert rank.hangs(1001.0 + HUNG_S)
    rank.on_statistics(None, None)
    assert not rank.hangs(1002.0 + HUNG_S)
    assert rank.hangs(1003.0 + 2 * HUNG_S)


def test_a_rank_hangs_if_only_probes_come_and_go_without_a_step() -> None:
    rank, now = VllmRank(16, 32), 0.0
    while not rank.hangs(now):
        answer = enter(rank)
        for _ in range(5):
            now += 1.0
            assert not rank.hangs(now) or now > HUNG_S
        rank.leave(answer)
        now += 25.0
    assert HUNG_S < now < HUNG_S + 60


def test_a_rank_does_not_hang_since_clients_cancel_before_the_first_step() -> None:
    rank = VllmRank(16, 32)
    for number in range(3):
        now = number * 2 * HUNG_S
        assert not rank.hangs(now)
        answer = enter(rank)
        assert not rank.hangs(now + 0.5)
        rank.leave(answer)
        assert not rank.hangs(now + 1.0)


def test_a_failed_start_names_the_setting_with_its_value() -> None:
    reason = "ValueError: To serve at least one request, estimated maximum model length is 96."
    error = start_error("vLLM", reason, ADVICE)
    assert isinstance(error, ConfigError)
    assert error.hint == "use --max-model-len 96"
    assert isinstance(start_error("vLLM", "KeyError: 'x'", ADVICE), ModelUnavailable)


SEEDED = replace(make_request(), sampling=SamplingParams(temperature=1.0, seed=3))


def sent_seed(request: GenerateRequest) -> int | None:
    seed: int | None = PARAMETERS.translate(request).get("seed")
    return seed


def test_seeds_differ_by_choice_and_position() -> None:
    others = [replace(SEEDED, choice=1), replace(SEEDED, resumed=1, token_ids=pack_ids([3]))]
    seeds = {sent_seed(request) for request in (SEEDED, *others)}
    assert len(seeds) == 3
    assert None not in seeds


def test_vllm_gets_only_seeds_that_a_client_asked_for() -> None:
    sampling = replace(SEEDED.sampling, random_seed=True)
    assert sent_seed(replace(SEEDED, sampling=sampling)) is None
    assert sent_seed(make_request()) is None  # is greedy


async def test_an_engine_argument_sets_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ModelUnavailable("no vLLM here")

    monkeypatch.setattr("dynamo.inference.vllm.engine.start_llm", refuse)
    engine = VllmEngine(make_inputs("vllm", tmp_path, args={"data_parallel_size": 2}))
    with pytest.raises(ModelUnavailable, match="no vLLM here"):
        await engine.start()
    assert len(engine.ranks) == 2


class FakeOutputs:
    """Outputs of a request, each sent by `put`. `closed`: vLLM has aborted the request."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.put = self._queue.put_nowait
        self.closed = False

    def __aiter__(self) -> FakeOutputs:
        return self

    async def __anext__(self) -> Any:
        item = await self._queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        self.closed = True


async def refuse(*_: Any) -> None:
    raise AssertionError("no request is expected")


async def test_a_load_is_aborted_only_after_its_first_output() -> None:
    async with BackgroundTasks() as tasks:
        outputs = FakeOutputs()
        loading = VllmKvConnector(refuse, tasks).load(outputs)
        task = tasks.start(anext(loading))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not outputs.closed
        outputs.put("first")
        while not outputs.closed:
            await asyncio.sleep(0)


async def test_a_load_passes_outputs_and_errors_on() -> None:
    async with BackgroundTasks() as tasks:
        outputs = FakeOutputs()
        for item in ("first", "second", None):
            outputs.put(item)
        connector = VllmKvConnector(refuse, tasks)
        assert [item async for item in connector.load(outputs)] == ["first", "second"]
        assert outputs.closed
        for items in ((ValueError("no"),), ("first", ValueError("no"))):
            outputs = FakeOutputs()
            for item in items:
                outputs.put(item)
            with pytest.raises(ValueError, match="no"):
                [item async for item in connector.load(outputs)]


async def test_a_prompt_for_another_engine_is_one_greedy_token() -> None:
    sent: list[GenerateRequest] = []

    async def generate(request: GenerateRequest, context: Context, reply: Reply) -> None:
        sent.append(request)
        reply.begin(Started())
        reply.tokens((3,))
        kv = encode_params({"remote_block_ids": [[1]]}) if len(sent) == 1 else b""
        reply.finish(Finish("length", 1, kv=kv))

    async with BackgroundTasks() as tasks:
        connector = VllmKvConnector(generate, tasks)
        request = replace(make_request(), top_logprobs=2, extra={"n": 1})
        kv = await connector.prefill(request, Context("r"))
        assert decode_params(kv) == {"remote_block_ids": [[1]]}
        (once,) = sent
        assert decode_params(once.kv)["do_remote_decode"] is True
        assert (once.stops.max_tokens, once.sampling.temperature) == (1, 0.0)
        assert (once.top_logprobs, once.extra) == (None, {})
        with pytest.raises(WorkerFailed, match="does not tell where its KV is"):
            await connector.prefill(request, Context("r"))


async def test_the_statistics_of_vllm_count_loads() -> None:
    async with BackgroundTasks() as tasks:
        connector = VllmKvConnector(refuse, tasks)
        connector.on_statistics(None)
        connector.on_statistics({"transfer_duration": [0.1], "num_failed_transfers": []})
        connector.on_statistics({"num_failed_transfers": [1, 1], "num_failed_handshakes": [1]})
        assert connector.loads == 1
        assert connector.failures == {"vllm transfers": 2, "vllm handshakes": 1}


async def test_kv_is_released_where_vllm_can() -> None:
    released: list[tuple[str, Any]] = []

    async def notify(request_id: str, params: Any) -> None:
        released.append((request_id, params))

    async with BackgroundTasks() as tasks:
        connector = VllmKvConnector(refuse, tasks)
        kv = encode_params({"remote_request_id": "a"})
        connector.on_started(SimpleNamespace())
        connector.release(kv)
        connector.on_started(SimpleNamespace(notify_kv_transfer_request_rejected=notify))
        connector.release(kv)
        await tasks.join()
    assert released == [("released-a", {"remote_request_id": "a"})]


def test_collections_leave_what_an_engine_has_created_alone() -> None:
    frozen = gc.get_freeze_count()
    try:
        with without_collections():
            assert not gc.isenabled()
            created = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen + len(created)
    finally:
        gc.unfreeze()


def test_a_rank_learns_from_steps_that_follow_each_other() -> None:
    rank = VllmRank(16, 32)
    rank.total_blocks = 1000
    now = 100.0
    for number in range(400):
        seqs = 1 + number % 40
        prompts = 100 * (number % 7) if number % 3 == 0 else 0
        pause_s = 30.0 if number % 50 == 0 else 0.0
        now += pause_s + 0.010 + 0.0005 * seqs + 0.00004 * prompts
        iteration = SimpleNamespace(
            iteration_timestamp=now, num_prompt_tokens=prompts + 64, num_preempted_reqs=0
        )
        if pause_s:  # the engine was idle
            rank.on_statistics(SimpleNamespace(num_running_reqs=0, kv_cache_usage=0.0), iteration)
            now += 1.0
        cache = SimpleNamespace(hits=64)
        scheduler = SimpleNamespace(
            num_running_reqs=seqs, kv_cache_usage=0.0, prefix_cache_stats=cache
        )
        rank.on_statistics(
            scheduler, SimpleNamespace(**(vars(iteration) | {"iteration_timestamp": now}))
        )
    c0, c1, c2, *_ = rank.report_load().timing
    assert (c0, c1, c2) == pytest.approx((10.0, 0.04, 0.5), rel=0.1)
