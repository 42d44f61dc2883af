"""Stored responses of whole deployments: several frontends, restarts, structured output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
from tests.conftest import Start, until

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LINES = (
    {"when": "<tool_response>", "text": "It is 18 degrees."},
    {"when": "weather", "text": f"<think>\nHm.\n</think>\n\nOne moment.\n{CALL}"},
)


class Weather(pydantic.BaseModel):
    """The form of a structured answer."""

    city: Literal["Paris"]
    sunny: bool


@contextmanager
def open_client(port: int) -> Iterator[openai.OpenAI]:
    """Yield a client whose every request has a connection of its own."""
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(
        base_url=url, api_key="any", max_retries=0, default_headers={"connection": "close"}
    ) as client:
        yield client


def write_script(folder: Path) -> Path:
    path = folder / "script.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_a_tool_loop_of_two_turns(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    deployment = start("out=script", tiny_model, "--script", script, "--tool-format", "hermes")
    with open_client(deployment.port) as client:
        with client.responses.stream(
            model="default", input="weather in Paris?", tools=[TOOL]
        ) as stream:
            first = stream.get_final_response()
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        call: Any = first.output[2]
        assert json.loads(call.arguments) == {"city": "Paris"}
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18"}
        by_id = client.responses.create(
            model="default", input=[output], tools=[TOOL], previous_response_id=first.id
        )
        question: Any = {"role": "user", "content": "weather in Paris?"}
        items: Any = [item.to_dict() for item in first.output]
        by_items = client.responses.create(
            model="default", input=[question, *items, output], tools=[TOOL], store=False
        )
        assert by_id.output_text == by_items.output_text == "It is 18 degrees."


def check_a_stream_in_the_background(client: openai.OpenAI) -> None:
    """Check that all frontends continue a stream that its client has left."""
    stream: Any = client.responses.create(
        model="default", input="long", max_output_tokens=500, background=True, stream=True
    )
    begun = next(iter(stream)).response
    stream.close()
    readings: list[Any] = [
        list(client.responses.retrieve(begun.id, stream=True, starting_after=0)) for _ in range(4)
    ]
    for events in readings:
        assert events == readings[0]
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(1, len(events) + 1))
        assert events[-1].response == client.responses.retrieve(begun.id)
        deltas = [event.delta for event in events if event.type.endswith("text.delta")]
        assert "".join(deltas) == events[-1].response.output_text


def test_ids_are_known_to_all_frontends_and_after_a_restart(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    name = f"responses-{tmp_path.name}"
    arguments = ("out=mock", tiny_model, "--speedup-ratio", "1000", "--deployment", name)
    deployment = start(*arguments, "--http-workers", "2")
    until(lambda: {deployment.get("/health")[0] for _ in range(10)} == {200})  # both frontends
    with open_client(deployment.port) as client:
        parsed = client.responses.parse(model="default", input="Paris?", text_format=Weather)
        assert parsed.output_parsed is not None
        assert parsed.output_parsed.city == "Paris"
        turns = [client.responses.create(model="default", input="turn 0", max_output_tokens=4)]
        for number in range(1, 8):
            turns.append(
                client.responses.create(
                    model="default",
                    input=f"turn {number}",
                    max_output_tokens=4,
                    previous_response_id=turns[-1].id,
                )
            )
        for turn in turns:
            assert client.responses.retrieve(turn.id).output_text == turn.output_text
        running = client.responses.create(
            model="default", input="long", max_output_tokens=7000, background=True
        )
        states = {"in_progress", "incomplete", "cancelled"}
        assert client.responses.cancel(running.id).status in states
        until(lambda: client.responses.retrieve(running.id).status != "in_progress")
        check_a_stream_in_the_background(client)
    deployment.stop()
    deployment = start(*arguments)
    with open_client(deployment.port) as client:
        last = client.responses.create(
            model="default",
            input="again",
            max_output_tokens=4,
            previous_response_id=turns[-1].id,
        )
        items = client.responses.input_items.list(last.id, limit=100, order="asc").data
        assert len(items) == 2 * len(turns) + 1
