"""Streamed answers as server-sent events (SSE). A stream owns its connection."""

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
EVENT_STREAM_TYPE = "text/event-stream"
DONE_PAYLOAD = b"[DONE]"
DRAIN_TIMEOUT_S = 0.1

Chunk = dict[str, Any]


class SseParser:
    """Extracts the data of whole events from bytes that may be split anywhere."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and return the data of every event that they complete."""
        data = self._buffer + data
        carriage_return = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # its line feed may be in the next bytes
                data, carriage_return = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = data.split(b"\n\n")
        self._buffer = rest + carriage_return
        return (content for event in events if (content := parse_event_data(event)))

    def feed_eof(self) -> bytes:
        """Return the data of the event that the end of the stream cut off."""
        rest, self._buffer = self._buffer, b""
        return parse_event_data(rest.replace(b"\r", b"\n"))


def parse_event_data(event: bytes) -> bytes:
    """Join the data lines of one event; b"" for a comment."""
    if b"\n" not in event:
        return event[len(DATA_PREFIX) :].strip() if event.startswith(DATA_PREFIX) else b""
    lines = (
        line[len(DATA_PREFIX) :].strip()
        for line in event.split(b"\n")
        if line.startswith(DATA_PREFIX)
    )
    return b"\n".join(lines)


class EventStreamReader:
    """Reads the events of one reply. `ready_chunks` holds the decoded events in order."""

    def __init__(
        self,
        call: HttpCall,
        release_call: Callable[[HttpCall], None],
        close_on_error: Callable[[HttpCall], AbstractContextManager[None]],
        request_id: str,
    ) -> None:
        self.ready_chunks: deque[Chunk] = deque()
        self.request_id = request_id
        self._call: HttpCall | None = call
        self._release_call = release_call
        self._close_on_error = close_on_error
        self._parser = SseParser()
        self._failure: DynamoError | None = None

    async def fill(self) -> bool:
        """Wait until a chunk is ready; False at the end of the stream. Raises `DynamoError`. A
        stream that fails, or whose reading is cancelled, closes its connection."""
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
        """Close the connection, which makes the server cancel the request. Safe to repeat."""
        call, self._call = self._call, None
        if call is not None:
            call.close()

    async def _read(self, call: HttpCall) -> None:
        data = await call.read()
        if not data:
            self._on_event_data(self._parser.feed_eof())
            return self._finish(call)
        for payload in self._parser.feed(data):
            if payload == DONE_PAYLOAD:
                await call.drain(DRAIN_TIMEOUT_S)
                return self._finish(call)
            self._on_event_data(payload)
            if self._failure is not None:
                return self.close()
        return None

    def _finish(self, call: HttpCall) -> None:
        self._call = None
        self._release_call(call)

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


class _ChunkStreamBase:
    """The state of both kinds of chunk stream. Dropping the object closes the connection."""

    def __init__(self, events: EventStreamReader) -> None:
        self._events = events
        self._ready_chunks = events.ready_chunks

    @property
    def request_id(self) -> str:
        """The server's id of this request."""
        return self._events.request_id

    def __del__(self) -> None:
        self._events.close()


class ChunkStream(_ChunkStreamBase):
    """A streamed answer: `async for chunk in stream`. Leaving the loop closes an unreferenced
    stream. Keep a reference only with `async with` or `aclose`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._ready_chunks or await self._events.fill():
            return self._ready_chunks.popleft()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close the stream; the server cancels the request."""
        self._events.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._events.close()


class SyncChunkStream(_ChunkStreamBase):
    """A streamed answer: `for chunk in stream`. Leaving the loop closes an unreferenced stream.
    Keep a reference only with `with` or `close`."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if not self._ready_chunks and not run_blocking(self._events.fill()):
            raise StopIteration
        return self._ready_chunks.popleft()

    def close(self) -> None:
        """Close the stream; the server cancels the request."""
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()
