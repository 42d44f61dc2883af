# /// script
# requires-python = ">=3.11"
# dependencies = ["llama-index-embeddings-openai-like", "llama-index-llms-openai-like==0.8.1"]
# ///
"""LlamaIndex: `llama-index-llms-openai-like`."""

import asyncio
from typing import Any

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
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from person import Person

SETTINGS: Any = {
    "model": "default",
    "api_key": KEY,
    "is_chat_model": True,
    "is_function_calling_model": True,
    "max_retries": 0,
    "temperature": 0,
    "context_window": 8192,
}
native = OpenAILike(api_base=f"{NATIVE_URL}/v1", **SETTINGS)
script = OpenAILike(api_base=f"{SCRIPT_URL}/v1", **SETTINGS)
ASK = [ChatMessage(role="user", content=QUESTION)]


def get_weather(city: str) -> str:
    """Return the temperature in a city."""
    return "18 degrees" if city == "Paris" else "unknown"


def chat() -> None:
    assert "Paris" in (native.chat(ASK).message.content or "")


def stream() -> None:
    pieces = [piece.delta or "" for piece in native.stream_chat(ASK)]
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 2


def tools() -> None:
    for streaming in (True, False):
        agent = FunctionAgent(tools=[get_weather], llm=script, streaming=streaming)

        async def ask(agent: Any = agent) -> str:
            return str(await agent.run(WEATHER))

        assert asyncio.run(ask()) == ANSWER


def structured() -> None:
    answer = native.as_structured_llm(Person).chat(ASK)
    assert isinstance(answer.raw, Person)


def embeddings() -> None:
    model = OpenAILikeEmbedding(
        model_name=EMBEDDING_MODEL, api_base=f"{NATIVE_URL}/v1", api_key=KEY
    )
    first, second = model.get_text_embedding_batch(["It is sunny.", "He drove away."])
    assert len(first) == len(second) == 384
    assert first != second


def error() -> None:
    model = OpenAILike(api_base=f"{NATIVE_URL}/v1", **SETTINGS | {"model": "nobody"})
    caught = raised(openai.NotFoundError, lambda: model.chat(ASK))
    assert caught.code == "model_not_found"


if __name__ == "__main__":
    run(chat, stream, tools, structured, embeddings, error)
