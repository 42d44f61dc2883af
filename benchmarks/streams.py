"""Clients of streamed chat answers, each with its own connection, that record when each part arrives.

The reading loop does little else. A recorded pause is therefore the server's. Texts are extracted from
the events when they arrive and compared afterwards.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import random
import re
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import httptools

now = time.perf_counter
_TEXT = re.compile(rb'"content":"((?:[^"\\]|\\.)+)"')
_LAST = (b'"usage":{', b'"finish_reason":"', b'data: {"error"')


class Stream(asyncio.Protocol):
    """A request. `error` is empty on success; `times` holds the arrival of each text."""

    def __init__(self, key: int, request: bytes) -> None:
        self.key, self._request = key, request
        self.started, self.ended = now(), 0.0
        self.times = array("d")
        self.pieces: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.status, self.usage, self.finish, self.error = 0, -1, "", ""
        self._rest = b""
        self._parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status != 200:
            self._rest += body
            return
        events, _, self._rest = (self._rest + body).rpartition(b"\n\n")
        if texts := _TEXT.findall(events):
            self.times.append(now())
            self.pieces += texts
        if any(mark in events for mark in _LAST):
            self._read_last_events(events)

    def on_message_complete(self) -> None:
        if self.status != 200:
            self.error = f"HTTP {self.status} {self._rest.decode(errors='replace')[:300]}"
        elif not self.error and not self.finish:
            self.error = "no finish reason"
        self._end()

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.done.done():
            self.error = self.error or "connection cut"
            self._end()

    def mark_hung(self) -> None:
        """End the stream with the error "hung"."""
        self.error = "hung"
        self._end()

    def is_complete(self, tokens: int) -> bool:
        """Return True if the stream ended normally with this number of tokens."""
        return not self.error and self.finish == "length" and self.usage == tokens

    @property
    def text(self) -> bytes:
        """The text, as escaped in JSON."""
        return b"".join(self.pieces)

    @property
    def worker(self) -> str:
        """The instance that answered first."""
        return self.headers.get("x-dynamo-worker", "")

    @property
    def first_s(self) -> float:
        """Seconds to the first text, infinite without text."""
        return self.times[0] - self.started if self.times else float("inf")

    def longest_gap(self, when: float, until: float | None = None) -> float:
        """Return the longest time without text that ends after `when` and begins before `until`.
        The default is half a second later, since a busy machine still delivers text after a
        fault."""
        until = when + 0.5 if until is None else until
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs if b >= when and a <= until), default=0.0)

    def _read_last_events(self, events: bytes) -> None:
        for line in events.split(b"\n\n"):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.error = f"event {event['error']}"
            if event.get("usage"):
                self.usage = event["usage"]["completion_tokens"]
            for choice in event.get("choices", ()):
                self.finish = choice.get("finish_reason") or self.finish

    def _end(self) -> None:
        if not self.done.done():
            self.ended = now()
            self.done.set_result(None)
            self.transport.close()


class StreamClient:
    """Sends requests to a server. `live` holds the open streams. A stream hangs after `hung_s`."""

    def __init__(self, url: str, words: Sequence[str], hung_s: float = 90.0) -> None:
        self._port, self._words, self._hung_s = int(url.rsplit(":", 1)[1]), words, hung_s
        self.live: set[Stream] = set()

    def encode_request(self, key: int, prompt: int, tokens: int, model: str = "smol") -> bytes:
        """Return the request of a key: always the same prompt of `prompt` words."""
        content = " ".join(random.Random(key).choices(self._words, k=prompt))
        body = {
            "model": model, "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        data = json.dumps(body).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
        )

    async def send(self, key: int, request: bytes) -> Stream:
        """Send a request and read its stream to the end. Errors are recorded in the stream."""
        stream = Stream(key, request)
        self.live.add(stream)
        try:
            async with asyncio.timeout(self._hung_s):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: stream, "127.0.0.1", self._port)
                await stream.done
        except TimeoutError:
            stream.mark_hung()
        except OSError as error:
            stream.error, stream.ended = f"no connection: {error}", now()
        self.live.discard(stream)
        return stream


class LoopLag:
    """Measures the lag of this process's event loop every 10 ms. Use with `async with`."""

    async def __aenter__(self) -> Self:
        self._late = array("d")
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            due = now() + 0.01
            await asyncio.sleep(0.01)
            self._late.append(max(0.0, now() - due))

    def percentiles(self) -> dict[str, float]:
        """Return percentiles of the lag in milliseconds."""
        return percentiles_ms(self._late)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that a `share` of the values does not exceed; NaN for none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)] if ordered else float("nan")


def percentiles_ms(values: Sequence[float]) -> dict[str, float]:
    """Return the number of values, and their percentiles in milliseconds for values in seconds."""
    named = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    percentiles = {name: round(quantile(values, share) * 1e3, 1) for name, share in named.items()}
    return {"n": len(values), **(percentiles if values else {})}


def difference(reference: Sequence[bytes], pieces: Sequence[bytes]) -> Counter[str]:
    """Count pieces of text that were lost, doubled (or added) or altered. Equal texts have no
    difference, even if they were split differently."""
    changes: Counter[str] = Counter()
    if b"".join(reference) == b"".join(pieces):
        return changes
    names = {"delete": "lost", "insert": "doubled", "replace": "altered"}
    matcher = difflib.SequenceMatcher(None, reference, pieces, autojunk=False)
    for kind, low, high, other_low, other_high in matcher.get_opcodes():
        if kind != "equal":
            changes[names[kind]] += max(high - low, other_high - other_low)
    return changes
