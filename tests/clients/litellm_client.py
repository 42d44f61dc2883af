# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm==1.106.2", "mcp"]
# ///
"""LiteLLM as a library."""

import json
from typing import Any

import litellm
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

ASK: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
NATIVE: Any = {
    "model": "openai/default",
    "api_base": f"{NATIVE_URL}/v1",
    "api_key": KEY,
    "temperature": 0,
    "max_retries": 0,
}
SCRIPT: Any = NATIVE | {"api_base": f"{SCRIPT_URL}/v1"}


def chat() -> None:
    answer: Any = litellm.completion(**NATIVE, messages=ASK)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def stream() -> None:
    options = {"include_usage": True}
    chunks: Any = list(
        litellm.completion(**NATIVE, messages=ASK, stream=True, stream_options=options)
    )
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "Paris" in "".join(text or "" for text in texts)
    assert len(texts) > 2


def tools() -> None:
    messages: Any = [{"role": "user", "content": WEATHER}]
    whole: Any = litellm.completion(**SCRIPT, messages=messages, tools=TOOLS)
    chunks: Any = litellm.completion(**SCRIPT, messages=messages, tools=TOOLS, stream=True)
    streamed: Any = litellm.stream_chunk_builder(list(chunks), messages=messages)
    for choice in (whole.choices[0], streamed.choices[0]):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == REASONING
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
        answer: Any = litellm.completion(
            **SCRIPT, messages=[*messages, choice.message.model_dump(), result], tools=TOOLS
        )
        assert answer.choices[0].message.content == ANSWER


def structured() -> None:
    answer: Any = litellm.completion(**NATIVE, messages=ASK, response_format=Person)
    assert Person.model_validate_json(answer.choices[0].message.content)


def embeddings() -> None:
    fields: Any = NATIVE | {"model": f"openai/{EMBEDDING_MODEL}"}
    fields.pop("temperature")
    answer: Any = litellm.embedding(**fields, input=["It is sunny.", "He drove away."])
    first, second = (item["embedding"] for item in answer.data)
    assert len(first) == len(second) == 384
    assert first != second


def error() -> None:
    caught = raised(
        litellm.NotFoundError,
        lambda: litellm.completion(**NATIVE | {"model": "openai/nobody"}, messages=ASK),
    )
    assert "nobody" in str(caught)


if __name__ == "__main__":
    run(chat, stream, tools, structured, embeddings, error)
