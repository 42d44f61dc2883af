"""Responses that arrive at the load client, split at every position."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.operations.bench.load_client import LoadClient, LoadConnection, decode_chunked
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
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%s\r\n" % (len(event), event.encode()) for event in EVENTS)
    + b"0\r\n\r\n"
)


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        self.sent = b""
        self.aborted = False

    def write(self, data: Any) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True


Feed = Callable[..., RequestSample]


@pytest.fixture
async def feed() -> Feed:
    def feed_parts(*parts: bytes, keep_body: bool = False, lost: bool = False) -> RequestSample:
        connection = LoadConnection()
        connection.connection_made(FakeTransport())
        sample = RequestSample(array("d"), keep_body=keep_body)
        done = connection.send_request(b"GET", sample)
        for part in parts:
            connection.data_received(part)
        if lost:
            connection.connection_lost(None)
        assert done.done()
        return sample

    return feed_parts


def check(sample: RequestSample) -> None:
    assert (sample.error, sample.status, sample.text_events) == ("", 200, 3)
    assert sample.usage == ServerUsage(31, 3, 16)
    assert sample.first_text_at is not None
    assert sample.sent_at <= sample.first_text_at <= sample.last_text_at <= sample.ended_at


async def test_a_stream_in_one_read_or_one_a_chunk(feed: Feed) -> None:
    check(feed(STREAM))
    cuts = [0, *(at + 4 for at in range(len(STREAM)) if STREAM.startswith(b"\n\n\r\n", at))]
    check(feed(*(STREAM[a:b] for a, b in zip(cuts, [*cuts[1:], len(STREAM)], strict=True))))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 333])
async def test_a_stream_in_reads_of_equal_size(feed: Feed, size: int) -> None:
    check(feed(*(STREAM[at : at + size] for at in range(0, len(STREAM), size))))


async def test_a_stream_cut_at_every_position(feed: Feed) -> None:
    for at in range(1, len(STREAM)):
        check(feed(STREAM[:at], STREAM[at:]))


async def test_keep_body_stores_the_text(feed: Feed) -> None:
    assert feed(STREAM, keep_body=True).response_text() == ' a "b" c'


async def test_an_error_has_its_status_and_code(feed: Feed) -> None:
    body = b'{"error":{"message":"x","code":"overloaded"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(body)

    assert feed(head, body).error == "http 503 overloaded"


async def test_an_error_inside_the_stream(feed: Feed) -> None:
    event = b'data: {"error":{"message":"x","code":"worker_failed"}}\n\n'
    data = STREAM[: STREAM.index(b" c") - 200]
    data = data[: data.rindex(b"\n\n\r\n") + 4]
    end = b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)

    assert feed(data, end).error == "worker_failed"


async def test_a_lost_connection_and_a_body_until_the_end(feed: Feed) -> None:
    assert feed(STREAM[:-20], lost=True).error == "connection lost"
    body = "".join(EVENTS).encode()
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\r\n"
    check(feed(head, body, lost=True))


async def test_a_response_that_is_not_http_loses_the_connection(feed: Feed) -> None:
    assert feed(b"SSH-2.0-OpenSSH_9\r\n", lost=True).error == "connection lost"
    assert feed(b"* OK IMAP4 ready\r\n\r\n", lost=True).error == "connection lost"


def test_a_chunked_body_is_decoded() -> None:
    assert decode_chunked(b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n") == b"abc0123456789"


def test_a_request_has_host_key_and_length() -> None:
    request = LoadClient(BenchTarget(url="http://h:1/v1", api_key="k")).encode_request(
        "/v1/x", {"a": 1}
    )

    assert request.startswith(b"POST /v1/x HTTP/1.1\r\nHost: h:1\r\n")
    assert b"Authorization: Bearer k\r\n" in request
    assert request.endswith(b'Content-Length: 7\r\n\r\n{"a":1}')
