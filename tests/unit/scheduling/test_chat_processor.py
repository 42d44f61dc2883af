"""ChatProcessor: from text requests to token requests, and the choices back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from dynamo.core.codec import pack_ids, unpack_ids
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
from dynamo.scheduling.processor.chat_processor import CHOICES_PER_SLICE

Ids = Callable[[str], tuple[int, ...]]
CONTEXT = Context(request_id="r1")
HELLO = ({"role": "user", "content": "hello"},)


def chat(messages: Any = HELLO, **options: Any) -> ChatRequest:
    return ChatRequest("tiny", messages, TextOptions(**options))


def complete(prompt: str | bytes, echo: bool = False, **options: Any) -> CompletionRequest:
    return CompletionRequest("tiny", prompt, TextOptions(**options), echo)


async def test_a_chat_is_encoded_and_its_answer_decoded(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, ids_of: Ids
) -> None:
    engine, reader = scripted_engine(ids_of("the fox")), recording_reply()
    await make_processor(engine.send).chat(chat(), CONTEXT, reader)
    prompt = ids_of("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert engine.prompts() == [prompt]
    (request,) = engine.requests
    assert (request.request_id, request.model, request.choice) == ("r1", "tiny", 0)
    assert request.stops == StopConditions(4096 - len(prompt), 0, (2,))
    assert reader.calls[:2] == [("prompt", len(prompt)), ("begin", 0)]
    assert reader.whole() == "the fox"
    assert reader.ends() == {0: TextFinish("stop", len(ids_of("the fox")) + 1)}


async def test_options_reach_the_engine(
    make_processor: Any, scripted_engine: Any, recording_reply: Any
) -> None:
    engine = scripted_engine([])
    sampling = SamplingOverrides(temperature=0.0, seed=3)
    options = {"max_tokens": 9, "min_tokens": 2, "stop_token_ids": (65,), "ignore_eos": True}
    await make_processor(engine.send).chat(
        chat(**options, sampling=sampling, top_logprobs=2, salt="t", priority=1),
        CONTEXT,
        recording_reply(),
    )
    (request,) = engine.requests
    assert request.stops == StopConditions(9, 2, (65,), True)
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 3)
    assert (request.top_logprobs, request.salt, request.priority) == (2, "t", 1)


async def test_the_context_bounds_both_limits_of_an_answer(
    make_processor: Any, scripted_engine: Any, recording_reply: Any
) -> None:
    engine = scripted_engine([])
    await make_processor(engine.send).complete(
        complete(pack_ids([65] * 4092), max_tokens=99, min_tokens=99), CONTEXT, recording_reply()
    )
    (request,) = engine.requests
    assert (request.stops.max_tokens, request.stops.min_tokens) == (4, 4)


async def test_choices_are_separate_requests(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, ids_of: Ids
) -> None:
    engine, reader = scripted_engine(ids_of("fox"), Finish("length")), recording_reply()
    await make_processor(engine.send).chat(chat(n=3), CONTEXT, reader)
    assert [request.choice for request in engine.requests] == [0, 1, 2]
    assert len({request.sampling.seed for request in engine.requests}) == 1
    assert [reader.whole(choice) for choice in range(3)] == ["fox"] * 3
    assert sum(call[0] == "prompt" for call in reader.calls) == 1
    assert set(reader.ends()) == {0, 1, 2}


async def test_choices_share_their_prompt_and_start_in_slices(
    make_processor: Any, scripted_engine: Any, recording_reply: Any
) -> None:
    engine = scripted_engine([])
    engine.hold = asyncio.Event()
    async with BackgroundTasks() as tasks:
        call = tasks.start(
            make_processor(engine.send).chat(chat(n=100), CONTEXT, recording_reply())
        )
        counts = []
        while len(engine.requests) < 100:
            counts.append(len(engine.requests))
            await asyncio.sleep(0)
        assert max(after - before for before, after in pairwise(counts)) <= CHOICES_PER_SLICE
        engine.hold.set()
        await call
    group = engine.requests[0].group
    assert all(request.group is group for request in engine.requests)
    assert all(group.covers(request) for request in engine.requests)


async def test_a_single_choice_has_no_group(
    make_processor: Any, scripted_engine: Any, recording_reply: Any
) -> None:
    engine = scripted_engine([])
    await make_processor(engine.send).chat(chat(n=1), CONTEXT, recording_reply())
    assert engine.requests[0].group is None


async def test_one_failing_choice_cancels_the_others(
    make_processor: Any, scripted_engine: Any, recording_reply: Any
) -> None:
    engine = scripted_engine([])
    engine.hold = asyncio.Event()
    engine.failing = {1: WorkerFailed("gone")}
    with pytest.raises(WorkerFailed):
        await make_processor(engine.send).chat(chat(n=3), CONTEXT, recording_reply())
    assert 0 in engine.cancelled
    assert 1 not in engine.cancelled


async def test_cancellation_reaches_all_choices(
    make_processor: Any, scripted_engine: Any, recording_reply: Any
) -> None:
    engine = scripted_engine([])
    engine.hold = asyncio.Event()
    async with BackgroundTasks() as tasks:
        call = tasks.start(make_processor(engine.send).chat(chat(n=2), CONTEXT, recording_reply()))
        while len(engine.requests) < 2:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert sorted(engine.cancelled) == [0, 1]


async def test_a_stop_string_ends_only_its_choice(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, ids_of: Ids
) -> None:
    engine, reader = scripted_engine(ids_of("the quick brown")), recording_reply()
    configured = SamplingSettings(stop_tokens=("bro", ""))
    await make_processor(engine.send, sampling=configured).chat(chat(stop=("zz",)), CONTEXT, reader)
    assert reader.whole() == "the quick "
    assert reader.ends()[0].stop == "bro"


async def test_completions_of_text_and_ids(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, ids_of: Ids
) -> None:
    engine = scripted_engine(ids_of("fox"))
    ids = ids_of("the quick")
    for prompt in ("the quick", pack_ids(ids)):
        reader = recording_reply()
        await make_processor(engine.send).complete(complete(prompt, echo=True), CONTEXT, reader)
        assert reader.whole() == "the quickfox"
        assert reader.ends()[0].completion_tokens == len(ids_of("fox")) + 1
    assert engine.prompts() == [ids, ids]


async def test_a_prepared_completion_is_sent_later(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, ids_of: Ids
) -> None:
    engine, reader = scripted_engine(ids_of("fox")), recording_reply()
    processor = make_processor(engine.send)
    send = await processor.prepare_completion(complete("the quick"), CONTEXT, reader)
    assert (engine.requests, reader.calls) == ([], [("prompt", len(ids_of("the quick")))])
    await send()
    assert reader.whole() == "fox"


async def test_zero_tokens_need_no_worker(
    make_processor: Any, scripted_engine: Any, recording_reply: Any
) -> None:
    engine, reader = scripted_engine([]), recording_reply()
    await make_processor(engine.send).complete(
        complete("the", echo=True, max_tokens=0), CONTEXT, reader
    )
    assert not engine.requests
    assert reader.whole() == "the"
    assert reader.ends() == {0: TextFinish("length", 0)}


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (complete("a" * 400), ContextLengthExceeded),
        (complete("a", min_tokens=64), InvalidRequest),
        (complete(""), InvalidRequest),
        (complete(pack_ids([1, 70_000])), InvalidRequest),
        (complete("a", sampling=SamplingOverrides(logit_bias={70_000: 1.0})), InvalidRequest),
    ],
)
async def test_refused_before_anything_is_sent(
    make_processor: Any,
    scripted_engine: Any,
    recording_reply: Any,
    request_: CompletionRequest,
    kind: type[Exception],
) -> None:
    engine, reader = scripted_engine([]), recording_reply()
    with pytest.raises(kind):
        await make_processor(engine.send, context_tokens=64).complete(request_, CONTEXT, reader)
    assert not engine.requests
    assert not reader.calls


async def test_template_arguments(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, ids_of: Ids
) -> None:
    engine = scripted_engine([])
    chat_processor = make_processor(engine.send, template="{{ messages[0].content }} {{ mood }}")
    await chat_processor.chat(
        ChatRequest("tiny", HELLO, template_args={"mood": "dry"}), CONTEXT, recording_reply()
    )
    assert engine.prompts() == [ids_of("hello dry")]
    with pytest.raises(InvalidRequest, match="messages"):
        await chat_processor.chat(
            ChatRequest("tiny", HELLO, template_args={"messages": 1}), CONTEXT, recording_reply()
        )


async def test_long_prompts_are_encoded_on_a_thread(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, clock: Any, ids_of: Ids
) -> None:
    engine = scripted_engine([])
    chat_processor = make_processor(engine.send, context_tokens=100_000)
    await chat_processor.complete(complete("word " * 100), CONTEXT, recording_reply())
    assert clock.offloaded == []
    words = ["word"] * 4000
    await chat_processor.complete(complete(" ".join(words)), CONTEXT, recording_reply())
    assert clock.offloaded == ["encode"]
    assert engine.prompts()[1] == ids_of(" ".join(words))
    clock.offloaded.clear()
    await chat_processor.complete(complete(" ".join([*words, "more"])), CONTEXT, recording_reply())
    assert clock.offloaded == []


async def test_a_prompt_that_cannot_fit_is_not_encoded(
    make_processor: Any,
    tokenizer: Tokenizer,
    scripted_engine: Any,
    recording_reply: Any,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "can_split", True)
    text = "word " * 200_000
    assert len(text) > tokenizer.max_chars_of(1000)
    chat_processor = make_processor(scripted_engine([]).send, context_tokens=1000)
    long = chat(({"role": "user", "content": text},))
    for call in (
        chat_processor.complete(complete(text), CONTEXT, recording_reply()),
        chat_processor.chat(long, CONTEXT, recording_reply()),
    ):
        with pytest.raises(ContextLengthExceeded, match="characters"):
            await call
    assert "encode" not in clock.offloaded


async def test_tokenize_refuses_more_than_the_context_holds(
    make_processor: Any,
    tokenizer: Tokenizer,
    scripted_engine: Any,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "can_split", True)
    chat_processor = make_processor(scripted_engine([]).send, context_tokens=20_000)
    tokenize = chat_processor.tokenize
    long = "a" * 120_001
    for prompt in (long, ChatRequest("m", ({"role": "user", "content": long},))):
        with pytest.raises(ContextLengthExceeded, match="context has at most 120000"):
            await tokenize(prompt)
    with pytest.raises(ContextLengthExceeded, match="more tokens than 20000"):
        await chat_processor.detokenize([5] * 20_001)
    assert not clock.offloaded
    with pytest.raises(ContextLengthExceeded, match="more tokens than 20000"):
        await tokenize("x y " * 29_000)
    assert clock.offloaded == ["split", "_encode_step"]  # the rest of the text is not encoded
    assert await chat_processor.detokenize([5] * 20_000)


async def test_tokenize_caches_nothing_and_ends_with_its_caller(
    make_processor: Any,
    tokenizer: Tokenizer,
    scripted_engine: Any,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "can_split", True)
    chat_processor = make_processor(scripted_engine([]).send, context_tokens=1_000_000)
    cache = chat_processor._prompt_encoder._segment_cache
    text = "the fox <|im_end|> " * 40_000
    assert await chat_processor.tokenize(text) == list(unpack_ids(tokenizer.encode(text)))
    assert (cache.size_bytes, cache._last_lookup) == (0, None)
    steps = len(clock.offloaded)
    assert steps > 5

    async def offload(work: Any, *args: Any) -> Any:
        clock.offloaded.append(work.__name__)
        await asyncio.sleep(0)
        return work(*args)

    monkeypatch.setattr(clock, "offload", offload)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(chat_processor.tokenize(text)) for _ in range(3)]
        while len(clock.offloaded) < steps + 3:
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
    assert len(clock.offloaded) <= steps + 4


async def test_many_ids_are_decoded_on_a_thread(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, clock: Any, ids_of: Ids
) -> None:
    chat_processor, reader = (
        make_processor(scripted_engine([]).send, context_tokens=100_000),
        recording_reply(),
    )
    ids = ids_of("word fox") * 1000
    assert await chat_processor.detokenize(ids[:10])
    assert not clock.offloaded
    assert await chat_processor.detokenize(ids) == "word fox" * 1000
    await chat_processor.complete(complete(pack_ids(ids), echo=True), CONTEXT, reader)
    assert reader.whole() == "word fox" * 1000
    assert clock.offloaded == ["decode", "decode"]
    assert len(await chat_processor.token_strings(ids)) == len(ids)
    assert len(clock.offloaded) == 3


async def test_tokenize_and_back(make_processor: Any, scripted_engine: Any, ids_of: Ids) -> None:
    chat_processor = make_processor(scripted_engine([]).send)
    assert await chat_processor.tokenize("the fox 🎉") == list(ids_of("the fox 🎉"))
    assert await chat_processor.tokenize("the fox", add_special=False) == list(ids_of("the fox"))
    assert await chat_processor.detokenize(
        await chat_processor.tokenize(ChatRequest("m", ({"role": "user", "content": "fox"},)))
    ) == ("<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(InvalidRequest):
        await chat_processor.detokenize([70_000])


async def test_strings_of_tokens_are_those_of_the_vocabulary(
    make_processor: Any, scripted_engine: Any, ids_of: Ids, tokenizer: Tokenizer
) -> None:
    chat_processor, ids = make_processor(scripted_engine([]).send), ids_of("fox the é<|im_end|>")
    strings = await chat_processor.token_strings(ids)
    assert strings == [tokenizer.id_to_token(token) for token in ids]
    assert "Ġ" in "".join(strings)
    assert strings[-1] == "<|im_end|>"
    assert b"".join(await chat_processor.token_bytes(ids)).decode() == "fox the é<|im_end|>"
    assert await chat_processor.token_strings([60_000]) == [""]


async def test_a_conversation_that_cannot_fit_is_not_rendered(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, clock: Any
) -> None:
    """Tokenizers without a known longest token have a bound, too."""
    chat_processor = make_processor(scripted_engine([]).send, context_tokens=10_000)
    long = chat(({"role": "user", "content": "word " * 130_000},) * 2)
    with pytest.raises(ContextLengthExceeded, match="1300000 characters"):
        await chat_processor.chat(long, CONTEXT, recording_reply())
    assert clock.offloaded == []
