"""Streamed answers of both clients: events, errors, timeouts, closing."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_client import (
    DynamoAPIError,
    DynamoClient,
    DynamoConfig,
    DynamoConnectionError,
    DynamoTimeoutError,
)


async def test_a_stream_ends_at_done_and_its_connection_is_reused(
    make_client: Any, server: Any, parts: Any
) -> None:
    whole = parts.stream(parts.event(parts.delta("a")), parts.event(parts.delta("b")))
    server.add_answers(whole, whole)
    client = make_client()

    assert await client.texts() == ["a", "b"]
    assert await client.texts() == ["a", "b"]
    assert server.connections == 1
    assert server.requests[0]["body"]["stream"] is True


async def test_text_survives_any_split(make_client: Any, server: Any, parts: Any) -> None:
    texts = ["é", "漢字", "🙂🙂", "plain"]
    whole = parts.stream(*(parts.event(parts.delta(text)) for text in texts))
    server.add_answers(tuple(whole[at : at + 1] for at in range(len(whole))))
    client = make_client()

    assert await client.texts() == texts


async def test_http_chunks_and_events_are_independent(
    make_client: Any, server: Any, parts: Any
) -> None:
    events = b": hello\r\n\r\n" + parts.event(parts.delta("a")) + b'data: {"choices":\ndata: [{'
    rest = b'"delta": {"content": "b"}}]}\r\n\r\nevent: x\ndata:[DONE]\n\ndata: never\n\n'
    body = parts.chunk(events) + parts.chunk(rest[:5]) + parts.chunk(rest[5:])
    server.add_answers(parts.STREAM_HEAD + body + parts.LAST_CHUNK)
    client = make_client()

    assert await client.texts() == ["a", "b"]


async def test_bad_json_is_skipped(make_client: Any, server: Any, parts: Any) -> None:
    bad = [parts.event(b"{oops"), parts.event(b"\xff\xfe"), parts.event(b"[1]")]
    server.add_answers(parts.stream(*bad, parts.event(parts.delta("good"))))
    client = make_client()

    assert await client.texts() == ["good"]


async def test_an_error_event_raises_after_the_chunks_before_it(
    make_client: Any, server: Any, parts: Any
) -> None:
    error = {"error": {"message": "the worker died", "code": "worker_failed", "hint": "ask again"}}
    server.add_answers(parts.stream(parts.event(parts.delta("a")), parts.event(error)))
    client = make_client()
    seen: list[str] = []

    with pytest.raises(DynamoAPIError, match="the worker died") as caught:
        await client.texts(into=seen)
    assert seen == ["a"]
    assert (caught.value.code, caught.value.hint) == ("worker_failed", "ask again")
    assert caught.value.request_id == "r1"
    assert client.network.pauses == []


async def test_a_rejection_behind_an_early_head_is_retried(
    make_client: Any, server: Any, parts: Any
) -> None:
    error = {"error": {"message": "too busy", "code": "overloaded", "status": 503}}
    whole = parts.stream(b": keep-alive\n", parts.event(parts.delta("a")))
    server.add_answers(parts.stream(b": keep-alive\n", parts.event(error)), whole)
    client = make_client()

    assert await client.texts() == ["a"]
    assert len(client.network.pauses) == 1


async def test_a_stream_that_breaks_before_its_first_event_is_retried(
    make_client: Any, server: Any, parts: Any
) -> None:
    whole = parts.stream(parts.event(parts.delta("a")))
    server.add_answers((parts.STREAM_HEAD, parts.RESET), parts.reply(503, {}), whole)
    client = make_client()

    assert await client.texts() == ["a"]
    assert len(client.network.pauses) == 2


async def test_a_stream_that_breaks_later_is_not_retried(
    make_client: Any, server: Any, parts: Any
) -> None:
    beginning = parts.STREAM_HEAD + parts.chunk(parts.event(parts.delta("a")))
    server.add_answers((beginning, parts.CLOSE))
    client = make_client()
    seen: list[str] = []

    with pytest.raises(DynamoConnectionError, match="ended before the reply did"):
        await client.texts(into=seen)
    assert seen == ["a"]
    assert client.network.pauses == []


async def test_silence_within_a_stream_is_a_timeout(
    make_client: Any, server: Any, parts: Any
) -> None:
    beginning = parts.STREAM_HEAD + parts.chunk(parts.event(parts.delta("a")))
    server.add_answers((beginning, parts.HOLD))
    client = make_client(timeout=0.1)
    seen: list[str] = []

    with pytest.raises(DynamoTimeoutError):
        await client.texts(into=seen)
    assert seen == ["a"]
    await server.disconnected.wait()


async def test_leaving_the_loop_closes_the_connection(server: Any, parts: Any) -> None:
    beginning = parts.STREAM_HEAD + parts.chunk(parts.event(parts.delta("a")))
    server.add_answers((beginning, parts.HOLD))
    async with DynamoClient(DynamoConfig(server.url)) as client:
        async for _ in await client.chat_completion([], stream=True):
            break
        await server.disconnected.wait()


async def test_a_referenced_stream_closes_by_async_with(server: Any, parts: Any) -> None:
    beginning = parts.STREAM_HEAD + parts.chunk(parts.event(parts.delta("a")))
    server.add_answers((beginning, parts.HOLD))
    async with DynamoClient(DynamoConfig(server.url)) as client:
        async with await client.chat_completion([], stream=True) as stream:
            assert stream.request_id == "r1"
            assert (await anext(stream))["choices"]
        await server.disconnected.wait()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_reply_that_is_no_stream_is_an_error(
    make_client: Any, server: Any, parts: Any
) -> None:
    server.add_answers(parts.reply(200, {"choices": []}))
    client = make_client()

    with pytest.raises(DynamoAPIError):
        await client.texts()
