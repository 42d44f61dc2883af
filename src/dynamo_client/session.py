"""Connections that are used again, and calls that are tried again."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from dynamo_client.config import DynamoConfig, locate
from dynamo_client.errors import DynamoConnectionError, DynamoError, DynamoTimeoutError, api_error
from dynamo_client.exchange import Exchange, Patience, gap, whole
from dynamo_client.network import Channel, Network
from dynamo_client.retry import Retry, retry_after_s
from dynamo_client.streams import EVENT_STREAM, Events
from dynamo_client.unreachable import unreachable
from dynamo_client.wire import BrokenReplyError, Head, request_bytes

T = TypeVar("T")
CONNECT_S = 5.0
IDLE_CHANNELS = 128
SLOW = "give it more time: DynamoConfig(timeout=...), or read the answer as a stream"


class Ask(NamedTuple):
    """One call. `body`: what becomes JSON; None: a GET."""

    path: str
    body: Any = None
    request_id: str = ""


class Session:
    """All connections of one client. Made without I/O."""

    def __init__(
        self, config: DynamoConfig, network: Network, chance: random.Random | None = None
    ) -> None:
        self._config = config
        self._network = network
        self._origin, self._prefix = locate(config.base_url)
        self._retry = Retry(config, chance or random.Random())
        self._idle: list[Channel] = []

    async def ask(self, ask: Ask, *, again: bool = True) -> Any:
        """The JSON of the reply. `again`: try as often as the configuration says. Raises
        `DynamoError`."""
        return await (self._tried(self._answer, ask) if again else self._answer(ask))

    async def open(self, ask: Ask) -> Events:
        """A stream whose first event is here. Raises `DynamoError`."""
        return await self._tried(self._open, ask)

    def close(self) -> None:
        """Close idle connections. Those of open streams close with them."""
        while self._idle:
            self._idle.pop().close()

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self.close()

    async def _tried(self, once: Callable[[Ask], Awaitable[T]], ask: Ask) -> T:
        attempt = 0
        while True:
            try:
                return await once(ask)
            except DynamoError as error:
                wait_s = self._retry.wait_s(error, attempt)
                if wait_s is None:
                    raise
            await self._network.pause(wait_s)
            attempt += 1

    async def _answer(self, ask: Ask) -> Any:
        exchange, head = await self._begin(ask, whole(self._config.timeout))
        with self._owning(exchange):
            body = await exchange.body()
        self._release(exchange)
        if head.status != 200:
            raise self._api_error(head, body)
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._api_error(head, body) from error

    async def _open(self, ask: Ask) -> Events:
        exchange, head = await self._begin(ask, gap(self._config.timeout))
        if head.status != 200 or EVENT_STREAM not in head.headers.get("content-type", ""):
            with self._owning(exchange):
                body = await exchange.body()
            self._release(exchange)
            raise self._api_error(head, body)
        request_id = head.headers.get("x-request-id", "")
        events = Events(exchange, self._release, self._owning, request_id)
        await events.fill()
        return events

    @contextmanager
    def _owning(self, exchange: Exchange) -> Iterator[None]:
        """What fails or is cancelled inside closes the connection."""
        try:
            yield
        except (OSError, BrokenReplyError) as error:
            exchange.close()
            raise self._connection_error(error) from error
        except BaseException:
            exchange.close()
            raise

    async def _begin(self, ask: Ask, patience: Patience) -> tuple[Exchange, Head]:
        request = self._request(ask)
        while True:
            channel, used = await self._channel(patience)
            exchange = Exchange(channel, patience)
            try:
                return exchange, await exchange.start(request)
            except (OSError, BrokenReplyError) as error:
                exchange.close()
                # An idle connection may close just when it is used; the server saw nothing of it.
                if used and not exchange.touched and not isinstance(error, TimeoutError):
                    continue
                raise self._connection_error(error) from error
            except BaseException:
                exchange.close()
                raise

    async def _channel(self, patience: Patience) -> tuple[Channel, bool]:
        while self._idle:
            channel = self._idle.pop()
            if channel.usable():
                return channel, True
            channel.close()
        try:
            limit_s = min(CONNECT_S, max(0.001, patience()))
            return await self._network.connect(self._origin, limit_s), False
        except OSError as error:
            raise unreachable(self._config.base_url, self._origin, error) from error

    def _release(self, exchange: Exchange) -> None:
        channel = exchange.done()
        if channel is None:
            return
        if len(self._idle) < IDLE_CHANNELS:
            self._idle.append(channel)
        else:
            channel.close()

    def _request(self, ask: Ask) -> bytes:
        headers = {
            "host": self._origin.authority,
            "accept-encoding": "identity",
            "user-agent": "dynamo-client",
        }
        if self._config.api_key:
            headers["authorization"] = f"Bearer {self._config.api_key}"
        if ask.request_id:
            headers["x-request-id"] = ask.request_id
        path = self._prefix + ask.path
        if ask.body is None:
            return request_bytes("GET", path, headers)
        headers["content-type"] = "application/json"
        return request_bytes("POST", path, headers, msgspec.json.encode(ask.body))

    def _connection_error(self, error: Exception) -> DynamoConnectionError:
        url = self._config.base_url
        if isinstance(error, TimeoutError):
            return DynamoTimeoutError(
                f"{url} did not answer within {self._config.timeout:g} s", hint=SLOW
            )
        return DynamoConnectionError(f"the connection to {url} broke: {error}")

    def _api_error(self, head: Head, body: bytes) -> DynamoError:
        return api_error(
            head.status,
            body,
            request_id=head.headers.get("x-request-id", ""),
            retry_after_s=retry_after_s(head.headers.get("retry-after", "")),
        )
