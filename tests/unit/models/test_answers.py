"""Readers of answers: what becomes reasoning, text and calls, and what stays text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from tests.support.recorded_outputs import (
    BY_TOKEN,
    GROUPINGS,
    WHOLE,
    FamilyFile,
    FamilyModel,
    ParsedAnswer,
    RecordedOutput,
    RecordedReply,
    leaks,
    mutate,
)

from dynamo.core.codec import unpack_ids
from dynamo.core.fast_path import FastPath, TextTable
from dynamo.core.reply import Reply
from dynamo.core.text import TextOptions
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.models.answers.families import FAMILIES, find_family, make_format
from dynamo.models.answers.reader import AnswerReader
from dynamo.models.answers.scanner import marker_set

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": CITY}}
    for name in ("weather", "tool_search")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any, tiny_model: Path) -> FamilyModel:
    """A model whose vocabulary has no markers, as the default model: they are ordinary text."""
    family = FamilyFile("qwen3-hermes", [])
    folder = tmp_path_factory.mktemp("plain")
    return FamilyModel(family, folder, tiny_model / "tokenizer.json")


def output(text: str, *tags: str, prompt: str = "", family: str = "qwen3-hermes") -> RecordedOutput:
    return RecordedOutput("test", family, text, TOOLS, list(tags), generation_prompt=prompt)


async def read(model: FamilyModel, recorded: RecordedOutput, **options: Any) -> ParsedAnswer:
    """Return the answer, which must be the same in all groupings."""
    answers = [await model.parse(recorded, grouping, **options) for grouping in GROUPINGS]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


async def test_no_marker_is_formed_around_reasoning_and_a_call(plain: FamilyModel) -> None:
    """Text before reasoning and text behind a call stand beside each other in the answer."""
    answer = await read(plain, output(f"a <<think>tool_call>{CALL}tool_call> b"))
    assert leaks(answer, find_family("qwen3-hermes").markers) == []
    assert (answer.content or "").startswith("a <")
    assert len(answer.calls) == 1


async def test_markers_of_ordinary_text_are_found_across_tokens(plain: FamilyModel) -> None:
    text = (
        f"<think>\nRome?\n</think>\n\nOne moment.\n{CALL}\n{CALL.replace('Rome', 'Oslo')} Done.\n"
    )
    answer = await read(plain, output(text))
    assert answer.reasoning == "Rome?"
    assert answer.content == "One moment. Done.\n"
    assert answer.calls == [("weather", '{"city": "Rome"}'), ("weather", '{"city": "Oslo"}')]


@pytest.mark.parametrize(
    "text",
    [
        "Use a < b, or <tool> and {braces}.\n\nSecond line <",
        "\nfirst line is empty",
        "tool_call without brackets <tool_cal",
        'JSON: {"name": "weather"}',
    ],
)
async def test_text_that_is_no_call_is_passed_on_to_the_letter(
    plain: FamilyModel, text: str
) -> None:
    assert await read(plain, output(text)) == ParsedAnswer(text, None, [])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            '{"name": "other", "arguments": {}}',
        ),
        ("<tool_call>no JSON</tool_call>", "no JSON"),
        ('<tool_call>{"name": "weather", "arguments": {"city": tru}}</tool_call>', None),
        ('a<tool_call>{"arguments": {}}</tool_call>b', 'a{"arguments": {}}b'),
        ("</tool_call>a</think>b", "ab"),
        ("<tool_<tool_call>call>x", "<tool_x"),
    ],
)
async def test_what_cannot_be_read_is_text_without_markers(
    plain: FamilyModel, text: str, content: str | None
) -> None:
    answer = await read(plain, output(text))
    assert answer.calls == []
    assert content is None or answer.content == content
    assert leaks(answer, ["<tool_call>", "</tool_call>", "<think>", "</think>"]) == []


async def test_names_like_markers_survive(plain: FamilyModel) -> None:
    answer = await read(plain, output('<tool_call>{"name": "tool_search"}</tool_call>'))
    assert answer.calls == [("tool_search", "{}")]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "weather", "arguments": {"city": " </tool_call> <think>\\n"}}', None),
        ('{"arguments": {"name": "x"}, "name": "weather"}', '{"name": "x"}'),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}', '{"city": "Rome"}'),
        ('{"name": "weather", "arguments": null}', "{}"),
        ('{"name": "weather", "parameters": {"days": 123456789012345678901234567890}}', None),
        ('{"name": "weather", "arguments": {"a": [1, {"b": {}}, "}"], "c": -0.5e+9}}', None),
        ('{"type": "function", "name": "weather", "arguments": {  }}', "{  }"),
    ],
)
async def test_arguments_are_passed_on_as_they_are_written(
    plain: FamilyModel, text: str, calls: str | None
) -> None:
    answer = await read(plain, output(f"<tool_call>{text}</tool_call>"))
    body = json.loads(text)
    expected = calls or text[text.index(': {"') + 2 : -1]
    assert answer.calls == [(body["name"], expected)]


async def test_raw_line_breaks_in_strings_are_escaped(plain: FamilyModel) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\tc"}}</tool_call>'
    ((_, arguments),) = (await read(plain, output(text))).calls
    assert json.loads(arguments) == {"city": "a\nb\tc"}


@pytest.mark.parametrize("cut", range(12, len(CALL) - len("}\n</tool_call>"), 3))
async def test_max_tokens_inside_a_call_gives_no_call(plain: FamilyModel, cut: int) -> None:
    answer = await read(plain, output(f"Wait.\n{CALL[:cut]}", "truncated"))
    assert (answer.content, answer.calls, answer.reason) == ("Wait.", [], "length")
    for _, arguments in answer.unfinished:
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)


async def test_max_tokens_inside_a_second_call_keeps_the_first(plain: FamilyModel) -> None:
    answer = await read(plain, output(f"{CALL}\n{CALL[:50]}", "truncated"))
    assert answer.calls == [("weather", '{"city": "Rome"}')]


async def test_max_tokens_inside_reasoning(plain: FamilyModel) -> None:
    answer = await read(plain, output("<think>\nI wonder", "truncated"))
    assert answer == ParsedAnswer(None, "I wonder", [], reason="length")


@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        ("assistant\n<think>\n", "hm</think>\n\nYes", ("Yes", "hm")),
        ("assistant\n<think>\n\n</think>\n\n", "Yes", ("Yes", None)),
        ("<think>x</think> assistant\n", "Yes", ("Yes", None)),
        ("assistant\n", "<think>hm</think>Yes", ("Yes", "hm")),
        ("assistant\n<think>\n", "<think>hm</think>Yes", ("Yes", "hm")),
    ],
)
async def test_the_end_of_the_prompt_tells_whether_reasoning_has_begun(
    plain: FamilyModel, prompt: str, text: str, answer: tuple[str, str | None]
) -> None:
    parsed = await read(plain, output(text, prompt=prompt))
    assert (parsed.content, parsed.reasoning) == answer


async def test_only_the_token_is_a_marker_where_the_vocabulary_has_it(
    make_model: Callable[[str], FamilyModel],
) -> None:
    model = make_model("qwen3-hermes")
    spelled = model.groups("<", WHOLE)[0] + model.groups("tool_call>{}", WHOLE)[0]
    recorded = output("x")
    model.groups = lambda text, grouping: [spelled]  # type: ignore[method-assign]
    assert (await model.parse(recorded, WHOLE)).content == "<tool_call>{}"


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
async def test_random_markers_never_leak(
    make_model: Callable[[str], FamilyModel], family: str
) -> None:
    model, random, markers = make_model(family), Random(family), find_family(family).markers
    texts = [*markers, "weather", '{"city": "x"', "}", '"', ">", "\n", "{", "[", "name", ":0", " "]
    for _ in range(60):
        text = "".join(random.choices(texts, k=random.randint(1, 30)))
        recorded = mutate(random, output(text, family=family), markers)
        whole = await model.parse(recorded, WHOLE)
        assert await model.parse(recorded, random.choice(GROUPINGS[1:])) == whole, recorded
        assert leaks(whole, markers) == [], recorded


async def test_deep_and_long_answers_take_no_exception_and_little_time(
    plain: FamilyModel,
) -> None:
    nested = '<tool_call>{"name": "weather", "arguments": {"a": ' + "[" * 5000
    assert (await plain.parse(output(nested), BY_TOKEN)).calls == []
    opened = '<tool_call>{"name": "weather", "arguments": {"a": "' * 400
    assert (await plain.parse(output(opened), WHOLE)).calls == []


async def test_names_of_parameters_do_not_become_markers(plain: FamilyModel) -> None:
    def call(first: str, second: str) -> RecordedOutput:
        keys = (first, second, "x" * 300, *map(str, range(100)))
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        text = f"<parameter={first}>1<parameter=no>\n<parameter={second}>2</parameter>"
        text = f"<tool_call><function=f>{text}</function></tool_call>"
        return msgspec.structs.replace(output(text), tools=[tool])

    sizes = set()
    for first, second in (("a", "b"), ("c", "d")):
        answer = await read(plain, call(first, second))
        assert answer.calls == [("f", f'{{"{first}": "1<parameter=no>", "{second}": "2"}}')]
        sizes.add(marker_set.cache_info().currsize)
    assert len(sizes) == 1


@pytest.mark.parametrize("key", ["name", "9"])
async def test_numbers_of_many_digits_give_no_call(plain: FamilyModel, key: str) -> None:
    digits = "9" * 5000
    text = f'{{"{key}": {digits}, {digits}: 1}}'
    assert await read(plain, output(f"<tool_call>{text}</tool_call>")) == ParsedAnswer(
        text, None, []
    )


@pytest.mark.parametrize(
    ("family", "opening", "piece"),
    [
        ("llama", '[weather(city="', "Rome"),
        ("llama", "[weather(days=", "1111"),
        ("gemma4", "<|tool_call>call:weather{days:", "1111"),
        ("qwen3-hermes", '<tool_call>{"name": "weather", "arguments": {"days": ', "1111"),
    ],
)
def test_a_value_without_an_end_is_given_up(family: str, opening: str, piece: str) -> None:
    answer_format = make_format(find_family(family), "", [], named=True)
    reader = AnswerReader(answer_format, {"weather": CITY}, lambda written: written)
    reader.feed(opening)
    events = [event for _ in range(20_000) for event in reader.feed(piece)]
    assert piece in "".join(event for event in events if isinstance(event, str))


async def test_python_strings_may_contain_quotes_and_brackets(
    make_model: Callable[[str], FamilyModel],
) -> None:
    text = """[weather(city='a\\'")]', days=[1, (2)]), weather(city="\\\\")]"""
    answer = await read(make_model("llama"), output(text, family="llama"))
    assert [json.loads(arguments) for _, arguments in answer.calls] == [
        {"city": "a'\")]", "days": [1, 2]},
        {"city": "\\"},
    ]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "qwen3-hermes",
            r"""<tool_call>{"name": "weather", "arguments": "{\"city\": \"\ud800\"}"}</tool_call>""",
        ),
        ("llama", r"""[weather(city="\ud800")]"""),
    ],
)
async def test_lone_surrogates_are_passed_on_as_escapes(
    make_model: Callable[[str], FamilyModel], family: str, text: str
) -> None:
    answer = await read(make_model(family), output(text, family=family))
    assert answer.calls == [("weather", r'{"city": "\ud800"}')]


