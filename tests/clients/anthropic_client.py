# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.14.0"]
# ///
"""The official `anthropic` library."""

from typing import Any, Literal

import anthropic
from cases import (
    ANSWER,
    KEY,
    NATIVE_URL,
    PARAMETERS,
    QUESTION,
    REASONING,
    SCRIPT_URL,
    WEATHER,
    raised,
    run,
)
from person import Person
from pydantic import BaseModel

native = anthropic.Anthropic(base_url=NATIVE_URL, api_key=KEY, max_retries=0)
script = anthropic.Anthropic(base_url=SCRIPT_URL, api_key=KEY, max_retries=0)
ASK: Any = [{"role": "user", "content": QUESTION}]
FIELDS: Any = {"model": "default", "max_tokens": 200}
COLD: Any = {"temperature": 0}
TOOLS: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]


class City(BaseModel):
    """A city. Its schema has no bounds, because this library does not send them."""

    name: Literal["Paris", "London"]
    capital: bool


def chat() -> None:
    cached: Any = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    answer: Any = native.messages.create(**FIELDS, system=[cached], messages=ASK, extra_body=COLD)
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason == "end_turn"
    counted = native.messages.count_tokens(model="default", system=[cached], messages=ASK)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def stream() -> None:
    with native.messages.stream(**FIELDS, messages=ASK, extra_body=COLD) as events:
        pieces = list(events.text_stream)
        answer: Any = events.get_final_message()
    assert "Paris" in "".join(pieces) == answer.content[0].text
    assert len(pieces) > 1
    assert answer.usage.output_tokens > 1


def tools() -> None:
    messages: Any = [{"role": "user", "content": WEATHER}]
    whole: Any = script.messages.create(**FIELDS, tools=TOOLS, messages=messages)
    with script.messages.stream(**FIELDS, tools=TOOLS, messages=messages) as events:
        streamed: Any = events.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        thinking, text, call = message.content
        assert (thinking.thinking, text.text) == (REASONING, "One moment.")
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
        turns = [
            *messages,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        answer: Any = script.messages.create(**FIELDS, tools=TOOLS, messages=turns)
        assert [block.text for block in answer.content] == [ANSWER]


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Return the temperature in a city."""
    return "18 degrees" if city == "Paris" else "unknown"


def tool_runner() -> None:
    messages: Any = [{"role": "user", "content": WEATHER}]
    whole = script.beta.messages.tool_runner(**FIELDS, tools=[get_weather], messages=messages)
    streamed = script.beta.messages.tool_runner(
        **FIELDS, tools=[get_weather], messages=messages, stream=True
    )
    for runner in (whole, streamed):
        answer: Any = runner.until_done()
        assert [block.text for block in answer.content] == [ANSWER]


def structured() -> None:
    answer = native.messages.parse(**FIELDS, messages=ASK, output_format=City)
    assert isinstance(answer.parsed_output, City)


def forced_call() -> None:
    tool: Any = {"name": "person", "input_schema": Person.model_json_schema()}
    for choice in ({"type": "any"}, {"type": "tool", "name": "person"}):
        forced: Any = native.messages.create(
            **FIELDS, messages=ASK, tools=[tool], tool_choice=choice
        )
        first = forced.content[0]  # more calls may follow, the last cut by `max_tokens`
        assert Person.model_validate(first.input)


def error() -> None:
    caught = raised(
        anthropic.NotFoundError,
        lambda: native.messages.create(**FIELDS | {"model": "nobody"}, messages=ASK),
    )
    assert caught.body["error"]["type"] == "not_found_error"
    assert caught.request_id


if __name__ == "__main__":
    run(chat, stream, tools, tool_runner, structured, forced_call, error)
