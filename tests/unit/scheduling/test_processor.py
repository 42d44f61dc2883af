"""From requests in text to requests in tokens, and the choices back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import ContextLengthExceeded, InvalidRequest, WorkerFailed
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.text import (
    ChatRequest,
    CompletionRequest,
    SamplingOverrides,
    TextFinish,
    TextOptions,
)
from dynamo.core.values import Finish, StopConditions
from dynamo.models.tokenization.tokenizer import Tokenizer

Ids = Callable[[str], tuple[int, ...]]
CONTEXT = Context(request_id="r1")
HELLO = ({"role": "user", "content": "hello"},)


def chat(messages: Any = HELLO, **options: Any) -> ChatRequest:
    return ChatRequest("tiny", messages, TextOptions(**options))


def complete(prompt: str | bytes, echo: bool = False, **options: Any) -> CompletionRequest:
    return CompletionRequest("tiny", prompt, TextOptions(**options), echo)


async def test_a_chat_there_and_back(processor: Any, scripted: Any, told: Any, ids_of: Ids) -> None:
    engine, reader = scripted(ids_of("the fox")), told()
    await processor(engine.send).chat(chat(), CONTEXT, reader)
    prompt = ids_of("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert engine.prompts() == [prompt]
    (request,) = engine.requests
    assert (request.request_id, request.model, request.choice) == ("r1", "tiny", 0)
    assert request.stops == StopConditions(1024, 0, (2,))
    assert reader.calls[:2] == [("prompt", len(prompt)), ("begin", 0)]
    assert reader.whole() == "the fox"
    assert reader.ends() == {0: TextFinish("stop", len(ids_of("the fox")))}


async def test_options_reach_the_engine(processor: Any, scripted: Any, told: Any) -> None:
    engine = scripted([])
    sampling = SamplingOverrides(temperature=0.0, seed=3)
    options = {"max_tokens": 9, "min_tokens": 2, "stop_token_ids": (65,), "ignore_eos": True}
    await processor(engine.send).chat(
        chat(**options, sampling=sampling, top_logprobs=2, salt="t", priority=1), CONTEXT, told()
    )
    (request,) = engine.requests
    assert request.stops == StopConditions(9, 2, (65,), True)
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 3)
    assert (request.top_logprobs, request.salt, request.priority) == (2, "t", 1)


async def test_choices_side_by_side(processor: Any, scripted: Any, told: Any, ids_of: Ids) -> None:
    engine, reader = scripted(ids_of("fox"), Finish("length")), told()
    await processor(engine.send).chat(chat(n=3), CONTEXT, reader)
    assert [request.choice for request in engine.requests] == [0, 1, 2]
    assert len({request.sampling.seed for request in engine.requests}) == 1
    assert [reader.whole(choice) for choice in range(3)] == ["fox"] * 3
    assert sum(call[0] == "prompt" for call in reader.calls) == 1
    assert set(reader.ends()) == {0, 1, 2}


async def test_one_failing_choice_cancels_the_others(
    processor: Any, scripted: Any, told: Any
) -> None:
    engine = scripted([])
    engine.hold = asyncio.Event()
    engine.failing = {1: WorkerFailed("gone")}
    with pytest.raises(WorkerFailed):
        await processor(engine.send).chat(chat(n=3), CONTEXT, told())
    assert 0 in engine.cancelled
    assert 1 not in engine.cancelled


async def test_leaving_cancels_what_is_below(processor: Any, scripted: Any, told: Any) -> None:
    engine = scripted([])
    engine.hold = asyncio.Event()
    async with BackgroundTasks() as tasks:
        call = tasks.start(processor(engine.send).chat(chat(n=2), CONTEXT, told()))
        while len(engine.requests) < 2:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert sorted(engine.cancelled) == [0, 1]


async def test_a_stop_string_ends_only_its_choice(
    processor: Any, scripted: Any, told: Any, ids_of: Ids
) -> None:
    engine, reader = scripted(ids_of("the quick brown")), told()
    configured = SamplingSettings(stop_tokens=("bro", ""))
    await processor(engine.send, sampling=configured).chat(chat(stop=("zz",)), CONTEXT, reader)
    assert reader.whole() == "the quick "
    assert reader.ends()[0].stop == "bro"


async def test_completions_of_text_and_of_ids(
    processor: Any, scripted: Any, told: Any, ids_of: Ids
) -> None:
    engine = scripted(ids_of("fox"))
    ids = ids_of("the quick")
    for prompt in ("the quick", pack_ids(ids)):
        reader = told()
        await processor(engine.send).complete(complete(prompt, echo=True), CONTEXT, reader)
        assert reader.whole() == "the quickfox"
        assert reader.ends()[0].completion_tokens == len(ids_of("fox"))
    assert engine.prompts() == [ids, ids]


async def test_no_tokens_wanted_asks_no_worker(processor: Any, scripted: Any, told: Any) -> None:
    engine, reader = scripted([]), told()
    await processor(engine.send).complete(complete("the", echo=True, max_tokens=0), CONTEXT, reader)
    assert not engine.requests
    assert reader.whole() == "the"
    assert reader.ends() == {0: TextFinish("length", 0)}


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (complete("a" * 400), ContextLengthExceeded),
        (complete("a", max_tokens=64), ContextLengthExceeded),
        (complete(""), InvalidRequest),
        (complete(pack_ids([1, 70_000])), InvalidRequest),
        (complete("a", sampling=SamplingOverrides(logit_bias={70_000: 1.0})), InvalidRequest),
    ],
)
async def test_refused_before_anything_is_sent(
    processor: Any, scripted: Any, told: Any, request_: CompletionRequest, kind: type[Exception]
) -> None:
    engine, reader = scripted([]), told()
    with pytest.raises(kind):
        await processor(engine.send, context_tokens=64).complete(request_, CONTEXT, reader)
    assert not engine.requests
    assert not reader.calls


async def test_template_arguments(processor: Any, scripted: Any, told: Any, ids_of: Ids) -> None:
    engine = scripted([])
    made = processor(engine.send, template="{{ messages[0].content }} {{ mood }}")
    await made.chat(ChatRequest("tiny", HELLO, template_args={"mood": "dry"}), CONTEXT, told())
    assert engine.prompts() == [ids_of("hello dry")]
    with pytest.raises(InvalidRequest, match="messages"):
        await made.chat(ChatRequest("tiny", HELLO, template_args={"messages": 1}), CONTEXT, told())


async def test_long_prompts_leave_the_loop(
    processor: Any, scripted: Any, told: Any, clock: Any, ids_of: Ids
) -> None:
    engine = scripted([])
    made = processor(engine.send, context_tokens=100_000)
    await made.complete(complete("word " * 100), CONTEXT, told())
    assert clock.offloaded == []
    words = ["word"] * 4000
    await made.complete(complete(" ".join(words)), CONTEXT, told())
    assert clock.offloaded == ["encode"]
    assert engine.prompts()[1] == ids_of(" ".join(words))
    clock.offloaded.clear()
    await made.complete(complete(" ".join([*words, "more"])), CONTEXT, told())
    assert clock.offloaded == []


async def test_what_cannot_fit_is_not_even_encoded(
    processor: Any,
    tokenizer: Tokenizer,
    scripted: Any,
    told: Any,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "can_split", True)
    text = "a" * 1_000_000
    assert len(text) > tokenizer.max_chars_of(1000)
    made = processor(scripted([]).send, context_tokens=1000)
    long = chat(({"role": "user", "content": text},))
    for call in (made.complete(complete(text), CONTEXT, told()), made.chat(long, CONTEXT, told())):
        with pytest.raises(ContextLengthExceeded, match="characters"):
            await call
    assert "encode" not in clock.offloaded
    assert len(await made.tokenize(text)) == len(tokenizer.encode(text)) // 4
    assert clock.offloaded[-1] == "encode"


async def test_many_ids_leave_the_loop(
    processor: Any, scripted: Any, told: Any, clock: Any, ids_of: Ids
) -> None:
    made, reader = processor(scripted([]).send, context_tokens=100_000), told()
    ids = ids_of("word fox") * 1000
    assert await made.detokenize(ids[:10])
    assert not clock.offloaded
    assert await made.detokenize(ids) == "word fox" * 1000
    await made.complete(complete(pack_ids(ids), echo=True), CONTEXT, reader)
    assert reader.whole() == "word fox" * 1000
    assert clock.offloaded == ["decode", "decode"]
    assert "".join(await made.texts(ids)) == "word fox" * 1000
    assert len(clock.offloaded) == 3


async def test_tokenize_and_back(processor: Any, scripted: Any, ids_of: Ids) -> None:
    made = processor(scripted([]).send)
    assert await made.tokenize("the fox 🎉") == list(ids_of("the fox 🎉"))
    assert await made.tokenize("the fox", add_special=False) == list(ids_of("the fox"))
    assert await made.detokenize(await made.tokenize([{"role": "user", "content": "fox"}])) == (
        "<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(InvalidRequest):
        await made.detokenize([70_000])
