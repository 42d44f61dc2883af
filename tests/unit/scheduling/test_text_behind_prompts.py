"""Answers of tokenizers that write spaces as ▁: their text continues with that of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.sentencepiece import write_tokenizer

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids, unpack_ids
from dynamo.core.context import Context
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.text import ChatRequest, CompletionRequest, ReasoningDelta, TextOptions
from dynamo.core.values import Finish, TokenLogprobs
from dynamo.models.card import ModelCard
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.file_cache import file_ref
from dynamo.models.tokenization.tokenizer import Tokenizer, load_tokenizer
from dynamo.scheduling.processor import ChatProcessor

CONTEXT = Context(request_id="r1")
MARKERS = ("[INST]", "[/INST]", "<think>", "</think>")
TEMPLATE = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
FAMILIES = ("llama", "mistral", "gemma", "t5")
PAIRS = [
    ("The quick", " brown fox."),
    ("The quick brown fo", "x jumps"),
    ("Hello", "  world"),
    ("the answer\n", "  is 42"),
    ("the sum", "\n  if x == 1:\n    return y"),
]
EMOJIS = "🎉日🎉日🎉日🎉日🎉"

Make = Callable[[Any, Tokenizer], ChatProcessor]


@pytest.fixture(scope="module", params=FAMILIES)
def spaced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of one family."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    return load_tokenizer(write_tokenizer(folder / "tokenizer.json", request.param, MARKERS))


@pytest.fixture
def make(tiny_model: Path) -> Make:
    def make_processor(send: Any, tokenizer: Tokenizer) -> ChatProcessor:
        card = ModelCard(
            names=("tiny",),
            context_tokens=4096,
            vocab_size=tokenizer.vocab_size,
            tokenizer=file_ref(tiny_model / "tokenizer.json"),
            eos_token_ids=(2,),
            chat_template=TEMPLATE + "<think>{# </think> #}",
        )
        template, sampling = ChatTemplate(TEMPLATE), SamplingSettings()
        clock, chance = SystemClock(), Random(7)
        return ChatProcessor(card, tokenizer, template, send, sampling, clock, chance)

    return make_processor


def split(tokenizer: Tokenizer, before: str, after: str) -> tuple[list[int], list[int], str]:
    """Return the ids of a text in two parts, and the text of the second one."""
    start = [*unpack_ids(tokenizer.encode(before, add_special=True))]
    ids = [*start, *unpack_ids(tokenizer.encode_behind_text(after))]
    decode = tokenizer.decode
    whole, first = (decode(part, skip_special=True) for part in (ids, start))
    assert whole.startswith(first)
    return start, ids[len(start) :], whole[len(first) :]


def complete(prompt: str | bytes, echo: bool = False, **options: Any) -> CompletionRequest:
    return CompletionRequest("tiny", prompt, TextOptions(**options), echo)


@pytest.mark.parametrize(("before", "after"), PAIRS)
async def test_completions_go_on_with_the_prompt(
    spaced: Tokenizer,
    make: Make,
    scripted_engine: Any,
    recording_reply: Any,
    before: str,
    after: str,
) -> None:
    _, ids, text = split(spaced, before, after)
    if "<unk>" not in spaced.decode(ids):
        assert text == after
    for prompt in (before, spaced.encode(before, add_special=True)):
        engine, reader = scripted_engine(ids), recording_reply()
        await make(engine.send, spaced).complete(complete(prompt, n=2), CONTEXT, reader)
        assert [reader.whole(choice) for choice in (0, 1)] == [text, text]


async def test_an_echo_and_its_answer_are_one_text(
    spaced: Tokenizer, make: Make, scripted_engine: Any, recording_reply: Any
) -> None:
    _, ids, text = split(spaced, "Hello", " world, how")
    engine, reader = scripted_engine(ids), recording_reply()
    await make(engine.send, spaced).complete(complete("Hello", echo=True), CONTEXT, reader)
    assert reader.whole() == "Hello" + text == "Hello world, how"


async def test_the_answer_to_an_empty_prompt_begins_a_text(
    spaced: Tokenizer, make: Make, scripted_engine: Any, recording_reply: Any
) -> None:
    ids = unpack_ids(spaced.encode("Hello world"))
    engine, reader = scripted_engine(ids), recording_reply()
    await make(engine.send, spaced).complete(complete(pack_ids([1])), CONTEXT, reader)
    assert reader.whole() == "Hello world"


async def test_chats_keep_the_space_behind_the_markers_of_the_prompt(
    spaced: Tokenizer, make: Make, scripted_engine: Any, recording_reply: Any
) -> None:
    ids = unpack_ids(spaced.encode_behind_text(" Hello you"))
    request = ChatRequest("tiny", ({"role": "user", "content": "how are you?"},))
    engine, reader = scripted_engine(ids), recording_reply()
    await make(engine.send, spaced).chat(request, CONTEXT, reader)
    assert reader.whole() == " Hello you"


async def test_reasoning_and_text_behind_its_marker_keep_their_spaces(
    spaced: Tokenizer, make: Make, scripted_engine: Any, recording_reply: Any
) -> None:
    opening, closing = (unpack_ids(spaced.encode(marker)) for marker in ("<think>", "</think>"))
    thought, text = (unpack_ids(spaced.encode_behind_text(x)) for x in (" I think", " the answer"))
    reasoning: list[str] = []

    class Reader(recording_reply):  # type: ignore[misc]
        def event(self, choice: int, event: Any) -> bool:
            assert isinstance(event, ReasoningDelta)
            reasoning.append(event.text)
            return True

    request = ChatRequest("tiny", ({"role": "user", "content": "how are you?"},))
    engine, reader = scripted_engine([*opening, *thought, *closing, *text]), Reader()
    await make(engine.send, spaced).chat(request, CONTEXT, reader)
    assert ("".join(reasoning), reader.whole()) == (" I think", " the answer")


@pytest.mark.parametrize("stop", [" world", "world", "o w", " Hello w"])
async def test_stop_strings_are_found_in_that_text(
    spaced: Tokenizer, make: Make, scripted_engine: Any, recording_reply: Any, stop: str
) -> None:
    _, ids, text = split(spaced, "the sum", " Hello world, how")
    engine, reader = scripted_engine(ids), recording_reply()
    await make(engine.send, spaced).complete(complete("the sum", stop=(stop,)), CONTEXT, reader)
    assert reader.whole() == text.partition(stop)[0]
    assert reader.ends()[0].stop == stop


async def test_texts_and_offsets_of_logprobs_are_those_of_the_text(
    spaced: Tokenizer, make: Make, recording_reply: Any
) -> None:
    _, ids, text = split(spaced, "the sum", " Hello world, how")

    async def send(request: Any, context: Context, reply: Any) -> None:
        reply.tokens(ids[:3], [TokenLogprobs(token, -0.5) for token in ids[:3]])
        for token in ids[3:]:
            reply.tokens((token,), [TokenLogprobs(token, -0.5)])
        reply.finish(Finish("length"))

    reader = recording_reply()
    request = complete("the sum", echo=True, top_logprobs=0)
    await make(send, spaced).complete(request, CONTEXT, reader)
    assert "".join(entry.token for entry in reader.logprobs) == text
    for entry in reader.logprobs:
        assert ("the sum" + text)[entry.offset :].startswith(entry.token)


async def test_text_that_became_tokens_piece_by_piece_is_the_same(
    spaced: Tokenizer, make: Make, scripted_engine: Any, recording_reply: Any
) -> None:
    """Servers without token ids send text in pieces."""
    pieces = [" Hel", "lo", ",", " ", "wor", "ld: ", "  two", "\n", "numbers", "."]
    ids = [token for piece in pieces for token in unpack_ids(spaced.encode_behind_text(piece))]
    engine, reader = scripted_engine(ids), recording_reply()
    await make(engine.send, spaced).complete(complete("the sum"), CONTEXT, reader)
    assert reader.whole() == "".join(pieces)


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_an_answer_completes_a_character_of_its_prompt(
    tokenizer: Tokenizer,
    spaced: Tokenizer,
    make: Make,
    scripted_engine: Any,
    recording_reply: Any,
    cut: int,
) -> None:
    for library in (tokenizer, spaced):
        ids = unpack_ids(library.encode_behind_text(EMOJIS + " Hello"))
        start = len(unpack_ids(library.encode_behind_text(EMOJIS[:-1]))) + cut
        if "<unk>" in library.decode(ids):
            continue
        engine, reader = scripted_engine(ids[start:]), recording_reply()
        await make(engine.send, library).complete(complete(pack_ids(ids[:start])), CONTEXT, reader)
        assert reader.whole() == "🎉 Hello"


async def test_a_prompt_may_end_in_whole_characters_of_bytes(
    tokenizer: Tokenizer, spaced: Tokenizer, make: Make, scripted_engine: Any, recording_reply: Any
) -> None:
    for library in (tokenizer, spaced):
        ids: Sequence[int] = unpack_ids(library.encode_behind_text(EMOJIS * 2))
        if "<unk>" in library.decode(ids):
            continue
        engine, reader = scripted_engine(ids), recording_reply()
        await make(engine.send, library).complete(complete(pack_ids(ids)), CONTEXT, reader)
        assert reader.whole() == EMOJIS * 2
