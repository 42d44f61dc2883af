"""Streams of responses in the background, read by the official OpenAI client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from dynamo.application.responses import event_log, handler
from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.text import ArgumentsDelta, CallBegun, ChatRequest, TextFinish, TextReply
from dynamo.core.values import Started

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
async def client(site: Any, monkeypatch: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    monkeypatch.setattr(event_log, "POLL_S", 0.01)
    monkeypatch.setattr(handler, "RENEWAL_S", 0.01)
    async with openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="k", max_retries=0) as client:
        yield client
    await site.application.close(0)


class HalfAnswer:
    """Answers with a text and half a call, then waits for `go_on`."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.error: Exception | None = None

    async def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> None:
        reply.prompt(7)
        reply.begin(0, Started("w1"))
        reply.text(0, "I look.")
        reply.event(0, CallBegun(0, "call_1", "weather"))
        reply.event(0, ArgumentsDelta(0, '{"city": '))
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        reply.event(0, ArgumentsDelta(0, '"Ro'))
        reply.finish(0, TextFinish("length", 9))


@pytest.fixture
def half(site: Any, monkeypatch: Any) -> HalfAnswer:
    half = HalfAnswer()
    monkeypatch.setattr(site.processor, "chat", half.chat)
    return half


async def start(client: openai.AsyncOpenAI) -> Any:
    return await client.responses.create(
        model="words", input="Rome?", tools=[WEATHER], background=True, stream=True
    )


async def read_to_the_call(client: openai.AsyncOpenAI) -> list[Any]:
    """Return the events of a new stream up to the half call, and leave the stream."""
    stream, events = await start(client), list[Any]()
    async for event in stream:
        events.append(event)
        if event.type == "response.function_call_arguments.delta":
            break
    await stream.close()
    return events


async def read(client: openai.AsyncOpenAI, response_id: str, **options: Any) -> list[Any]:
    stream: Any = await client.responses.retrieve(response_id, stream=True, **options)
    return [event async for event in stream]


async def test_a_stream_is_read_again_from_any_event(
    client: openai.AsyncOpenAI, half: HalfAnswer
) -> None:
    half.go_on.set()
    events = [event async for event in await start(client)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[0].response.background
    response_id = events[0].response.id
    assert await client.responses.retrieve(response_id) == events[-1].response
    assert await read(client, response_id) == events
    for number in (0, 4, len(events) - 2, len(events) - 1, 99):
        assert await read(client, response_id, starting_after=number) == events[number + 1 :]
    async with client.responses.stream(response_id=response_id, starting_after=4) as stream:
        assert [event.sequence_number async for event in stream] == list(range(5, len(events)))
    for wrong in ("x", "-", "-5", "-0", 10**9):
        with pytest.raises(openai.BadRequestError, match="starting_after"):
            await read(client, response_id, starting_after=wrong)


async def test_a_deleted_response_ends_its_readers_by_an_error_of_the_api(
    client: openai.AsyncOpenAI, half: HalfAnswer
) -> None:
    begun = await read_to_the_call(client)
    response_id, last = begun[0].response.id, begun[-1].sequence_number
    reader: Any = await client.responses.retrieve(response_id, stream=True)
    events = []
    async for event in reader:
        events.append(event)
        if event.sequence_number == last:
            await client.responses.delete(response_id)
    assert events[:-1] == begun
    error = events[-1]
    assert (error.type, error.code, error.sequence_number) == ("error", "not_found", last + 1)
    assert "not found" in error.message


async def test_a_response_goes_on_without_its_client(
    client: openai.AsyncOpenAI, half: HalfAnswer
) -> None:
    events = await read_to_the_call(client)
    response_id, last = events[0].response.id, events[-1].sequence_number
    assert (await client.responses.retrieve(response_id)).status == "in_progress"
    reader = asyncio.create_task(read(client, response_id, starting_after=last))
    whole = asyncio.create_task(read(client, response_id))
    half.go_on.set()
    events += await reader
    assert events == await whole
    call = events[-1].response.output[-1]
    assert (call.arguments, call.status) == ('{"city": "Ro', "incomplete")


async def test_a_stream_that_is_cancelled_keeps_its_items(
    client: openai.AsyncOpenAI, half: HalfAnswer
) -> None:
    stream, events = await start(client), list[Any]()
    async for event in stream:
        events.append(event)
        if event.type == "response.function_call_arguments.delta":
            await client.responses.cancel(events[0].response.id)
    assert events[-1].type == "response.cancelled"
    response = await client.responses.retrieve(events[0].response.id)
    assert response.status == "cancelled"
    items = [(item.type, getattr(item, "status", "")) for item in response.output]
    assert items == [("message", "completed"), ("function_call", "incomplete")]
    assert (await read(client, response.id))[-1].type == "response.cancelled"


async def test_a_stream_that_fails_keeps_its_items(
    client: openai.AsyncOpenAI, half: HalfAnswer
) -> None:
    events = await read_to_the_call(client)
    half.error = WorkerFailed("the worker died")
    half.go_on.set()
    rest = await read(client, events[0].response.id, starting_after=events[-1].sequence_number)
    (failed,) = rest
    assert failed.type == "response.failed"
    assert failed.response.output[-1].arguments == '{"city": '
    assert await client.responses.retrieve(failed.response.id) == failed.response


async def test_other_responses_are_not_streamed_again(
    client: openai.AsyncOpenAI, half: HalfAnswer
) -> None:
    half.go_on.set()
    fields: Any
    for fields in ({}, {"background": True}):
        response = await client.responses.create(model="words", input="x", **fields)
        with pytest.raises(openai.BadRequestError, match="stream"):
            await read(client, response.id)
