# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.54.0"]
# ///
"""The official `openai` library."""

import json
from typing import Any

import openai
from cases import (
    ANSWER,
    EMBEDDING_MODEL,
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

native = openai.OpenAI(base_url=f"{NATIVE_URL}/v1", api_key=KEY, max_retries=0)
script = openai.OpenAI(base_url=f"{SCRIPT_URL}/v1", api_key=KEY, max_retries=0)
ASK: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def chat() -> None:
    answer = native.chat.completions.create(model="default", messages=ASK, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens > answer.usage.completion_tokens > 0


def stream() -> None:
    options: Any = {"include_usage": True}
    fields: Any = {"model": "default", "messages": ASK, "temperature": 0}
    with native.chat.completions.stream(**fields, stream_options=options) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        answer = events.get_final_completion()
    assert "Paris" in "".join(deltas) == answer.choices[0].message.content
    assert len(deltas) > 1
    assert answer.usage is not None


def tools() -> None:
    fields: Any = {"model": "default", "tools": TOOLS}
    messages: Any = [{"role": "user", "content": WEATHER}]
    whole = script.chat.completions.create(**fields, messages=messages).choices[0]
    with script.chat.completions.stream(**fields, messages=messages) as events:
        streamed = events.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "One moment."
        assert getattr(choice.message, "reasoning_content") == REASONING  # noqa: B009
        (call,) = choice.message.tool_calls or []
        function: Any = getattr(call, "function", None)
        assert (function.name, json.loads(function.arguments)) == ("get_weather", {"city": "Paris"})
        result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
        answer = script.chat.completions.create(
            **fields, messages=[*messages, choice.message, result]
        )
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].finish_reason == "stop"


def structured() -> None:
    fields: Any = {"model": "default", "messages": ASK, "response_format": Person}
    whole = native.chat.completions.parse(**fields)
    with native.chat.completions.stream(**fields) as events:
        streamed = events.get_final_completion()
    for answer in (whole, streamed):
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"


def forced_call() -> None:
    tool: Any = openai.pydantic_function_tool(Person)
    named = {"type": "function", "function": {"name": "Person"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        fields: Any = {"model": "default", "messages": ASK, "tools": [tool], "tool_choice": choice}
        whole = native.chat.completions.parse(**fields).choices[0]
        with native.chat.completions.stream(**fields) as events:
            streamed = events.get_final_completion().choices[0]
        for answer in (whole, streamed):
            calls = answer.message.tool_calls or []
            assert calls
            assert all(isinstance(call.function.parsed_arguments, Person) for call in calls)
            assert answer.finish_reason == reason


def embeddings() -> None:
    texts = ["It is sunny.", "The sun shines.", "He drove away."]
    base64 = native.embeddings.create(model=EMBEDDING_MODEL, input=texts)
    floats = native.embeddings.create(model=EMBEDDING_MODEL, input=texts, encoding_format="float")
    assert [item.embedding for item in base64.data] == [item.embedding for item in floats.data]
    first, second, third = (item.embedding for item in base64.data)
    near, far = (sum(x * y for x, y in zip(first, other, strict=True)) for other in (second, third))
    assert near > far


def error() -> None:
    caught = raised(
        openai.NotFoundError, lambda: native.chat.completions.create(model="nobody", messages=ASK)
    )
    assert caught.code == "model_not_found"
    assert caught.request_id


if __name__ == "__main__":
    run(chat, stream, tools, structured, forced_call, embeddings, error)
