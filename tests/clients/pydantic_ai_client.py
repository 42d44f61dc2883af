# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[anthropic,openai]==2.68.0"]
# ///
"""pydantic-ai with its OpenAI and Anthropic models."""

import asyncio
from typing import Any

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
from person import Person
from pydantic_ai import Agent, Embedder, ModelHTTPError, NativeOutput, Tool
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

NATIVE = OpenAIProvider(base_url=f"{NATIVE_URL}/v1", api_key=KEY)
SCRIPT = OpenAIProvider(base_url=f"{SCRIPT_URL}/v1", api_key=KEY)
COLD: Any = {"temperature": 0}
loop = asyncio.new_event_loop()  # the connections of a provider belong to a loop
asyncio.set_event_loop(loop)


def get_weather(city: str) -> str:
    """Return the temperature in a city."""
    return "18 degrees" if city == "Paris" else "unknown"


WEATHER_TOOL = Tool(get_weather)  # marked as strict


def chat() -> None:
    agent = Agent(OpenAIChatModel("default", provider=NATIVE), model_settings=COLD)
    answer = agent.run_sync(QUESTION)
    assert "Paris" in answer.output


def stream() -> None:
    agent = Agent(OpenAIChatModel("default", provider=NATIVE), model_settings=COLD)

    async def ask() -> list[str]:
        async with agent.run_stream(QUESTION) as answer:
            return [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]

    pieces = loop.run_until_complete(ask())
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 1


def tools() -> None:
    agent = Agent(OpenAIChatModel("default", provider=SCRIPT), tools=[WEATHER_TOOL])
    assert agent.run_sync(WEATHER).output == ANSWER

    pieces = []

    async def handle(context: Any, events: Any) -> None:
        pieces.extend([event async for event in events])

    streamed = loop.run_until_complete(agent.run(WEATHER, event_stream_handler=handle))
    assert streamed.output == ANSWER
    assert len(pieces) > 4


def ask(form: Any) -> None:
    model = OpenAIChatModel("default", provider=NATIVE)
    agent: Any = Agent(model, output_type=form, model_settings=COLD, retries=0)
    assert isinstance(agent.run_sync("Describe a person.").output, Person)


def structured() -> None:
    ask(NativeOutput(Person))


def forced_call() -> None:
    ask(Person)


def embeddings() -> None:
    embedder = Embedder(OpenAIEmbeddingModel(EMBEDDING_MODEL, provider=NATIVE))
    first, second = embedder.embed_documents_sync(["It is sunny.", "He drove away."]).embeddings
    assert len(first) == len(second) == 384
    assert first != second


def error() -> None:
    agent = Agent(OpenAIChatModel("nobody", provider=NATIVE))
    caught = raised(ModelHTTPError, lambda: agent.run_sync(QUESTION))
    assert caught.status_code == 404


if __name__ == "__main__":
    run(chat, stream, tools, structured, forced_call, embeddings, error)
