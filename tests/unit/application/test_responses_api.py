"""The routes of /v1/responses, read by the official OpenAI client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from dynamo.application.openai.chat_messages import MAX_MESSAGES
from dynamo.core.context import Context
from dynamo.core.text import (
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ChatRequest,
    ReasoningDelta,
    TextFinish,
    TextReply,
)
from dynamo.core.values import Started

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
async def client(site: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="k", max_retries=0) as client:
        yield client
    await site.application.close(0)


@pytest.fixture
def answer_with_call(site: Any, monkeypatch: Any) -> Any:
    """Return a function that makes the site answer with reasoning, text and a call."""

    def install(*, cut: bool = False) -> None:
        async def chat(request: ChatRequest, context: Context, reply: TextReply) -> None:
            site.processor.requests.append(request)
            reply.prompt(7)
            reply.begin(0, Started("w1", cached_tokens=2))
            reply.event(0, ReasoningDelta("Hm, "))
            reply.event(0, ReasoningDelta("weather."))
            reply.text(0, "Let me ")
            reply.text(0, "look.")
            reply.event(0, CallBegun(0, "call_1", "weather"))
            reply.event(0, ArgumentsDelta(0, '{"city": '))
            if not cut:
                reply.event(0, ArgumentsDelta(0, '"Rome"}'))
                reply.event(0, CallEnded(0))
            reply.finish(0, TextFinish("length" if cut else "tool_calls", 9, reasoning_tokens=4))

        monkeypatch.setattr(site.processor, "chat", chat)

    return install


async def test_a_text(client: openai.AsyncOpenAI, site: Any) -> None:
    answer = await client.responses.create(
        model="words", input="one two three", instructions="Repeat.", metadata={"a": "b"}
    )
    assert answer.output_text == "one two three "
    assert answer.status == "incomplete"  # the processor ends every answer by its length
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert (answer.usage.input_tokens, answer.usage.total_tokens) == (3, 6)
    assert (answer.metadata, answer.temperature, answer.top_p) == ({"a": "b"}, 0.7, 0.9)
    messages = site.processor.requests[-1].messages
    assert [message["role"] for message in messages] == ["system", "user"]


async def test_the_object_has_every_field_of_the_client_s_type(
    client: openai.AsyncOpenAI,
) -> None:
    raw = await client.responses.with_raw_response.create(model="words", input="hi")
    assert set(Response.model_fields) <= set(raw.http_response.json())


async def test_a_whole_answer_with_reasoning_and_a_call(
    client: openai.AsyncOpenAI, answer_with_call: Any
) -> None:
    answer_with_call()
    answer = await client.responses.create(model="words", input="Rome?", tools=[WEATHER])
    reasoning, message, call = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm, weather."
    assert message.type == "message"
    assert answer.output_text == "Let me look."
    assert call.type == "function_call"
    assert (call.call_id, call.name, call.arguments) == ("call_1", "weather", '{"city": "Rome"}')
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 4


async def test_a_stream_has_the_events_of_its_items_in_order(
    client: openai.AsyncOpenAI, answer_with_call: Any
) -> None:
    answer_with_call()
    async with client.responses.stream(
        model="words", input="Rome?", tools=[{**WEATHER, "strict": True}]
    ) as stream:
        events: list[Any] = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    part = ["response.content_part.added", "response.content_part.done"]
    item = ["response.output_item.added", "response.output_item.done"]
    text = [f"response.output_text.{name}" for name in ("delta", "delta", "done")]
    reasoning = [f"response.reasoning_text.{name}" for name in ("delta", "delta", "done")]
    call = [f"response.function_call_arguments.{name}" for name in ("delta", "delta", "done")]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        *[item[0], part[0], *reasoning, part[1], item[1]],
        *[item[0], part[0], *text, part[1], item[1]],
        *[item[0], *call, item[1]],
        "response.completed",
    ]
    assert [entry.type for entry in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Let me look."
    assert final.output[2].arguments == '{"city": "Rome"}'
    stored = await client.responses.retrieve(final.id)
    assert [entry.id for entry in stored.output] == [entry.id for entry in final.output]


async def test_a_call_that_is_cut_is_incomplete(
    client: openai.AsyncOpenAI, site: Any, answer_with_call: Any
) -> None:
    answer_with_call(cut=True)
    whole = await client.responses.create(model="words", input="Rome?", tools=[WEATHER])
    stream = await client.responses.create(
        model="words", input="Rome?", tools=[WEATHER], stream=True
    )
    events: list[Any] = [event async for event in stream]
    *_, item_done, last = events
    assert item_done.item.status == "incomplete"
    assert last.type == "response.incomplete"
    stored = await client.responses.retrieve(whole.id)
    assert stored.output == whole.output
    for response in (whole, last.response):
        statuses = [(item.type, item.status) for item in response.output]
        kinds = ("reasoning", "message", "function_call")
        assert statuses == list(zip(kinds, ("completed", "completed", "incomplete"), strict=True))
        assert response.output[2].arguments == item_done.item.arguments == '{"city": '
        assert response.incomplete_details.reason == "max_output_tokens"
    turn = await client.responses.create(
        model="words", input="Go on.", previous_response_id=whole.id
    )
    assert turn.previous_response_id == whole.id
    for previous in ({"previous_response_id": whole.id}, {}):  # stored, or sent back
        sent = [] if previous else [item.to_dict() for item in whole.output]
        await client.responses.create(
            model="words", input=[*sent, {"role": "user", "content": "Go on."}], **previous
        )
        assert "tool_calls" not in site.processor.requests[-1].messages[-2]


@pytest.mark.parametrize("stored", [True, False])
async def test_a_tool_loop_of_two_turns(
    client: openai.AsyncOpenAI, site: Any, answer_with_call: Any, stored: bool
) -> None:
    answer_with_call()
    first = await client.responses.create(
        model="words", input="Rome?", tools=[WEATHER], store=stored, instructions="Be short."
    )
    output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    if stored:
        fields: Any = {"input": [output], "previous_response_id": first.id}
    else:
        items = [item.to_dict() for item in first.output]
        fields = {"input": [{"role": "user", "content": "Rome?"}, *items, output], "store": False}
    await client.responses.create(model="words", tools=[WEATHER], **fields)
    question, answer, result = site.processor.requests[-1].messages
    assert question == {"role": "user", "content": "Rome?"}
    assert answer["content"] == "Let me look."
    assert answer["reasoning_content"] == "Hm, weather."
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert answer["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert (result["role"], result["content"]) == ("tool", "sunny")
    if not stored:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)


async def test_references_to_stored_items(
    client: openai.AsyncOpenAI, site: Any, answer_with_call: Any
) -> None:
    answer_with_call()
    first = await client.responses.create(model="words", input="Rome?", tools=[WEATHER])
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    await client.responses.create(model="words", input=[*references, output])
    assert [m["role"] for m in site.processor.requests[-1].messages] == ["assistant", "tool"]
    with pytest.raises(openai.NotFoundError, match="no stored item"):
        await client.responses.create(
            model="words", input=[{"type": "item_reference", "id": "msg_x"}]
        )


async def test_an_item_is_referenced_once(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="words", input="one")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    with pytest.raises(openai.BadRequestError, match="more than once"):
        await client.responses.create(model="words", input=[reference, reference])
    body = {"model": "words", "input": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}
    with pytest.raises(openai.BadRequestError, match="limit"):
        await client.post("/responses", body=body, cast_to=object)


async def test_a_name_that_looks_like_a_field_is_a_wrong_name(client: openai.AsyncOpenAI) -> None:
    name = "messages[0].tool_calls[9].function.arguments"
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(
            model="words",
            input="x",
            tools=[WEATHER],
            tool_choice={"type": "function", "name": name},
        )


async def test_stored_responses_are_read_listed_and_deleted(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="words", input="one")
    second = await client.responses.create(
        model="words", input="two", previous_response_id=first.id
    )
    assert (await client.responses.retrieve(second.id)).to_dict() == second.to_dict()
    listed = await client.responses.input_items.list(second.id, order="asc")
    texts = [item.content[0].text for item in listed.data]  # type: ignore[union-attr]
    assert texts == ["one", "one ", "two"]
    page = await client.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in page.data] == [item.id for item in reversed(listed.data[1:])]
    assert page.has_more
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found\."):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="words", input="x", previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_responses_of_another_key_are_unknown(open_site: Any) -> None:
    site = await open_site(api_keys=("a", "b"))
    url = site.url + "/v1"
    async with (
        openai.AsyncOpenAI(base_url=url, api_key="a", max_retries=0) as client,
        openai.AsyncOpenAI(base_url=url, api_key="b", max_retries=0) as other,
    ):
        answer = await client.responses.create(model="words", input="secret")
        for refused in (
            other.responses.retrieve(answer.id),
            other.responses.delete(answer.id),
            other.responses.input_items.list(answer.id),
            other.responses.create(model="words", input="x", previous_response_id=answer.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await refused
        assert (await client.responses.retrieve(answer.id)).id == answer.id
    await site.application.close(0)


async def test_a_response_in_the_background(client: openai.AsyncOpenAI, site: Any) -> None:
    site.processor.gate.clear()
    answer = await client.responses.create(model="words", input="one two", background=True)
    assert (answer.status, answer.background) == ("in_progress", True)
    with pytest.raises(openai.BadRequestError, match="still in progress"):
        await client.responses.create(model="words", input="x", previous_response_id=answer.id)
    site.processor.gate.set()
    while (answer := await client.responses.retrieve(answer.id)).status == "in_progress":
        await asyncio.sleep(0.01)
    assert (answer.status, answer.output_text) == ("incomplete", "one two ")
    assert (await client.responses.cancel(answer.id)).status == "incomplete"


async def test_a_response_in_the_background_is_cancelled(
    client: openai.AsyncOpenAI, site: Any
) -> None:
    site.processor.gate.clear()
    answer = await client.responses.create(model="words", input="one two", background=True)
    await site.processor.entered.wait()
    assert (await client.responses.cancel(answer.id)).status == "cancelled"
    await site.processor.cancelled.wait()
    assert (await client.responses.retrieve(answer.id)).status == "cancelled"
    site.processor.gate.set()
    plain = await client.responses.create(model="words", input="one", extra_body={"store": True})
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await client.responses.cancel(plain.id)


async def test_a_response_in_the_background_that_fails(
    client: openai.AsyncOpenAI, site: Any
) -> None:
    site.processor.fails = "after"
    answer = await client.responses.create(model="words", input="one two three", background=True)
    while (answer := await client.responses.retrieve(answer.id)).status == "in_progress":
        await asyncio.sleep(0.01)
    assert answer.status == "failed"
    assert answer.error is not None
    assert "the worker died" in answer.error.message


async def test_a_stream_that_fails_ends_with_the_failed_response(
    client: openai.AsyncOpenAI, site: Any
) -> None:
    site.processor.fails = "after"
    stream = await client.responses.create(model="words", input="one two three", stream=True)
    events: list[Any] = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert "the worker died" in events[-1].response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))
    failed = events[-1].response
    assert (failed.output_text, failed.output[0].status) == ("one two ", "incomplete")
    assert await client.responses.retrieve(failed.id) == failed


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer = await client.responses.create(
        model="words", input="one two", top_logprobs=2, include=include
    )
    (message,) = answer.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [entry.token for entry in part.logprobs] == ["one ", "two "]
    assert len(part.logprobs[0].top_logprobs) == 2
    stream = await client.responses.create(
        model="words", input="one two", top_logprobs=2, include=include, stream=True
    )
    events: list[Any] = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [delta.logprobs[0].token for delta in deltas] == ["one ", "two "]


async def test_input_tokens(client: openai.AsyncOpenAI) -> None:
    counted = await client.responses.input_tokens.count(model="words", input="one two three")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 3)


async def test_fields_reach_the_processor(client: openai.AsyncOpenAI, site: Any) -> None:
    schema = {"type": "object", "properties": {}}
    response = await client.responses.create(
        model="words",
        input="hi",
        max_output_tokens=5,
        temperature=0.1,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        tools=[WEATHER],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]},
        parallel_tool_calls=False,
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        service_tier="flex",
        safety_identifier="s",
    )
    assert response.service_tier == "flex"
    request = site.processor.requests[-1]
    assert request.options.max_tokens == 5
    assert request.options.sampling.temperature == 0.1
    assert request.options.structured.kind == "json_schema"
    assert request.template_args["reasoning_effort"] == "low"
    assert request.callable_tools == ("weather",)
    assert not request.parallel_tool_calls
    function = {name: WEATHER[name] for name in ("name", "description", "parameters")}
    assert request.tools == ({"type": "function", "function": function},)


async def test_what_does_not_exist(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="compacted"):
        await client.post("/responses/compact", body={"model": "words"}, cast_to=object)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_x")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="words", input="x", previous_response_id="resp_x")
    with pytest.raises(openai.NotFoundError, match="no model"):
        await client.responses.create(model="nobody", input="x")
    answer = await client.responses.create(model="words", input="x")
    with pytest.raises(openai.BadRequestError, match="not created with"):
        await client.responses.retrieve(answer.id, stream=True)
    for limit in (101, int("9" * 4000)):
        with pytest.raises(openai.BadRequestError, match="limit"):
            await client.responses.input_items.list(answer.id, limit=limit)