async def test_attributes_of_tags_are_unescaped(make_model: Callable[[str], FamilyModel]) -> None:
    argument = """<|open|>argument key="a&#39;&amp;&apos;"<|sep|>x<|close|>argument<|sep|>"""
    text = f'<|open|>call tool="weather"<|sep|>{argument}<|close|>call<|sep|>'
    answer = await read(make_model("kimi"), output(text, family="kimi"))
    assert answer.calls == [("weather", """{"a'&'": "x"}""")]


@pytest.mark.parametrize("chosen", [True, False])
async def test_only_stop_ids_of_the_client_are_reported(
    make_model: Callable[[str], FamilyModel], chosen: bool
) -> None:
    model, reply, requests = make_model("gemma4"), RecordedReply(), list[GenerateRequest]()
    (stop,) = unpack_ids(model.tokenizer.encode("<turn|>"))

    async def send(request: GenerateRequest, context: Any, choice: Reply) -> None:
        requests.append(request)
        choice.begin(Started())
        choice.finish(Finish("stop", stop_token=stop))

    options = TextOptions(stop_token_ids=(stop,) if chosen else ())
    recorded = output("", family="gemma4")
    await model.parse(recorded, WHOLE, send=send, reply=reply, options=options, callable_tools=())
    assert reply.end is not None
    assert reply.end.stop == (stop if chosen else None)
    (request,) = requests
    assert request.stops.stop_token_ids.count(stop) == 1
    (call,) = unpack_ids(model.tokenizer.encode("<|tool_call>"))
    assert request.sampling.logit_bias == {call: -100.0}  # no tool may be called


