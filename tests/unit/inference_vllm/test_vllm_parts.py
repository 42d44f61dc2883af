"""The parts of the vLLM engine that need no vLLM: outputs, load and reasons of failed starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.external_inputs import make_inputs

from dynamo.core.codec import pack_ids
from dynamo.core.errors import ConfigError, ModelUnavailable, WorkerFailed
from dynamo.core.values import Finish, Started, TokenLogprobs
from dynamo.inference.external import EngineKvView
from dynamo.inference.vllm.engine import VllmEngine
from dynamo.inference.vllm.rank import VllmRank
from dynamo.inference.vllm.requests import OutputForwarder, make_seed
from dynamo.inference.vllm.startup import start_error
from dynamo.testing.conformance.engines import make_request
from dynamo.testing.fakes import CollectedReply


def output(ids: list[int], reason: str | None = None, logprobs: Any = None) -> Any:
    part = SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=logprobs)
    return SimpleNamespace(outputs=[part], num_cached_tokens=32)


def test_a_stop_token_is_reported_and_not_sent() -> None:
    reply = CollectedReply()
    forwarder = OutputForwarder(reply, 40, None)
    assert forwarder.forward(output([5, 6]))
    assert not forwarder.forward(output([7, 2], "stop"))
    assert reply.started == Started(cached_tokens=32, prompt_tokens=40)
    assert reply.ids == [5, 6, 7]
    assert reply.end == Finish("stop", 4, 2)


def test_an_answer_of_a_stop_token_alone_is_empty() -> None:
    reply = CollectedReply()
    assert not OutputForwarder(reply, 40, None).forward(output([2], "stop"))
    assert (reply.ids, reply.end) == ([], Finish("stop", 1, 2))
    assert reply.started is not None


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_vllm_gives_up_fails(reason: str) -> None:
    with pytest.raises(WorkerFailed, match=reason):
        OutputForwarder(CollectedReply(), 40, None).forward(output([5], reason))


def test_logprobs_are_sorted_by_rank_and_cut() -> None:
    position = {
        8: SimpleNamespace(logprob=-3.0, rank=3),
        5: SimpleNamespace(logprob=-0.5, rank=1),
        6: SimpleNamespace(logprob=-1.0, rank=2),
    }
    reply = CollectedReply()
    OutputForwarder(reply, 40, 2).forward(output([8], None, [position]))
    assert reply.extras == [[TokenLogprobs(8, -3.0, ((5, -0.5), (6, -1.0)))]]


def test_an_idle_rank_is_idle_whatever_its_last_statistics_said() -> None:
    rank = VllmRank(EngineKvView(16, 32))
    rank.total_blocks = 100
    request = make_request()
    first, second = (rank.on_request(number, request, 40) for number in range(2))
    statistics = SimpleNamespace(num_running_reqs=1, kv_cache_usage=0.25)
    rank.on_statistics(statistics, None)
    rank.on_first_token(0)
    load = rank.report_load()
    assert (load.running, load.waiting, load.prefill_tokens) == (1, 1, 40)
    assert (load.active_blocks, load.steps) == (25, 1)
    rank.on_request_ended(0, first, 0)
    rank.on_request_ended(1, second, None)
    load = rank.report_load()
    assert (load.running, load.waiting, load.prefill_tokens, load.active_blocks) == (0, 0, 0, 0)


def test_a_failed_start_names_the_setting_with_its_value() -> None:
    reason = "ValueError: To serve at least one request, estimated maximum model length is 96."
    error = start_error(reason)
    assert isinstance(error, ConfigError)
    assert error.hint == "use --max-model-len 96"
    assert isinstance(start_error("KeyError: 'model.layers.0'"), ModelUnavailable)


def test_seeds_differ_by_choice_and_position() -> None:
    request = make_request()
    others = [replace(request, choice=1), replace(request, resumed=1, token_ids=pack_ids([3]))]
    assert len({make_seed(request), *map(make_seed, others)}) == 3


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
