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


async def test_a_stream_ends_at_done_and_its_connection_is_used_again(
    make: Any, server: Any, words: Any
) -> None:
    whole = words.stream(words.event(words.delta("a")), words.event(words.delta("b")))
    server.will(whole, whole)
    client = make()

    assert await client.texts() == ["a", "b"]
    assert await client.texts() == ["a", "b"]
    assert server.connections == 1
    assert server.requests[0]["body"]["stream"] is True


async def test_text_survives_any_split(make: Any, server: Any, words: Any) -> None:
    texts = ["é", "漢字", "🙂🙂", "plain"]
    whole = words.stream(*(words.event(words.delta(text)) for text in texts))
    server.will(tuple(whole[at : at + 1] for at in range(len(whole))))
    client = make()

    assert await client.texts() == texts


async def test_chunks_need_not_be_events(make: Any, server: Any, words: Any) -> None:
    events = b": hello\r\n\r\n" + words.event(words.delta("a")) + b'data: {"choices":\ndata: [{'
    rest = b'"delta": {"content": "b"}}]}\r\n\r\nevent: x\ndata:[DONE]\n\ndata: never\n\n'
    parts = words.chunk(events) + words.chunk(rest[:5]) + words.chunk(rest[5:])
    server.will(words.STREAM_HEAD + parts + words.LAST_CHUNK)
    client = make()

    assert await client.texts() == ["a", "b"]


async def test_bad_json_is_skipped(make: Any, server: Any, words: Any) -> None:
    bad = [words.event(b"{oops"), words.event(b"\xff\xfe"), words.event(b"[1]")]
    server.will(words.stream(*bad, words.event(words.delta("good"))))
    client = make()

    assert await client.texts() == ["good"]


async def test_an_error_event_raises_after_what_came_before_it(
    make: Any, server: Any, words: Any
) -> None:
    error = {"error": {"message": "the worker died", "code": "worker_failed", "hint": "ask again"}}
    server.will(words.stream(words.event(words.delta("a")), words.event(error)))
    client = make()
    seen: list[str] = []

    with pytest.raises(DynamoAPIError, match="the worker died") as caught:
        await client.texts(into=seen)
    assert seen == ["a"]
    assert (caught.value.code, caught.value.hint) == ("worker_failed", "ask again")
    assert caught.value.request_id == "r1"
    assert client.network.pauses == []


async def test_a_stream_that_breaks_before_its_first_event_is_tried_again(
    make: Any, server: Any, words: Any
) -> None:
    whole = words.stream(words.event(words.delta("a")))
    server.will((words.STREAM_HEAD, words.RESET), words.reply(503, {}), whole)
    client = make()

    assert await client.texts() == ["a"]
    assert len(client.network.pauses) == 2


async def test_a_stream_that_breaks_later_is_not(make: Any, server: Any, words: Any) -> None:
    begun = words.STREAM_HEAD + words.chunk(words.event(words.delta("a")))
    server.will((begun, words.CLOSE))
    client = make()
    seen: list[str] = []

    with pytest.raises(DynamoConnectionError, match="ended before the reply did"):
        await client.texts(into=seen)
    assert seen == ["a"]
    assert client.network.pauses == []


async def test_silence_within_a_stream_is_a_timeout(make: Any, server: Any, words: Any) -> None:
    begun = words.STREAM_HEAD + words.chunk(words.event(words.delta("a")))
    server.will((begun, words.HOLD))
    client = make(timeout=0.1)
    seen: list[str] = []

    with pytest.raises(DynamoTimeoutError):
        await client.texts(into=seen)
    assert seen == ["a"]
    await server.left.wait()


async def test_leaving_the_loop_closes_the_connection(server: Any, words: Any) -> None:
    begun = words.STREAM_HEAD + words.chunk(words.event(words.delta("a")))
    server.will((begun, words.HOLD))
    async with DynamoClient(DynamoConfig(server.url)) as client:
        async for _ in await client.chat_completion([], stream=True):
            break
        await server.left.wait()


async def test_a_stream_that_is_kept_closes_by_hand(server: Any, words: Any) -> None:
    begun = words.STREAM_HEAD + words.chunk(words.event(words.delta("a")))
    server.will((begun, words.HOLD))
    async with DynamoClient(DynamoConfig(server.url)) as client:
        async with await client.chat_completion([], stream=True) as stream:
            assert stream.request_id == "r1"
            assert (await anext(stream))["choices"]
        await server.left.wait()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_server_that_does_not_stream(make: Any, server: Any, words: Any) -> None:
    server.will(words.reply(200, {"choices": []}))
    client = make()

    with pytest.raises(DynamoAPIError):
        await client.texts()
