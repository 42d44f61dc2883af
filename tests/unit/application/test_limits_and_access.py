"""Concurrency limit, timeouts, API keys, CORS, request ids, metrics and request logs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from dynamo.application.exchange import RequestIds, sanitise_request_id
from dynamo.application.generation.concurrency_limit import ConcurrencyLimit
from dynamo.core.errors import Overloaded
from dynamo.core.settings.schema import ServerSettings

CHAT = "/v1/chat/completions"
BODY = {"model": "words", "messages": [{"role": "user", "content": "one two three"}]}


async def test_a_request_beyond_the_queue_limit_is_rejected(open_site: Any, connect: Any) -> None:
    site = await open_site(max_concurrent_requests=1, max_waiting_requests=1)
    concurrency = site.application.generation.concurrency
    site.processor.gate.clear()
    async with connect(site.port) as runs, connect(site.port) as waits, connect(site.port) as late:
        runs.ask("POST", CHAT, BODY)
        await site.processor.entered.wait()
        waits.ask("POST", CHAT, BODY)
        while not concurrency.waiting:
            await asyncio.sleep(0)
        late.ask("POST", CHAT, BODY)
        answer = await late.answer()
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        site.processor.gate.set()
        assert (await runs.answer()).status == 200
        assert (await waits.answer()).status == 200
    assert (concurrency.running, concurrency.waiting) == (0, 0)


async def test_tokenize_and_detokenize_count_as_requests(open_site: Any, connect: Any) -> None:
    site = await open_site(max_concurrent_requests=1, max_waiting_requests=0)
    site.processor.gate.clear()
    bodies = (("/tokenize", {"prompt": "a b"}), ("/detokenize", {"tokens": [1, 2]}))
    async with connect(site.port) as runs, connect(site.port) as other:
        runs.ask("POST", CHAT, BODY)
        await site.processor.entered.wait()
        for path, body in bodies:
            other.ask("POST", path, body)
            answer = await other.answer()
            assert (answer.status, answer.error["code"]) == (503, "overloaded")
        site.processor.gate.set()
        assert (await runs.answer()).status == 200
        for path, body in bodies:
            other.ask("POST", path, body)
            assert (await other.answer()).status == 200
    assert site.application.generation.concurrency.running == 0


async def test_a_disconnect_leaves_the_queue(open_site: Any, connect: Any) -> None:
    site = await open_site(max_concurrent_requests=1, max_waiting_requests=4)
    concurrency = site.application.generation.concurrency
    site.processor.gate.clear()
    async with connect(site.port) as runs:
        runs.ask("POST", CHAT, BODY)
        await site.processor.entered.wait()
        async with connect(site.port) as waits:
            waits.ask("POST", CHAT, BODY)
            while not concurrency.waiting:
                await asyncio.sleep(0)
        while concurrency.waiting:
            await asyncio.sleep(0)
        site.processor.gate.set()
        assert (await runs.answer()).status == 200


async def test_a_slot_given_to_a_cancelled_waiter_is_passed_on() -> None:
    limit = ConcurrencyLimit(1, 4)
    await limit.acquire()
    first = asyncio.create_task(limit.acquire())
    second = asyncio.create_task(limit.acquire())
    await asyncio.sleep(0)
    limit.release()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert (limit.running, limit.waiting) == (1, 0)
    full = ConcurrencyLimit(0, 0)
    with pytest.raises(Overloaded):
        await full.acquire()


@pytest.mark.parametrize("stream", [False, True])
async def test_request_timeout(open_site: Any, connect: Any, stream: bool) -> None:
    site = await open_site(request_timeout=0.05)
    site.processor.gate.clear()
    async with connect(site.port) as connection:
        for _ in range(2):
            connection.ask("POST", CHAT, BODY | {"stream": stream})
            answer = await connection.answer()
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert site.processor.cancelled.is_set()


async def test_a_request_sets_its_own_timeout(open_site: Any, connect: Any) -> None:
    site = await open_site()
    site.processor.gate.clear()
    async with connect(site.port) as connection:
        for limit in ("0.05", ".05", "50ms"):
            connection.ask("POST", CHAT, BODY, {"x-dynamo-timeout": limit})
            answer = await connection.answer()
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        for wrong in ("soon", "-1", "nan", "inf", "0", "1e999", "10 x"):
            connection.ask("POST", CHAT, BODY, {"x-dynamo-timeout": wrong})
            answer = await connection.answer()
            assert (answer.status, answer.error["code"]) == (400, "invalid_request")
            assert "a positive number of seconds" in answer.error["message"]
        site.processor.gate.set()
        connection.ask("POST", CHAT, BODY, {"x-dynamo-timeout": "1e9"})
        assert (await connection.answer()).status == 200


async def test_request_timeout_during_a_stream(open_site: Any, connect: Any) -> None:
    site = await open_site(request_timeout=0.05)
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, BODY | {"stream": True, "max_tokens": 10_000_000})
        *_, error, done = (await connection.answer()).events
    assert error["error"]["code"] == "deadline_exceeded"
    assert done == "[DONE]"


async def test_keys(open_site: Any, connect: Any) -> None:
    site = await open_site(api_keys=("sesame", "open"))
    for key in (None, "Bearer no", "Basic sesame", "Bearer "):
        async with connect(site.port) as connection:
            connection.ask("POST", CHAT, BODY, {"authorization": key} if key else None)
            answer = await connection.answer()
            assert answer.status == 401
            assert answer.error["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, BODY, {"authorization": "bearer sesame"})
        assert (await connection.answer()).status == 200
        connection.ask("GET", "/v1/models")
        assert (await connection.answer()).status == 401
        connection.ask("GET", "/live")
        assert (await connection.answer()).status == 200


@pytest.mark.parametrize("framing", ["content-length: 9999", "transfer-encoding: chunked"])
async def test_a_key_is_checked_before_the_body(open_site: Any, connect: Any, framing: str) -> None:
    site = await open_site(api_keys=("sesame",))
    async with connect(site.port) as connection:
        connection.send(f"POST /anywhere HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n".encode())
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["connection"] == "close"
        assert await connection.closed()


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (408, b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n%bcontent-length: 10\r\n\r\n123"),
        (408, b"GET /v1/models HTTP/1.1\r\n%bhost: a\r\n"),
        (413, b"POST /v1/completions HTTP/1.1\r\n%bhost: a\r\ncontent-length: 99999\r\n\r\n"),
        (431, b"GET /v1/models HTTP/1.1\r\nhost: a\r\n%b" + b"x: y\r\n" * 100 + b"\r\n"),
        (400, b"GET /v1/models HTTP/1.1\r\n%bhost: a\r\nno header\r\n\r\n"),
        (400, b"GET /v1/models HTTP/1.1\r\n%b\r\n"),
    ],
)
async def test_errors_before_the_handler_are_complete(
    open_site: Any, connect: Any, caplog: Any, status: int, sent: bytes
) -> None:
    """These answers have an id, CORS headers and a log line like all others."""
    origins = ("http://page",)
    site = await open_site(
        log_requests=True, header_timeout=0.2, max_body_bytes=2048, cors_origins=origins
    )
    with caplog.at_level(logging.INFO):
        async with connect(site.port) as connection:
            connection.send(sent % b"Origin: http://page\r\nX-Request-Id: mine\r\n")
            answer = await connection.answer()
    assert answer.status == status
    assert answer.headers["x-request-id"] == answer.error["request_id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == "http://page"
    (line,) = [record.fields for record in caplog.records if record.message == "request"]
    assert (line["status"], line["code"]) == (status, answer.error["code"])
    assert line["client_id"] == "mine"


async def test_an_error_without_a_head_has_an_id(open_site: Any, connect: Any) -> None:
    site = await open_site()
    async with connect(site.port) as connection:
        connection.send(b"\x16\x03\x01\x02\x00\x01\x00")
        answer = await connection.answer()
    assert answer.status == 400
    assert answer.headers["x-request-id"] == answer.error["request_id"]


PREFLIGHT = {
    "origin": "http://localhost:3000",
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type, x-stainless-os",
}
PAGE = {"origin": "http://localhost:3000", "content-type": "application/json"}


@pytest.mark.parametrize(
    ("settings", "allowed"), [({}, PAGE["origin"]), ({"cors_origins": ("*",)}, "*")]
)
async def test_pages_of_allowed_origins_read_answers_and_errors(
    open_site: Any, connect: Any, settings: dict[str, Any], allowed: str
) -> None:
    site = await open_site(**settings)
    async with connect(site.port) as connection:
        connection.ask("OPTIONS", CHAT, headers=PREFLIGHT)
        answer = await connection.answer()
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        for status, body in ((200, BODY | {"stream": True}), (400, b"{")):
            connection.ask("POST", CHAT, body, PAGE)
            answer = await connection.answer()
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == allowed
        connection.ask("POST", CHAT, BODY)
        assert "access-control-allow-origin" not in (await connection.answer()).headers


async def test_pages_of_other_origins_are_refused_before_the_body(
    open_site: Any, connect: Any
) -> None:
    site = await open_site(cors_origins=("https://app.example",))
    for origin, status in (("https://app.example", 200), ("http://localhost:3000", 403)):
        async with connect(site.port) as connection:
            connection.ask("GET", "/v1/models", headers={"origin": origin})
            answer = await connection.answer()
            assert answer.status == status
            assert ("access-control-allow-origin" in answer.headers) == (status == 200)
    async with connect(site.port) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\norigin: null\r\ncontent-length: 9999\r\n\r\n"
        connection.send(head.encode())
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (403, "forbidden")
        assert "server.cors_origins" in answer.error["hint"]
        assert await connection.closed()
    assert not site.processor.requests


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (415, {"origin": "http://localhost:3000"}),
        (415, {"origin": "http://localhost:3000", "content-type": "text/plain"}),
        (415, {"sec-fetch-site": "same-site", "content-type": "application/x-www-form-urlencoded"}),
        (415, {"content-type": "multipart/form-data; boundary=x"}),
        (200, {"origin": "http://localhost:3000", "content-type": "Application/JSON;charset=utf8"}),
        (200, {"content-type": "application/x-www-form-urlencoded"}),
        (200, {}),
    ],
)
async def test_pages_send_json_as_such(
    site: Any, connect: Any, status: int, headers: dict[str, str]
) -> None:
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, BODY, headers)
        answer = await connection.answer()
    assert answer.status == status
    assert status == 200 or answer.error["code"] == "unsupported_media_type"


async def test_request_ids(site: Any, connect: Any) -> None:
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, BODY, {"x-request-id": "my-id.7"})
        assert (await connection.answer()).headers["x-request-id"] == "my-id.7"
        connection.ask("POST", CHAT, BODY, {"x-request-id": "my-id.7"})
        await connection.answer()
        ids = [context.request_id for context in site.processor.contexts]
        assert len(set(ids)) == 2
        assert all(request_id.startswith("my-id.7-") for request_id in ids)
        connection.ask("POST", CHAT, b"[]", {"x-request-id": "bad"})
        assert (await connection.answer()).error["request_id"] == "bad"
        connection.ask("GET", "/live")
        assert len((await connection.answer()).headers["x-request-id"]) == 24
    assert RequestIds().make_unique("a") != RequestIds().make_unique("a")
    assert sanitise_request_id("a b<script>\x00é" + "x" * 200) == ("abscript" + "x" * 200)[:128]
    assert sanitise_request_id(None) == ""


async def test_metrics(site: Any, connect: Any) -> None:
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, BODY | {"stream": True})
        await connection.answer()
        connection.ask("POST", CHAT, BODY | {"n": 0})
        await connection.answer()
        connection.ask("POST", CHAT, BODY | {"model": "nobody"})
        await connection.answer()
        connection.ask("POST", CHAT, BODY | {"best_of": 2})
        await connection.answer()
        connection.ask("GET", "/metrics")
        text = (await connection.answer()).body.decode()
    for line in (
        'dynamo_frontend_requests_total{model="words",endpoint="/v1/chat/completions",status="200"} 1',
        'dynamo_frontend_requests_total{model="words",endpoint="/v1/chat/completions",status="400"} 1',
        'dynamo_frontend_requests_total{model="",endpoint="/v1/chat/completions",status="400"} 1',
        'dynamo_frontend_requests_total{model="",endpoint="/v1/chat/completions",status="404"} 1',
        'dynamo_frontend_time_to_first_token_seconds_count{model="words"} 1',
        'dynamo_frontend_inter_token_latency_seconds_count{model="words"} 2',
        'dynamo_frontend_request_duration_seconds_count{model="words"} 1',
        'dynamo_frontend_input_tokens_total{model="words"} 3',
        'dynamo_frontend_output_tokens_total{model="words"} 3',
        'dynamo_frontend_cached_tokens_total{model="words"} 1',
        "dynamo_frontend_inflight_requests 0",
        "dynamo_frontend_queued_requests 0",
    ):
        assert line in text.splitlines(), line


async def test_an_echo_counts_no_generated_tokens(site: Any, connect: Any) -> None:
    async with connect(site.port) as connection:
        body = {"model": "words", "prompt": "a b", "echo": True, "max_tokens": 0}
        connection.ask("POST", "/v1/completions", body)
        assert (await connection.answer()).json["choices"][0]["text"] == "a b "
        connection.ask("GET", "/metrics")
        text = (await connection.answer()).body.decode()
    assert 'dynamo_frontend_output_tokens_total{model="words"} 0' in text.splitlines()


async def test_disconnected_clients_are_counted(site: Any, connect: Any) -> None:
    site.processor.gate.clear()
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, BODY)
        await site.processor.entered.wait()
    await site.processor.cancelled.wait()
    await asyncio.sleep(0)
    async with connect(site.port) as connection:
        connection.ask("GET", "/metrics")
        assert 'status="499"} 1' in (await connection.answer()).body.decode()


async def test_each_request_logs_one_line(
    open_site: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    site = await open_site(log_requests=True)
    with caplog.at_level(logging.INFO, logger="dynamo.application.app"):
        async with connect(site.port) as connection:
            connection.ask("POST", CHAT, BODY)
            await connection.answer()
            connection.ask("POST", CHAT, BODY | {"top_p": 2})
            await connection.answer()
    good, bad = [record.fields for record in caplog.records]
    assert (good["status"], good["model"], good["stream"]) == (200, "words", False)
    assert (bad["status"], bad["code"]) == (400, "invalid_request")


async def test_limits_change_while_the_server_runs(open_site: Any, connect: Any) -> None:
    site = await open_site(max_concurrent_requests=1, max_waiting_requests=0)
    site.processor.gate.clear()
    async with (
        connect(site.port) as connection,
        connect(site.port) as two,
        connect(site.port) as three,
    ):
        connection.ask("POST", CHAT, BODY)
        await site.processor.entered.wait()
        two.ask("POST", CHAT, BODY)
        assert (await two.answer()).status == 503
        site.application.update_settings(
            ServerSettings(max_concurrent_requests=2, request_timeout=0.01)
        )
        two.ask("POST", CHAT, BODY)
        three.ask("POST", CHAT, BODY)
        assert (await two.answer()).error["code"] == "deadline_exceeded"
        assert (await three.answer()).status == 504
        site.processor.gate.set()
        assert (await connection.answer()).status == 200


async def test_a_higher_limit_admits_waiting_requests(open_site: Any, connect: Any) -> None:
    site = await open_site(max_concurrent_requests=1)
    site.processor.gate.clear()
    async with connect(site.port) as connection, connect(site.port) as two:
        connection.ask("POST", CHAT, BODY)
        await site.processor.entered.wait()
        two.ask("POST", CHAT, BODY)
        while not site.application.generation.concurrency.waiting:
            await asyncio.sleep(0)
        site.application.update_settings(ServerSettings(max_concurrent_requests=2))
        assert site.application.generation.concurrency.running == 2
        site.processor.gate.set()
        assert {(await connection.answer()).status, (await two.answer()).status} == {200}
