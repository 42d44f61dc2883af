"""Answers that come event by event. Whoever holds a stream holds its connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import msgspec

from dynamo_client.errors import DynamoError, api_error
from dynamo_client.http_call import HttpCall
from dynamo_client.network import run_blocking

DATA_PREFIX = b"data:"


class SseParser:
    """Bytes in, the data of whole events out."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of every event that is complete now."""
        data = self._buffer + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # its line feed may still come
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = data.split(b"\n\n")
        self._buffer = rest + held
        return (found for event in events if (found := parse_event_data(event)))

    def feed_eof(self) -> bytes:
        """The data of an event that was cut off by the end."""
        rest, self._buffer = self._buffer, b""
        return parse_event_data(rest.replace(b"\r", b"\n"))


def parse_event_data(event: bytes) -> bytes:
    """Its data lines, joined; b"" for a comment."""
    if b"\n" not in event:
        return event[len(DATA_PREFIX) :].strip() if event.startswith(DATA_PREFIX) else b""
    lines = (
        line[len(DATA_PREFIX) :].strip()
        for line in event.split(b"\n")
        if line.startswith(DATA_PREFIX)
    )
    return b"\n".join(lines)


EVENT_STREAM_TYPE = "text/event-stream"
DONE_PAYLOAD = b"[DONE]"
DRAIN_TIMEOUT_S = 0.1

Chunk = dict[str, Any]


class EventStreamReader:
    """The events of one reply: `ready` holds those that came, `fill` brings more."""

    def __init__(
        self,
        exchange: HttpCall,
        release: Callable[[HttpCall], None],
        owning: Callable[[HttpCall], AbstractContextManager[None]],
        request_id: str,
    ) -> None:
        self.ready_chunks: deque[Chunk] = deque()
        self.request_id = request_id
        self._call: HttpCall | None = exchange
        self._release_call = release
        self._close_on_error = owning
        self._parser = SseParser()
        self._failure: DynamoError | None = None

    async def fill(self) -> bool:
        """Wait until an event is ready; False: there are no more. Raises `DynamoError`. A stream
        that fails, or whose reading is cancelled, closes its connection."""
        while not self.ready_chunks:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._call is None:
                return False
            with self._close_on_error(self._call):
                await self._read(self._call)
        return True

    def close(self) -> None:
        """Leave; the server stops its work. Safe to repeat."""
        exchange, self._call = self._call, None
        if exchange is not None:
            exchange.close()

    async def _read(self, exchange: HttpCall) -> None:
        data = await exchange.read()
        if not data:
            self._on_event_data(self._parser.feed_eof())
            return self._finish(exchange)
        for payload in self._parser.feed(data):
            if payload == DONE_PAYLOAD:
                await exchange.drain(DRAIN_TIMEOUT_S)
                return self._finish(exchange)
            self._on_event_data(payload)
            if self._failure is not None:
                return self.close()
        return None

    def _finish(self, exchange: HttpCall) -> None:
        self._call = None
        self._release_call(exchange)

    def _on_event_data(self, payload: bytes) -> None:
        try:
            event = msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if not isinstance(event, dict):
            return
        if event.get("error"):
            self._failure = api_error(200, payload, request_id=self.request_id)
        else:
            self.ready_chunks.append(event)


class ChunkStream:
    """`async for chunk in stream`. Leaving the loop ends it, unless you keep it: then `async with`
    or `aclose`."""

    def __init__(self, events: EventStreamReader) -> None:
        self._events = events
        self._ready_chunks = events.ready_chunks

    @property
    def request_id(self) -> str:
        """The server's name for this request."""
        return self._events.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._ready_chunks or await self._events.fill():
            return self._ready_chunks.popleft()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Leave; the server stops its work."""
        self._events.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._events.close()

    def __del__(self) -> None:
        self._events.close()


class SyncChunkStream:
    """`for chunk in stream`. Leaving the loop ends it, unless you keep it: then `with` or
    `close`."""

    def __init__(self, events: EventStreamReader) -> None:
        self._events = events
        self._ready_chunks = events.ready_chunks

    @property
    def request_id(self) -> str:
        """The server's name for this request."""
        return self._events.request_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._ready_chunks or _fill_blocking(self._events):
            return self._ready_chunks.popleft()
        raise StopIteration

    def close(self) -> None:
        """Leave; the server stops its work."""
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()

    def __del__(self) -> None:
        self._events.close()


def _fill_blocking(events: EventStreamReader) -> bool:
    return run_blocking(events.fill())
