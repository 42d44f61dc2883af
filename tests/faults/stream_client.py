"""A streaming client that records text, counts, gaps and the end of each answer."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class Answer:
    """A streamed answer. `error` is "" or says what went wrong."""

    key: int
    text: str = ""
    tokens: int = 0
    status: int = 0
    error: str = ""
    worker: str = ""
    prefill_worker: str = ""
    finish: str = ""
    usage: int = -1
    retry_after: str = ""
    seconds: float = 0.0
    first_s: float = 0.0
    longest_gap_s: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def complete(self) -> bool:
        """True if the answer is complete and its usage is right."""
        return not self.error and self.finish == "length" and self.usage == self.tokens


def body_of(key: int, tokens: int, words: int, **fields: Any) -> dict[str, Any]:
    """Return a chat request. Each key has its own prompt."""
    content = f"{key} " + " ".join(f"word{(key * 7 + at) % 97}" for at in range(words))
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


class KeptConnection:
    """A connection that is opened for the first request and kept for the next ones, as clients do.
    `async with` closes it."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._at = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection, or a new one if the server has closed it."""
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(*self._at)
        return self._streams

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def ask(
    port: int,
    key: int,
    tokens: int = 60,
    *,
    words: int = 8,
    timeout_s: float = 50.0,
    connection: KeptConnection | None = None,
    **fields: Any,
) -> Answer:
    """Request and read an answer, on `connection` or a new connection. Errors are recorded in it."""
    answer = Answer(key)
    await read(port, answer, body_of(key, tokens, words, **fields), timeout_s, connection)
    return answer


async def read(
    port: int,
    answer: Answer,
    body: dict[str, Any],
    timeout_s: float,
    connection: KeptConnection | None = None,
) -> None:
    """Send a request and read the answer into `answer`."""
    began, keep = time.monotonic(), connection is not None
    connection = connection or KeptConnection(port)
    try:
        async with asyncio.timeout(timeout_s):
            ended = await _exchange(connection, answer, json.dumps(body).encode(), began, keep=keep)
            keep &= ended
    except TimeoutError:
        answer.error = "the answer did not end in time"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        answer.error = answer.error or f"connection: {type(error).__name__}"
    finally:
        if answer.error or not keep:
            connection.close()
    answer.seconds = time.monotonic() - began
    answer.begun.set()


async def _exchange(
    connection: KeptConnection, answer: Answer, data: bytes, began: float, *, keep: bool
) -> bool:
    """Return whether the server keeps the connection open."""
    reader, writer = await connection.open()
    close = b"" if keep else b"connection: close\r\n"
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n%b"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (close, len(data), data)
    )
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
    answer.status = int(head[0].split()[1])
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head)
    }
    answer.worker = headers.get("x-dynamo-worker", "")
    answer.prefill_worker = headers.get("x-dynamo-prefill-worker", "")
    answer.retry_after = headers.get("retry-after", "")
    if answer.status != 200:
        size = int(headers.get("content-length", 0))
        answer.error = f"HTTP {answer.status} {(await reader.readexactly(size)).decode()[:600]}"
        return False
    last = 0.0
    while (size := int(await reader.readline(), 16)) > 0:
        chunk = await reader.readexactly(size + 2)
        now = time.monotonic()
        for event in chunk[:-2].split(b"\n\n"):
            if event.startswith(b"data: {"):
                _take(answer, json.loads(event[6:]))
        if answer.tokens and not answer.first_s:
            answer.first_s = now - began
            answer.begun.set()
        answer.longest_gap_s = max(answer.longest_gap_s, now - last if last else 0.0)
        last = now
    await reader.readline()
    return headers.get("connection") != "close"


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = f"event {event['error']}"
        return
    if event.get("usage"):
        answer.usage = event["usage"]["completion_tokens"]
    for choice in event.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            answer.text += text
            answer.tokens += 1
        answer.finish = choice.get("finish_reason") or answer.finish
