"""Streamed chat answers, each on a connection of its own, that remember when every part came.

The loop that reads does little else, so that a pause which it notes is the server's: texts are cut
out of the events as they come and compared only afterwards.
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
    """One request. `error`: what went wrong, "" = nothing; `times`: when text came."""

    def __init__(self, key: int, wire: bytes) -> None:
        self.key, self._wire = key, wire
        self.began, self.ended = now(), 0.0
        self.times = array("d")
        self.pieces: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.status, self.usage, self.finish, self.error = 0, -1, "", ""
        self._rest = b""
        self._parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._wire)

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
            self._last_words(events)

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

    def hung(self) -> None:
        """Wait no longer."""
        self.error = "hung"
        self._end()

    def whole(self, tokens: int) -> bool:
        """It came to its end, and was counted right."""
        return not self.error and self.finish == "length" and self.usage == tokens

    @property
    def text(self) -> bytes:
        """As JSON writes it."""
        return b"".join(self.pieces)

    @property
    def worker(self) -> str:
        """The instance that answered first."""
        return self.headers.get("x-dynamo-worker", "")

    @property
    def first_s(self) -> float:
        """Seconds to the first text; infinite without one."""
        return self.times[0] - self.began if self.times else float("inf")

    def gap_at(self, when: float, until: float | None = None) -> float:
        """The longest time without text that ends after `when` and begins before `until` (default:
        half a second later, for on a busy machine much is on its way still)."""
        until = when + 0.5 if until is None else until
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs if b >= when and a <= until), default=0.0)

    def _last_words(self, events: bytes) -> None:
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


class Crowd:
    """Asks one server. `live`: the streams under way; what does not end in `hung_s` seconds hangs."""

    def __init__(self, url: str, words: Sequence[str], hung_s: float = 90.0) -> None:
        self._port, self._words, self._hung_s = int(url.rsplit(":", 1)[1]), words, hung_s
        self.live: set[Stream] = set()

    def wire(self, key: int, prompt: int, tokens: int) -> bytes:
        """The request of that key: always the same prompt of so many words."""
        content = " ".join(random.Random(key).choices(self._words, k=prompt))
        body = {
            "model": "smol", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        data = json.dumps(body).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
        )

    async def ask(self, key: int, wire: bytes) -> Stream:
        """Ask, read all, never raise."""
        stream = Stream(key, wire)
        self.live.add(stream)
        try:
            async with asyncio.timeout(self._hung_s):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: stream, "127.0.0.1", self._port)
                await stream.done
        except TimeoutError:
            stream.hung()
        except OSError as error:
            stream.error, stream.ended = f"no connection: {error}", now()
        self.live.discard(stream)
        return stream


class Lag:
    """How late this process itself is: looks at the clock every 10 ms. Use `async with`."""

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

    def figures(self) -> dict[str, float]:
        """Percentiles, in milliseconds."""
        return in_ms(self._late)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)] if ordered else float("nan")


def in_ms(values: Sequence[float]) -> dict[str, float]:
    """How many seconds-values there are, and percentiles in milliseconds."""
    named = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: round(quantile(values, share) * 1e3, 1) for name, share in named.items()}
    return {"n": len(values), **(found if values else {})}


def difference(reference: Sequence[bytes], pieces: Sequence[bytes]) -> Counter[str]:
    """Pieces of text lost, doubled (or added) and altered; nothing of equal texts, however cut."""
    found: Counter[str] = Counter()
    if b"".join(reference) == b"".join(pieces):
        return found
    names = {"delete": "lost", "insert": "doubled", "replace": "altered"}
    matcher = difflib.SequenceMatcher(None, reference, pieces, autojunk=False)
    for kind, low, high, other_low, other_high in matcher.get_opcodes():
        if kind != "equal":
            found[names[kind]] += max(high - low, other_high - other_low)
    return found
