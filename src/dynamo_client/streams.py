"""Answers that come event by event. Whoever holds a stream holds its connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import msgspec

from dynamo_client.errors import DynamoError, api_error
from dynamo_client.exchange import Exchange
from dynamo_client.network import finish
from dynamo_client.sse import EventReader

EVENT_STREAM = "text/event-stream"
DONE = b"[DONE]"
SETTLE_S = 0.1

Chunk = dict[str, Any]


class Events:
    """The events of one reply: `ready` holds those that came, `fill` brings more."""

    def __init__(
        self,
        exchange: Exchange,
        release: Callable[[Exchange], None],
        owning: Callable[[Exchange], AbstractContextManager[None]],
        request_id: str,
    ) -> None:
        self.ready: deque[Chunk] = deque()
        self.request_id = request_id
        self._exchange: Exchange | None = exchange
        self._release = release
        self._owning = owning
        self._reader = EventReader()
        self._failure: DynamoError | None = None

    async def fill(self) -> bool:
        """Wait until an event is ready; False: there are no more. Raises `DynamoError`. A stream
        that fails, or whose reading is cancelled, closes its connection."""
        while not self.ready:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._exchange is None:
                return False
            with self._owning(self._exchange):
                await self._read(self._exchange)
        return True

    def close(self) -> None:
        """Leave; the server stops its work. Safe to repeat."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    async def _read(self, exchange: Exchange) -> None:
        data = await exchange.more()
        if not data:
            self._take(self._reader.end())
            return self._end(exchange)
        for payload in self._reader.feed(data):
            if payload == DONE:
                await exchange.settle(SETTLE_S)
                return self._end(exchange)
            self._take(payload)
            if self._failure is not None:
                return self.close()
        return None

    def _end(self, exchange: Exchange) -> None:
        self._exchange = None
        self._release(exchange)

    def _take(self, payload: bytes) -> None:
        try:
            event = msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if not isinstance(event, dict):
            return
        if event.get("error"):
            self._failure = api_error(200, payload, request_id=self.request_id)
        else:
            self.ready.append(event)


class Stream:
    """`async for chunk in stream`. Leaving the loop ends it, unless you keep it: then `async with`
    or `aclose`."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._ready = events.ready

    @property
    def request_id(self) -> str:
        """The server's name for this request."""
        return self._events.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._ready or await self._events.fill():
            return self._ready.popleft()
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


class SyncStream:
    """`for chunk in stream`. Leaving the loop ends it, unless you keep it: then `with` or
    `close`."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._ready = events.ready

    @property
    def request_id(self) -> str:
        """The server's name for this request."""
        return self._events.request_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._ready or _filled(self._events):
            return self._ready.popleft()
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


def _filled(events: Events) -> bool:
    return finish(events.fill())
