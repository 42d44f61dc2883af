# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""OpenAI's Agents SDK with its models for Responses and for chat."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from cases import ANSWER, KEY, NATIVE_URL, QUESTION, SCRIPT_URL, WEATHER, raised, run
from person import Person

set_tracing_disabled(True)
MODELS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
loop = asyncio.new_event_loop()  # the connections of a client belong to a loop
asyncio.set_event_loop(loop)


def agents(url: str, model: str = "default", **fields: Any) -> list[Agent]:
    """Return an agent for each kind of model."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    cold = ModelSettings(temperature=0)
    return [
        Agent("guide", model=kind(model, client), model_settings=cold, **fields) for kind in MODELS
    ]


def wait(call: Coroutine[Any, Any, Any]) -> Any:
    return loop.run_until_complete(call)


@function_tool
def get_weather(city: str) -> str:
    """Return the temperature in a city."""
    return "18 degrees" if city == "Paris" else "unknown"


async def read(agent: Agent, question: str) -> tuple[int, Any]:
    """Stream an answer. Returns its number of events, and the answer."""
    result = Runner.run_streamed(agent, question)
    number = len([event async for event in result.stream_events()])
    return number, result.final_output


def chat() -> None:
    for agent in agents(NATIVE_URL):
        assert "Paris" in wait(Runner.run(agent, QUESTION)).final_output


def stream() -> None:
    for agent in agents(NATIVE_URL):
        number, answer = wait(read(agent, QUESTION))
        assert "Paris" in answer
        assert number > 4


def tools() -> None:
    for agent in agents(SCRIPT_URL, tools=[get_weather]):
        assert wait(Runner.run(agent, WEATHER)).final_output == ANSWER
        assert wait(read(agent, WEATHER))[1] == ANSWER


def conversation() -> None:
    for agent in agents(SCRIPT_URL, tools=[get_weather]):
        session = SQLiteSession(type(agent.model).__name__)
        for question in (WEATHER, "And now?", "Thanks."):
            assert wait(Runner.run(agent, question, session=session)).final_output == ANSWER


def structured() -> None:
    for agent in agents(NATIVE_URL, output_type=Person):
        answer = wait(Runner.run(agent, "Describe a person.")).final_output
        assert isinstance(answer, Person)


def error() -> None:
    for agent in agents(NATIVE_URL, "nobody"):
        raised(openai.NotFoundError, lambda agent=agent: wait(Runner.run(agent, QUESTION)))


if __name__ == "__main__":
    run(chat, stream, tools, conversation, structured, error)