async def test_stop_strings_apply_to_text_only(plain: FamilyModel) -> None:
    options = TextOptions(stop=("Rome", "END"))
    answer = await read(plain, output(f"Hi.\n{CALL} then END and more"), options=options)
    assert answer.content == "Hi. then "
    assert answer.calls == [("weather", '{"city": "Rome"}')]


class TokenPath(FastPath):
    """A fast path that takes every token whose text is certain."""

    def __init__(self, texts: list[str | None], sent: list[str]) -> None:
        super().__init__()
        self._texts, self._sent = texts, sent

    def send_token(self, token: int) -> bool | None:
        text = self._texts[token]
        if text is None or not self.buffer_empty:
            return None
        self.tokens_sent += 1
        self._sent.append(text)
        return True


class TokenPathReply(RecordedReply):
    """Offers a fast path, whose texts are those of the reply."""

    def open_fast_path(self, choice: int, text_table: TextTable, token_log: Any) -> FastPath:
        self.path = TokenPath(text_table.token_texts.texts, self.texts)
        return self.path


async def test_text_beside_calls_takes_the_fast_path(plain: FamilyModel) -> None:
    text = f"Some words, and a < b.\nMore words before a call.\n{CALL} and words behind it"
    slow = await plain.parse(output(text), BY_TOKEN)
    reply = TokenPathReply()

    async def send(request: Any, context: Any, choice: Reply) -> None:
        choice.begin(Started())
        steps = plain.groups(text, BY_TOKEN)
        choice.tokens(steps[0])
        choice.tokens(steps[1])
        send_token = choice.open_fast_path()
        assert send_token is not None
        for step in steps[2:]:
            if send_token(step[0]) is None:
                assert choice.tokens(step)
        choice.finish(Finish("stop", len(steps)))

    await plain.parse(output(text), BY_TOKEN, send=send, reply=reply)
    assert reply.answer() == slow
    assert reply.end is not None
    assert reply.path.tokens_sent > 10
    assert reply.end.completion_tokens == len(plain.groups(text, BY_TOKEN))
