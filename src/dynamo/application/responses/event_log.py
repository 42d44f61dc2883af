"""Streams of responses in the background: for the client that began one, and for later readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from dynamo.application.exchange import Exchange
from dynamo.application.generation.replies import write_keep_alive
from dynamo.application.http_errors import OpenAIErrorFormat
from dynamo.application.responses.store import (
    EVENT_END,
    MAX_PART_BYTES,
    ResponseStore,
    StreamEvents,
)
from dynamo.application.responses.writer import error_text
from dynamo.communication.http import Response
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, SlowReader

MAX_UNSAVED_BYTES = 4 << 20
"""Events that wait for a store that cannot be used. More are dropped."""
POLL_S = 0.5


class StreamErrors(OpenAIErrorFormat):
    """Ends a stream, but not its response, by an event `error`. `next_number` returns the number of
    the event that the client would have next."""

    def __init__(self, next_number: Callable[[], int]) -> None:
        self._next_number = next_number

    def encode_event(self, error: DynamoError, request_id: str) -> bytes:
        del request_id
        event = {
            "type": "error",
            "sequence_number": self._next_number(),
            "code": error.code,
            "message": error_text(error),
            "param": error.param,
        }
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)


class EventLog:
    """The output of a response in the background. The events of a stream go to a client while that
    reads, and wait to be stored: `take_batch`."""

    def __init__(self) -> None:
        self.open = self.started = True
        self.overrun = self.congested = False
        self.backlog_limit = self.backlog_bytes = 0
        self.on_writable: Callable[[], None] | None = None
        self.on_silence: Callable[[float], None] | None = None
        self._client: Response | None = None
        self._client_done = asyncio.Event()
        self._unsaved: list[bytes] = []
        self._events = 0

    def write(self, data: bytes) -> bool:
        """Take an event, and give it to the client. Returns True: the log needs no reader."""
        self._append(data)
        client = self._client
        if client is not None:
            if client.backlog_bytes > client.backlog_limit:
                client.overrun, client.open = True, False
            if not client.write(data):
                self._release_client()
        return True

    def take_batch(self, tail: bytes = b"") -> StreamEvents | None:
        """Return the events that are not stored yet, and a last one, which `end` gives the
        client."""
        if tail:
            self._append(tail)
        data = b"".join(self._unsaved)
        self._unsaved.clear()
        return StreamEvents(self._events - 1, data) if data else None

    def put_back(self, batch: StreamEvents) -> None:
        """Keep events that could not be stored, as far as their number is bounded."""
        if len(batch.data) <= MAX_UNSAVED_BYTES:
            self._unsaved.insert(0, batch.data)

    async def serve(self, exchange: Exchange, start: bytes) -> None:
        """Stream to the client, from the events `start` on, until the end. Raises `SlowReader`. The
        response continues without a client that leaves."""
        client = self._client = exchange.response
        exchange.use_error_format(StreamErrors(lambda: self._events))
        exchange.start_stream("")
        client.on_silence = partial(write_keep_alive, client)
        client.write(start)
        try:
            await self._client_done.wait()
        finally:
            self._release_client()
        check_reader(client)

    def end(self, tail: bytes = b"") -> None:
        """Give the client the last event."""
        if self._client is not None:
            self._client.end(tail)
        self._release_client()

    def _append(self, data: bytes) -> None:
        self._unsaved.append(data)
        self._events += data.count(EVENT_END)

    def _release_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.on_silence = None
        self._client_done.set()


async def replay(
    store: ResponseStore, clock: Clock, exchange: Exchange, owner: str, response_id: str, after: int
) -> None:
    """Stream the stored events of a response behind the number `after`, until its end. Raises
    `NotFound`, `Unsupported`, `StoreUnavailable` and `SlowReader`."""
    part = await store.read_stream(owner, response_id, after)
    client = exchange.response
    exchange.streaming = True
    exchange.use_error_format(StreamErrors(lambda: part.last + 1))
    exchange.start_stream("")
    client.on_silence = partial(write_keep_alive, client)
    try:
        while True:
            if part.data:
                client.write(part.data)
            if part.stage == "running":
                await clock.sleep(POLL_S)
            while client.open and client.backlog_bytes > MAX_PART_BYTES:
                await clock.sleep(POLL_S)
            check_reader(client)
            if part.stage == "ended":
                break
            part = await store.read_stream(owner, response_id, part.last)
    finally:
        client.on_silence = None
    client.end()


def check_reader(client: Response) -> None:
    """Raise `SlowReader` for a client that was cut off."""
    if client.overrun:
        raise SlowReader(
            "the stream's backlog overflowed because the client reads too slowly",
            hint="GET the response with stream=true&starting_after=N",
        )
