# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain-anthropic==1.7.7", "langchain-openai==1.7.3"]
# ///
"""LangChain: `langchain-openai` and `langchain-anthropic`."""

from typing import Any

import anthropic
import openai
from cases import (
    ANSWER,
    EMBEDDING_MODEL,
    KEY,
    NATIVE_URL,
    QUESTION,
    SCRIPT_URL,
    WEATHER,
    raised,
    run,
)
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from person import Person

SETTINGS: Any = {"model": "default", "api_key": KEY, "max_retries": 0, "temperature": 0}
native = ChatOpenAI(base_url=f"{NATIVE_URL}/v1", **SETTINGS)
script = ChatOpenAI(base_url=f"{SCRIPT_URL}/v1", **SETTINGS)
native_messages = ChatAnthropic(base_url=NATIVE_URL, max_tokens=200, **SETTINGS)
script_messages = ChatAnthropic(base_url=SCRIPT_URL, max_tokens=200, **SETTINGS)


@tool
def get_weather(city: str) -> str:
    """Return the temperature in a city."""
    return "18 degrees" if city == "Paris" else "unknown"


def chat() -> None:
    for model in (native, native_messages):
        answer = model.invoke(QUESTION)
        assert "Paris" in answer.text
        assert answer.usage_metadata["output_tokens"] > 0


def stream() -> None:
    for model in (native, native_messages):
        pieces = [piece.text for piece in model.stream(QUESTION)]
        assert "Paris" in "".join(pieces)
        assert len(pieces) > 2


def tools() -> None:
    for unbound in (script, script_messages):
        model = unbound.bind_tools([get_weather])
        messages: list[Any] = [HumanMessage(WEATHER)]
        whole = model.invoke(messages)
        pieces = list(model.stream(messages))
        streamed = pieces[0]
        for piece in pieces[1:]:
            streamed += piece
        for message in (whole, streamed):
            (call,) = message.tool_calls
            answer = model.invoke([*messages, message, get_weather.invoke(call)])
            assert answer.text == ANSWER


def ask(method: Any) -> None:
    model = native.with_structured_output(Person, method=method)
    assert isinstance(model.invoke("Describe a person."), Person)


def structured() -> None:
    ask("json_schema")


def forced_call() -> None:
    ask("function_calling")


def embeddings() -> None:
    url = f"{NATIVE_URL}/v1"
    model = OpenAIEmbeddings(
        base_url=url, api_key=KEY, model=EMBEDDING_MODEL, check_embedding_ctx_length=False
    )
    first, second = model.embed_documents(["It is sunny.", "He drove away."])
    assert len(first) == len(second) == 384
    assert first != second


def error() -> None:
    for model, expected in (
        (native, openai.NotFoundError),
        (native_messages, anthropic.NotFoundError),
    ):
        caught = raised(expected, lambda model=model: model.bind(model="nobody").invoke(QUESTION))
        assert "nobody" in str(caught)


if __name__ == "__main__":
    run(chat, stream, tools, structured, forced_call, embeddings, error)
