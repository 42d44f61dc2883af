"""HTTP/1.1 client of the load generator, with little work per token.

Client and server share the CPU in most measurements. A chunked event stream is therefore not
decoded: complete events are counted in the raw bytes, and its last bytes show its end.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from time import monotonic as now
from typing import Any, cast

import msgspec

from dynamo.core.errors import ConfigError, DynamoError
from dynamo.operations.bench.request_sample import RequestSample
from dynamo.operations.bench.workload import BenchTarget
from dynamo_client.config import parse_base_url

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_EVENT_STREAM = re.compile(rb"\r\ncontent-type: *text/event-stream", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9a-fA-F]+)[^\r]*\r\n")


class Unreachable(DynamoError):
    """The measured server cannot be reached or lacks an API that the measurement needs."""

    code = "unreachable"


class LoadConnection(asyncio.Protocol):
    """A connection for one request at a time. Its response goes to a `RequestSample`."""

    def __init__(self) -> None:
        self.closed = False
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._is_event_stream = False
        self._tail = b""
        self._body: list[bytes] = []
        self._body_length = -1
        self._close_after_reply = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send_request(self, request: bytes, sample: RequestSample) -> asyncio.Future[None]:
        """Send a request. The future is done when the response is complete or the connection is
        lost."""
        self._sample = sample
        self._is_event_stream = False
        self._head = self._tail = b""
        self._body = []
        self._body_length = -1
        self._done = asyncio.get_running_loop().create_future()
        sample.sent_at = now()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        at = now()
        if self._is_event_stream:
            if self._sample.feed(data, at):
                self._tail = data
                return
            self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
            if self._tail == LAST_CHUNK:
                self._finish(at)
        elif self._done is not None:
            self._receive_head(data, at)

    def _receive_head(self, data: bytes, at: float) -> None:
        """Receive bytes of the response head, or of a body that is not an event stream."""
        if self._sample.status:
            self._receive_body(data, at)
            return
        self._head += data
        head, end, rest = self._head.partition(HEAD_END)
        if not end:
            return
        if not (head.startswith(b"HTTP/1.") and head[9:12].isdigit()):
            self.abort()
            return
        self._sample.status = int(head[9:12])
        self._close_after_reply = _CLOSE.search(head) is not None or head.startswith(b"HTTP/1.0")
        chunked = _CHUNKED.search(head) is not None
        self._is_event_stream = (
            self._sample.status == 200 and _EVENT_STREAM.search(head) is not None
        )
        if self._is_event_stream:
            if rest:
                self.data_received(rest)
            return
        length = _LENGTH.search(head)
        self._body_length = int(length[1]) if length else -2 if chunked else -1
        self._receive_body(rest, at)

    def _receive_body(self, data: bytes, at: float) -> None:
        self._body.append(data)
        body = b"".join(self._body)
        if self._body_length == -2 and body.endswith((LAST_CHUNK, b"0\r\n\r\n")):
            self._finish(at, decode_chunked(body))
        elif self._body_length >= 0 and len(body) >= self._body_length:
            self._finish(at, body)

    def _finish(self, at: float, body: bytes = b"") -> None:
        done, self._done = self._done, None
        self._is_event_stream = False
        self._sample.finish(at, body)
        if self._sample.keep_body and body:
            self._sample.body.append(body)
        if self._close_after_reply:
            self.abort()
        if done is not None and not done.done():
            done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._done is None:
            return
        if not self._close_after_reply or error is not None:
            self._sample.error = "connection lost"
        self._finish(now(), b"".join(self._body))

    def abort(self) -> None:
        """Close the connection without waiting for pending data."""
        self.closed = True
        self._transport.abort()


class LoadClient:
    """A pool of connections to the target."""

    def __init__(self, target: BenchTarget) -> None:
        try:
            self._origin, self._base_path = parse_base_url(target.url)
        except ValueError:
            hint = "such as http://127.0.0.1:8000"
            raise ConfigError(f"not a URL: {target.url!r}", hint=hint) from None
        self._target = target
        self._idle: list[LoadConnection] = []
        self._headers = f"Host: {self._origin.authority}\r\nContent-Type: application/json\r\n"
        if target.api_key:
            self._headers += f"Authorization: Bearer {target.api_key}\r\n"

    def encode_request(self, path: str, body: Any, method: str = "POST") -> bytes:
        """Return the bytes of one request. `body` is encoded as JSON; None sends an empty body."""
        data = b"" if body is None else msgspec.json.encode(body)
        head = f"{method} {self._base_path}{path} HTTP/1.1\r\n{self._headers}"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def send(self, request: bytes, sample: RequestSample) -> None:
        """Send a request on an idle or a new connection. Failures are recorded in the sample."""
        connection = None
        try:
            connection = await self._acquire_connection()
            done = connection.send_request(request, sample)
            await asyncio.wait_for(done, self._target.timeout_s or None)
        except TimeoutError:
            sample.error = "timeout"
        except OSError as error:
            sample.error = f"cannot connect: {error.strerror or error}"
            sample.sent_at = sample.sent_at or now()
            sample.ended_at = now()
        finally:
            if connection is not None and sample.ended_at == 0.0:
                connection.abort()
                sample.ended_at = now()
            elif connection is not None and not connection.closed:
                self._idle.append(connection)

    async def fetch_json(
        self, path: str, body: Any = None, method: str = "POST"
    ) -> tuple[int, Any]:
        """Send one plain request and return the status and the JSON body, None if the body is not
        JSON. Raises `Unreachable`."""
        sample = RequestSample(array("d"), keep_body=True)
        await self.send(self.encode_request(path, body, method), sample)
        if not sample.status:
            raise Unreachable(
                f"{self._target.url}: {sample.error}",
                hint="`dynamo ps` lists the deployments that run on this host",
            )
        try:
            return sample.status, msgspec.json.decode(b"".join(sample.body))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return sample.status, None

    def close(self) -> None:
        """Close every idle connection."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _acquire_connection(self) -> LoadConnection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        secure, host, port = self._origin
        _, connection = await loop.create_connection(LoadConnection, host, port, ssl=secure or None)
        return connection


def decode_chunked(body: bytes) -> bytes:
    """Return the content of a chunked body."""
    parts = []
    position = 0
    while (chunk := _CHUNK.match(body, position)) and (size := int(chunk[1], 16)):
        parts.append(body[chunk.end() : chunk.end() + size])
        position = chunk.end() + size + 2
    return b"".join(parts)
