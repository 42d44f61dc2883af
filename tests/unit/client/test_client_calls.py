"""Requests of both clients: format, errors, retries, timeouts, configuration."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from dynamo_client import (
    DynamoAPIError,
    DynamoClient,
    DynamoConfig,
    DynamoConnectionError,
    DynamoError,
    DynamoTimeoutError,
)

HI = [{"role": "user", "content": "hi"}]


async def test_requests_have_openais_format_and_reuse_the_connection(
    make_client: Any, server: Any, parts: Any
) -> None:
    server.add_answers(*[parts.reply(200, {"choices": []})] * 3)
    client = make_client(api_key="secret")

    await client.call("chat_completion", HI, max_tokens=5, top_p=0.5, request_id="mine", seed=None)
    await client.call("completion", "once", "m", temperature=0.0)
    await client.call("post", "/v1/embeddings", {"input": "x"})

    first, second, third = server.requests
    assert first["line"] == "POST /v1/chat/completions HTTP/1.1"
    assert first["body"] == {
        "model": "default",
        "messages": HI,
        "stream": False,
        "max_tokens": 5,
        "top_p": 0.5,
    }
    assert first["headers"]["authorization"] == "Bearer secret"
    assert first["headers"]["x-request-id"] == "mine"
    assert second["body"] == {"model": "m", "prompt": "once", "stream": False, "temperature": 0.0}
    assert third["line"] == "POST /v1/embeddings HTTP/1.1"
    assert server.connections == 1


async def test_json_other_than_an_object_is_an_error(
    make_client: Any, server: Any, parts: Any
) -> None:
    server.add_answers(parts.reply(200, []))
    with pytest.raises(DynamoAPIError):
        await make_client(max_retries=0).call("list_models")


async def test_an_error_has_the_fields_of_the_servers_response(
    make_client: Any, server: Any, parts: Any
) -> None:
    body = {"error": {"message": "no such model", "code": "model_not_found", "hint": "try tiny"}}
    server.add_answers(parts.reply(404, body), parts.reply(401, b"<html>"))
    client = make_client()

    with pytest.raises(DynamoAPIError, match="no such model") as caught:
        await client.call("chat_completion", HI)
    error = caught.value
    assert (error.status, error.code, error.request_id) == (404, "model_not_found", "r1")
    assert error.hint == "try tiny"
    assert "no such model" in error.body
    with pytest.raises(DynamoAPIError, match="<html>") as caught:
        await client.call("list_models")
    assert "api_key" in caught.value.hint
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
async def test_temporary_errors_are_retried(
    make_client: Any, server: Any, parts: Any, status: int
) -> None:
    server.add_answers(
        parts.reply(status, {}), parts.reply(status, {}), parts.reply(200, {"data": [1]})
    )
    client = make_client(retry_delay=0.5)

    assert await client.call("list_models") == [1]
    first, second = client.network.pauses
    assert 0.375 <= first <= 0.625
    assert 0.75 <= second <= 1.25


async def test_retry_after_is_obeyed_and_retries_end(
    make_client: Any, server: Any, parts: Any
) -> None:
    busy = parts.reply(503, {"error": {"message": "full", "code": "overloaded"}}, "retry-after: 7")
    server.add_answers(busy, busy)
    client = make_client(max_retries=1)

    with pytest.raises(DynamoAPIError) as caught:
        await client.call("chat_completion", HI)
    assert caught.value.retry_after_s == 7
    (pause,) = client.network.pauses
    assert 7 <= pause <= 8.75


async def test_a_retry_after_of_an_hour_is_not_obeyed(
    make_client: Any, server: Any, parts: Any
) -> None:
    server.add_answers(parts.reply(429, {}, "retry-after: 3600"))
    client = make_client()

    with pytest.raises(DynamoAPIError):
        await client.call("chat_completion", HI)
    assert client.network.pauses == []


async def test_a_broken_connection_is_retried(make_client: Any, server: Any, parts: Any) -> None:
    cut = parts.reply(200, {"data": [1, 2]})[:-4]
    server.add_answers(
        parts.RESET, parts.CLOSE, (cut, parts.CLOSE), parts.reply(200, {"data": [3]})
    )
    client = make_client()

    assert await client.call("list_models") == [3]
    assert len(client.network.pauses) == 3


async def test_a_closed_idle_connection_costs_no_retry(
    make_client: Any, server: Any, parts: Any
) -> None:
    server.add_answers(
        (parts.reply(200, {"data": [1]}), parts.CLOSE), parts.reply(200, {"data": [2]})
    )
    client = make_client(max_retries=0)

    assert await client.call("list_models") == [1]
    assert await client.call("list_models") == [2]
    assert server.connections == 2


async def test_health_checks_are_not_retried(make_client: Any, server: Any, parts: Any) -> None:
    server.add_answers(parts.reply(503, {"status": "starting"}))
    client = make_client()

    with pytest.raises(DynamoAPIError, match="starting"):
        await client.call("health_check")
    assert client.network.pauses == []


async def test_a_timeout_is_not_retried(make_client: Any, server: Any, parts: Any) -> None:
    server.add_answers((parts.HOLD,))
    client = make_client(timeout=0.1)

    with pytest.raises(DynamoTimeoutError, match="did not answer within"):
        await client.call("chat_completion", HI)
    assert client.network.pauses == []
    await server.disconnected.wait()


async def test_an_unreachable_server_raises_with_a_hint(server: Any) -> None:
    async with DynamoClient(DynamoConfig("http://127.0.0.1:1", max_retries=0)) as client:
        with pytest.raises(DynamoConnectionError, match="cannot connect") as caught:
            await client.health_check()
    assert "dynamo run" in caught.value.hint


async def test_unusual_and_malformed_replies(make_client: Any, server: Any, parts: Any) -> None:
    plain = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b'{"data": [1]}'
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + parts.reply(200, {"data": [2]})
    server.add_answers(
        (plain, parts.CLOSE), early, b"SSH-2.0-x\r\n\r\n", parts.reply(200, b"{oops")
    )
    client = make_client(max_retries=0)

    assert await client.call("list_models") == [1]
    assert await client.call("list_models") == [2]
    with pytest.raises(DynamoConnectionError, match="not HTTP"):
        await client.call("list_models")
    with pytest.raises(DynamoAPIError, match="oops"):
        await client.call("list_models")


async def test_a_cancelled_call_closes_its_connection(server: Any, parts: Any) -> None:
    server.add_answers((parts.HOLD,))
    async with DynamoClient(DynamoConfig(server.url)) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.chat_completion(HI)
        await server.disconnected.wait()


async def test_a_dropped_client_closes_its_connections(server: Any, parts: Any) -> None:
    server.add_answers(parts.reply(200, {"data": []}))
    client = DynamoClient(DynamoConfig(server.url))
    await client.list_models()

    del client
    gc.collect()

    await server.disconnected.wait()


def test_invalid_configurations_are_refused() -> None:
    for url in ("ftp://somewhere", "Say hello"):
        with pytest.raises(ValueError, match="like http://localhost:8000"):
            DynamoClient(DynamoConfig(url))
    assert "secret" not in repr(DynamoConfig(api_key="secret"))
    assert issubclass(DynamoConnectionError, DynamoError)
