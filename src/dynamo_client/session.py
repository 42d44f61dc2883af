"""Connections that are used again, and calls that are tried again."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from dynamo_client.config import DynamoConfig, Origin, parse_base_url
from dynamo_client.errors import (
    DynamoCertificateError,
    DynamoConnectionError,
    DynamoError,
    DynamoTimeoutError,
    api_error,
)
from dynamo_client.http1 import MalformedResponseError, ResponseHead, request_bytes
from dynamo_client.http_call import HttpCall, RemainingTime, idle_timeout, total_timeout
from dynamo_client.network import Channel, NetworkBackend
from dynamo_client.retry import ClientRetryPolicy, parse_retry_after
from dynamo_client.streams import EVENT_STREAM_TYPE, EventStreamReader

START_SERVER_HINT = "is a server running there? `dynamo run` starts one"
TRUST_CERTIFICATE_HINT = (
    "SSL_CERT_FILE=FILE.pem names the certificates to trust beside the system's"
)


def unreachable_error(url: str, origin: Origin, error: OSError) -> DynamoConnectionError:
    """The error of a connection that was not made."""
    if origin.secure:
        from ssl import SSLCertVerificationError

        if isinstance(error, SSLCertVerificationError):
            return DynamoCertificateError(
                f"the certificate of {url} is not trusted: {error.verify_message}",
                hint=TRUST_CERTIFICATE_HINT,
            )
    message = f"cannot connect to {url}: {error or 'it takes too long'}"
    return DynamoConnectionError(message, hint=_proxy_hint(origin) or START_SERVER_HINT)


def _proxy_hint(origin: Origin) -> str:
    """Others may come there through a proxy that the environment names; this client does not."""
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    scheme = "https" if origin.secure else "http"
    name = scheme if scheme in proxies else "all"
    if name not in proxies or proxy_bypass(origin.host):
        return ""
    return f"{name}_proxy is set, but this client connects directly: it goes through no proxy"


T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_CHANNELS = 128
TIMEOUT_HINT = "give it more time: DynamoConfig(timeout=...), or read the answer as a stream"


class RequestSpec(NamedTuple):
    """One call. `body`: what becomes JSON; None: a GET."""

    path: str
    body: Any = None
    request_id: str = ""


class ClientSession:
    """All connections of one client. Made without I/O."""

    def __init__(
        self, config: DynamoConfig, network: NetworkBackend, chance: random.Random | None = None
    ) -> None:
        self._config = config
        self._network = network
        self._origin, self._prefix = parse_base_url(config.base_url)
        self._retry_policy = ClientRetryPolicy(config, chance or random.Random())
        self._idle: list[Channel] = []

    async def request(self, ask: RequestSpec, *, retry: bool = True) -> Any:
        """The JSON of the reply. `again`: try as often as the configuration says. Raises
        `DynamoError`."""
        return await (
            self._with_retries(self._request_once, ask) if retry else self._request_once(ask)
        )

    async def open_stream(self, ask: RequestSpec) -> EventStreamReader:
        """A stream whose first event is here. Raises `DynamoError`."""
        return await self._with_retries(self._open_stream_once, ask)

    def close(self) -> None:
        """Close idle connections. Those of open streams close with them."""
        while self._idle:
            self._idle.pop().close()

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self.close()

    async def _with_retries(
        self, once: Callable[[RequestSpec], Awaitable[T]], ask: RequestSpec
    ) -> T:
        attempt = 0
        while True:
            try:
                return await once(ask)
            except DynamoError as error:
                wait_s = self._retry_policy.next_delay_s(error, attempt)
                if wait_s is None:
                    raise
            await self._network.sleep(wait_s)
            attempt += 1

    async def _request_once(self, ask: RequestSpec) -> Any:
        exchange, head = await self._send_request(ask, total_timeout(self._config.timeout))
        with self._close_on_error(exchange):
            body = await exchange.read_body()
        self._release_channel(exchange)
        if head.status != 200:
            raise self._api_error(head, body)
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._api_error(head, body) from error

    async def _open_stream_once(self, ask: RequestSpec) -> EventStreamReader:
        exchange, head = await self._send_request(ask, idle_timeout(self._config.timeout))
        if head.status != 200 or EVENT_STREAM_TYPE not in head.headers.get("content-type", ""):
            with self._close_on_error(exchange):
                body = await exchange.read_body()
            self._release_channel(exchange)
            raise self._api_error(head, body)
        request_id = head.headers.get("x-request-id", "")
        events = EventStreamReader(
            exchange, self._release_channel, self._close_on_error, request_id
        )
        await events.fill()
        return events

    @contextmanager
    def _close_on_error(self, exchange: HttpCall) -> Iterator[None]:
        """What fails or is cancelled inside closes the connection."""
        try:
            yield
        except (OSError, MalformedResponseError) as error:
            exchange.close()
            raise self._connection_error(error) from error
        except BaseException:
            exchange.close()
            raise

    async def _send_request(
        self, ask: RequestSpec, patience: RemainingTime
    ) -> tuple[HttpCall, ResponseHead]:
        request = self._encode_request(ask)
        while True:
            channel, used = await self._acquire_channel(patience)
            exchange = HttpCall(channel, patience)
            try:
                return exchange, await exchange.start(request)
            except (OSError, MalformedResponseError) as error:
                exchange.close()
                # An idle connection may close just when it is used; the server saw nothing of it.
                if used and not exchange.response_started and not isinstance(error, TimeoutError):
                    continue
                raise self._connection_error(error) from error
            except BaseException:
                exchange.close()
                raise

    async def _acquire_channel(self, patience: RemainingTime) -> tuple[Channel, bool]:
        while self._idle:
            channel = self._idle.pop()
            if channel.is_reusable():
                return channel, True
            channel.close()
        try:
            limit_s = min(CONNECT_TIMEOUT_S, max(0.001, patience()))
            return await self._network.connect(self._origin, limit_s), False
        except OSError as error:
            raise unreachable_error(self._config.base_url, self._origin, error) from error

    def _release_channel(self, exchange: HttpCall) -> None:
        channel = exchange.release_channel()
        if channel is None:
            return
        if len(self._idle) < MAX_IDLE_CHANNELS:
            self._idle.append(channel)
        else:
            channel.close()

    def _encode_request(self, ask: RequestSpec) -> bytes:
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
                f"{url} did not answer within {self._config.timeout:g} s", hint=TIMEOUT_HINT
            )
        return DynamoConnectionError(f"the connection to {url} broke: {error}")

    def _api_error(self, head: ResponseHead, body: bytes) -> DynamoError:
        return api_error(
            head.status,
            body,
            request_id=head.headers.get("x-request-id", ""),
            retry_after_s=parse_retry_after(head.headers.get("retry-after", "")),
        )
