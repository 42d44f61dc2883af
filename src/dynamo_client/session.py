"""Connections that are reused, and requests that are retried."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from dynamo_client.api_requests import JsonObject, RequestSpec
from dynamo_client.config import DynamoConfig, Origin, parse_base_url
from dynamo_client.errors import (
    DynamoAPIError,
    DynamoCertificateError,
    DynamoConnectionError,
    DynamoError,
    DynamoTimeoutError,
    api_error,
)
from dynamo_client.http1 import MalformedResponseError, ResponseHead, request_bytes
from dynamo_client.http_call import HttpCall, RemainingTime, idle_timeout, total_timeout
from dynamo_client.network import Channel, NetworkBackend
from dynamo_client.streams import EVENT_STREAM_TYPE, EventStreamReader

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_CHANNELS = 128
RETRYABLE_STATUSES = frozenset((408, 429, 502, 503, 504))
JITTER = 0.25
MAX_RETRY_AFTER_S = 60.0
"""A longer Retry-After is not obeyed; the error is raised at once."""
TIMEOUT_HINT = "raise the limit by DynamoConfig(timeout=...), or read the answer as a stream"
START_SERVER_HINT = "check that a server runs at this address; `dynamo run` starts one"
TRUST_CERTIFICATE_HINT = "set SSL_CERT_FILE=FILE.pem to trust more certificates than the system's"


class ClientSession:
    """The connections of one client. The constructor does no I/O."""

    def __init__(self, config: DynamoConfig, network: NetworkBackend) -> None:
        self._config = config
        self._network = network
        self._origin, self._prefix = parse_base_url(config.base_url)
        self._idle: list[Channel] = []

    async def request(self, spec: RequestSpec, *, retry: bool = True) -> JsonObject:
        """Return the JSON object of the reply. With `retry`, failed attempts are repeated as the
        configuration says. Raises `DynamoError`."""
        if retry:
            return await self._with_retries(self._request_once, spec)
        return await self._request_once(spec)

    async def open_stream(self, spec: RequestSpec) -> EventStreamReader:
        """Open a stream and wait for its first event. Raises `DynamoError`."""
        return await self._with_retries(self._open_stream_once, spec)

    def close(self) -> None:
        """Close idle connections. The connection of an open stream closes with the stream."""
        while self._idle:
            self._idle.pop().close()

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self.close()

    async def _with_retries(
        self, once: Callable[[RequestSpec], Awaitable[T]], spec: RequestSpec
    ) -> T:
        attempt = 0
        while True:
            try:
                return await once(spec)
            except DynamoError as error:
                wait_s = retry_delay_s(self._config, error, attempt)
                if wait_s is None:
                    raise
            await self._network.sleep(wait_s)
            attempt += 1

    async def _request_once(self, spec: RequestSpec) -> JsonObject:
        call, head = await self._send_request(spec, total_timeout(self._config.timeout))
        body = await self._read_body(call)
        if head.status != 200:
            raise self._api_error(head, body)
        try:
            return msgspec.json.decode(body, type=JsonObject)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._api_error(head, body) from error

    async def _open_stream_once(self, spec: RequestSpec) -> EventStreamReader:
        call, head = await self._send_request(spec, idle_timeout(self._config.timeout))
        if head.status != 200 or EVENT_STREAM_TYPE not in head.headers.get("content-type", ""):
            raise self._api_error(head, await self._read_body(call))
        request_id = head.headers.get("x-request-id", "")
        events = EventStreamReader(call, self._release_channel, self._close_on_error, request_id)
        await events.fill()
        return events

    async def _read_body(self, call: HttpCall) -> bytes:
        with self._close_on_error(call):
            body = await call.read_body()
        self._release_channel(call)
        return body

    @contextmanager
    def _close_on_error(self, call: HttpCall) -> Iterator[None]:
        """Close the connection if the body of the `with` statement fails or is cancelled."""
        try:
            yield
        except (OSError, MalformedResponseError) as error:
            call.close()
            raise self._connection_error(error) from error
        except BaseException:
            call.close()
            raise

    async def _send_request(
        self, spec: RequestSpec, remaining_time: RemainingTime
    ) -> tuple[HttpCall, ResponseHead]:
        request = self._encode_request(spec)
        while True:
            channel, reused = await self._acquire_channel(remaining_time)
            call = HttpCall(channel, remaining_time)
            try:
                return call, await call.start(request)
            except (OSError, MalformedResponseError) as error:
                call.close()
                # The server may close an idle connection while the request is sent. The server
                # has not read the request in that case.
                if reused and not call.response_started and not isinstance(error, TimeoutError):
                    continue
                raise self._connection_error(error) from error
            except BaseException:
                call.close()
                raise

    async def _acquire_channel(self, remaining_time: RemainingTime) -> tuple[Channel, bool]:
        """Return a channel and whether it is reused."""
        while self._idle:
            channel = self._idle.pop()
            if channel.is_reusable():
                return channel, True
            channel.close()
        try:
            limit_s = min(CONNECT_TIMEOUT_S, max(0.001, remaining_time()))
            return await self._network.connect(self._origin, limit_s), False
        except OSError as error:
            raise _unreachable_error(self._config.base_url, self._origin, error) from error

    def _release_channel(self, call: HttpCall) -> None:
        channel = call.release_channel()
        if channel is None:
            return
        if len(self._idle) < MAX_IDLE_CHANNELS:
            self._idle.append(channel)
        else:
            channel.close()

    def _encode_request(self, spec: RequestSpec) -> bytes:
        headers = {
            "host": self._origin.authority,
            "accept-encoding": "identity",
            "user-agent": "dynamo-client",
        }
        if self._config.api_key:
            headers["authorization"] = f"Bearer {self._config.api_key}"
        if spec.request_id:
            headers["x-request-id"] = spec.request_id
        path = self._prefix + spec.path
        if spec.body is None:
            return request_bytes("GET", path, headers)
        headers["content-type"] = "application/json"
        return request_bytes("POST", path, headers, msgspec.json.encode(spec.body))

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


def _unreachable_error(url: str, origin: Origin, error: OSError) -> DynamoConnectionError:
    """The error of a connection that could not be opened."""
    if origin.secure:
        from ssl import SSLCertVerificationError

        if isinstance(error, SSLCertVerificationError):
            return DynamoCertificateError(
                f"the certificate of {url} is not trusted: {error.verify_message}",
                hint=TRUST_CERTIFICATE_HINT,
            )
    message = f"cannot connect to {url}: {error or 'the connection timed out'}"
    return DynamoConnectionError(message, hint=_proxy_hint(origin) or START_SERVER_HINT)


def _proxy_hint(origin: Origin) -> str:
    """A hint for an environment that names a proxy; this client always connects directly."""
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    scheme = "https" if origin.secure else "http"
    name = scheme if scheme in proxies else "all"
    if name not in proxies or proxy_bypass(origin.host):
        return ""
    return f"{name}_proxy is set, but this client connects directly, without a proxy"


def retry_delay_s(config: DynamoConfig, error: DynamoError, attempt: int) -> float | None:
    """Seconds to wait after attempt number `attempt` (from 0) failed; None: do not retry. The delay
    grows exponentially, with jitter. A server's Retry-After is its lower bound."""
    if attempt >= config.max_retries or not is_retryable(error):
        return None
    retry_after_s = getattr(error, "retry_after_s", None) or 0.0
    if retry_after_s > MAX_RETRY_AFTER_S:
        return None
    delay_s = config.retry_delay * 2**attempt
    min_s = max(retry_after_s, delay_s * (1 - JITTER))
    return random.uniform(min_s, max(retry_after_s, delay_s) * (1 + JITTER))


def is_retryable(error: DynamoError) -> bool:
    """Whether the same request may succeed later and has certainly not been answered."""
    if isinstance(error, DynamoAPIError):
        return error.status in RETRYABLE_STATUSES
    not_retried = (DynamoTimeoutError, DynamoCertificateError)
    return isinstance(error, DynamoConnectionError) and not isinstance(error, not_retried)


def parse_retry_after(value: str) -> float | None:
    """Convert the value of a Retry-After header, seconds or a date, to seconds from now."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        from email.utils import parsedate_to_datetime
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
