"""Calls inside of reasoning, and calls at the end of an answer whose last tag is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.recorded_outputs import FamilyModel
from tests.unit.models.test_answers import CALL, output, read

CONSIDERED_CALLS = {
    "qwen3-hermes": ("<think>", "</think>", CALL),
    "qwen3-xml": (
        *("<think>", "</think>"),
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter></function></tool_call>",
    ),
    "glm": (
        *("<think>", "</think>"),
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    ),
    "deepseek": (
        *("<think>", "</think>"),
        '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>',
    ),
    "mistral": ("[THINK]", "[/THINK]", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'),
    "gemma4": (
        *("<|channel>thought\n", "<channel|>"),
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>',
    ),
    "kimi": (
        *("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        (
            '<|open|>call tool="weather"<|sep|><|open|>argument key="city"<|sep|>Rome'
            "<|close|>argument<|sep|><|close|>call<|sep|>"
        ),
    ),
}
"""The markers of reasoning, and a call, by family."""


@pytest.mark.parametrize("name", CONSIDERED_CALLS)
async def test_a_call_inside_of_reasoning_is_part_of_it(
    make_model: Callable[[str], FamilyModel], name: str
) -> None:
    opening, closing, call = CONSIDERED_CALLS[name]
    model = make_model(name)
    text = f"{opening}I could{call} or wait.{closing}I wait."
    answer = await read(model, output(text, family=name))
    assert (answer.content, answer.calls) == ("I wait.", [])
    reasoning = answer.reasoning or ""
    assert reasoning.startswith("I could")
    assert reasoning.endswith(" or wait.")
    after = await read(model, output(f"{text}{call}", family=name))
    assert after.calls == [("weather", '{"city": "Rome"}')]
    assert (after.content, after.reasoning) == ("I wait.", reasoning)
    unclosed = await read(model, output(f"{opening}I call.{call}{call}", family=name))
    assert unclosed.calls == [("weather", '{"city": "Rome"}')] * 2
    assert unclosed.reasoning == "I call."
    cut = await read(model, output(f"{opening}I could{call} or", "truncated", family=name))
    assert (cut.content, cut.calls, cut.reason) == (None, [], "length")


async def test_an_answer_may_end_without_the_last_tag_of_a_call(
    make_model: Callable[[str], FamilyModel],
) -> None:
    model = make_model("qwen3-xml")
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    answer = await read(model, output(text, family="qwen3-xml"))
    assert answer.calls == [("weather", '{"city": "Rome"}')]
    cut = await read(model, output(text, "truncated", family="qwen3-xml"))
    assert cut.calls == []
    other = await read(model, output(f"{text}and so on", family="qwen3-xml"))
    assert other.calls == []
