"""Event streams split at every position, and answers that arrive at the load client."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from dynamo.operations.bench.load_client import LoadClient
from dynamo.operations.bench.request_sample import RequestSample, ServerUsage
from dynamo.operations.bench.workload import BenchTarget

ID = '"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
EVENT = 'data: {%s"model":"m","choices":[{"index":0,"delta":{%s},"finish_reason":null}]}\n\n'
USAGE = (
    'data: {"choices":[],"usage":{"prompt_tokens":31,"completion_tokens":3,'
    '"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
)
EVENTS = [
    ": keep-alive\n",
    EVENT % (ID, '"role":"assistant","content":""'),
    EVENT % (ID, '"content":" a"'),
    ": keep-alive\n",
    EVENT % (ID, '"content":" \\"b\\""'),
    EVENT % (ID, '"content":" c"'),
    EVENT % (ID, ""),
    USAGE,
    "data: [DONE]\n\n",
]
STREAM = "".join(EVENTS).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = (
    HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%s\r\n" % (len(event), event.encode()) for event in EVENTS)
    + b"0\r\n\r\n"
)

Ask = Callable[..., Awaitable[RequestSample]]


def feed(*parts: bytes, keep_body: bool = False) -> RequestSample:
    sample = RequestSample(array("d"), keep_body=keep_body)
    for part in parts:
        assert sample.feed(part)
    sample.finish(200, b"")
    return sample


def check(sample: RequestSample) -> None:
    assert (sample.error, sample.text_events) == ("", 3)
    assert sample.usage == ServerUsage(31, 3, 16)
    assert sample.first_text_at is not None
    assert sample.sent_at <= sample.first_text_at <= sample.last_text_at


def test_a_stream_in_one_part_or_one_an_event() -> None:
    check(feed(STREAM))
    check(feed(*map(str.encode, EVENTS)))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 333])
def test_a_stream_in_parts_of_equal_size(size: int) -> None:
    check(feed(*(STREAM[at : at + size] for at in range(0, len(STREAM), size))))


def test_a_stream_cut_at_every_position() -> None:
    for at in range(1, len(STREAM)):
        check(feed(STREAM[:at], STREAM[at:]))


def test_keep_body_stores_the_text() -> None:
    assert feed(STREAM, keep_body=True).response_text() == ' a "b" c'


def test_an_error_inside_the_stream() -> None:
    event = b'data: {"error":{"message":"x","code":"worker_failed"}}\n\n'

    assert feed(STREAM[: STREAM.rindex(b": keep-alive")], event).error == "worker_failed"


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Send a request to a server that answers with these bytes and closes the connection."""
    requests: list[bytes] = []
    answer = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"{}"))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    host, port = server.sockets[0].getsockname()
    client = LoadClient(BenchTarget(url=f"http://{host}:{port}/v1", api_key="k"))

    async def send(text: bytes) -> RequestSample:
        nonlocal answer
        answer = text
        sample = RequestSample(array("d"))
        await client.send("/v1/x", b"{}", sample)
        assert requests[-1].startswith(b"POST /v1/x HTTP/1.1\r\n")
        assert b"authorization: Bearer k\r\n" in requests[-1]
        assert 0 < sample.sent_at <= sample.ended_at
        return sample

    yield send
    client.close()
    server.close()
    await server.wait_closed()


async def test_a_chunked_answer_and_one_until_the_end_of_the_connection(ask: Ask) -> None:
    check(await ask(CHUNKED))
    check(await ask(HEAD + b"Connection: close\r\n\r\n" + STREAM))


async def test_an_error_has_its_status_and_code(ask: Ask) -> None:
    body = b'{"error":{"message":"x","code":"overloaded"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(body)

    assert (await ask(head + body)).error == "http 503 overloaded"


@pytest.mark.parametrize("answer", [CHUNKED[:-20], b"SSH-2.0-OpenSSH_9\r\n", b""])
async def test_an_answer_that_breaks_off_loses_the_connection(ask: Ask, answer: bytes) -> None:
    assert (await ask(answer)).error == "connection lost"
