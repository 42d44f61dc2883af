"""Streams whose answer has not begun: their heads, their comment lines, and their errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo.application.messages.writer import MessageWriter
from dynamo.core.clock import SystemClock

Open = Callable[..., Awaitable[Any]]

MESSAGES = [{"role": "user", "content": "one two"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "one two"},
    "/v1/responses": {"input": "one two"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
SURFACES = pytest.mark.parametrize("path", BODIES)


class SteppedClock(SystemClock):
    """A clock that the test moves. Sleepers wake at their times."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleeper: tuple[float, asyncio.Event] | None = None

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleeper = (self._now + seconds, woken)
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        end = self._now + seconds
        while self._sleeper is not None and self._sleeper[0] <= end:
            self._now, woken = self._sleeper
            self._sleeper = None
            woken.set()
            while self._sleeper is None:
                await asyncio.sleep(0)
        self._now = end


class Stream:
    """The client's end of a request for a stream."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def read_head(self) -> int:
        head = await self._reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1])

    async def read_comment(self) -> None:
        await self._reader.readuntil(b": keep-alive\n\r\n")

    async def read_events(self) -> list[tuple[str, Any]]:
        """Return names and data of all further events."""
        body = b""
        while size := int(await self._reader.readline(), 16):
            body += await self._reader.readexactly(size)
            await self._reader.readline()
        events = []
        for block in body.decode().split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.splitlines() if line[0] != ":")
            data = fields["data"]
            events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return events

    async def read_json(self) -> Any:
        return json.loads(await self._reader.read())


@asynccontextmanager
async def request(site: Any, path: str, **fields: Any) -> AsyncIterator[Stream]:
    body = json.dumps({"model": "words", "stream": True, **BODIES[path], **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json"
    writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    try:
        yield Stream(reader)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
async def site(open_site: Open, clock: SteppedClock) -> Any:
    site = await open_site(clock=clock, max_concurrent_requests=1, max_waiting_requests=1)
    site.processor.gate.clear()
    return site


def text_of(events: list[tuple[str, Any]]) -> str:
    texts = []
    for _, data in events:
        if data == "[DONE]":
            break
        if data.get("choices"):
            choice = data["choices"][0]
            texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        elif "delta" in data:
            delta = data["delta"]
            texts.append(delta if isinstance(delta, str) else delta.get("text", ""))
    return "".join(texts)


@SURFACES
async def test_a_stream_that_waits_has_a_head_and_comments(
    site: Any, clock: SteppedClock, path: str
) -> None:
    async with request(site, path) as stream:
        await site.processor.entered.wait()
        await clock.advance(1.0)
        assert await stream.read_head() == 200
        for _ in range(2):
            await clock.advance(15.0)
            await stream.read_comment()
        site.processor.gate.set()
        assert text_of(await stream.read_events()) == "one two "


@SURFACES
async def test_an_error_after_the_head_is_an_event(
    site: Any, clock: SteppedClock, path: str
) -> None:
    site.processor.fails = "before"
    async with request(site, path) as stream:
        await site.processor.entered.wait()
        await clock.advance(1.0)
        assert await stream.read_head() == 200
        site.processor.gate.set()
        events = await stream.read_events()
    if path == "/v1/messages":
        assert [name for name, _ in events] == ["message_start", "error"]
        assert events[1][1]["error"]["type"] == "overloaded_error"
    elif path == "/v1/responses":
        names = ["response.created", "response.in_progress", "response.failed"]
        assert [name for name, _ in events] == names
        assert [data["sequence_number"] for _, data in events] == [0, 1, 2]
        assert events[2][1]["response"]["error"]["message"].startswith("no_workers")
    else:
        (_, data), (_, done) = events
        assert (data["error"]["code"], data["error"]["status"]) == ("no_workers", 503)
        assert done == "[DONE]"


@SURFACES
async def test_an_error_at_once_has_a_status(site: Any, path: str) -> None:
    site.processor.fails = "before"
    site.processor.gate.set()
    async with request(site, path) as stream:
        assert await stream.read_head() in {503, 529}


async def test_a_prompt_that_is_not_checked_yet_keeps_its_status(
    site: Any, clock: SteppedClock
) -> None:
    """The head waits for a long prompt to be encoded, up to the time of a comment."""
    site.processor.fails = "before"
    site.processor.gate.set()
    site.processor.encoder_free.clear()
    async with request(site, "/v1/chat/completions") as stream:
        while not site.processor.requests:
            await asyncio.sleep(0)
        await clock.advance(10.0)
        site.processor.encoder_free.set()
        assert await stream.read_head() == 503


async def test_a_stream_that_waits_for_a_place_has_a_head(site: Any, clock: SteppedClock) -> None:
    path = "/v1/chat/completions"
    async with request(site, path) as first, request(site, path) as second:
        while site.application.generation.concurrency.waiting < 1:
            await asyncio.sleep(0)
        async with request(site, path) as third:
            assert await third.read_head() == 503
        await clock.advance(1.0)
        assert [await first.read_head(), await second.read_head()] == [200, 200]
        site.processor.gate.set()
        for stream in (first, second):
            assert text_of(await stream.read_events()) == "one two "


async def test_a_head_waits_for_admission_within_the_slo(
    open_site: Open, clock: SteppedClock
) -> None:
    site = await open_site(clock=clock, ttft_slo=2.0)
    site.processor.fails = "before"
    for seconds, status in ((1.5, 503), (3.0, 200)):
        site.processor.gate.clear()
        site.processor.entered.clear()
        async with request(site, "/v1/chat/completions") as stream:
            await site.processor.entered.wait()
            await clock.advance(seconds)
            site.processor.gate.set()
            assert await stream.read_head() == status


async def test_an_answer_that_is_not_streamed_stays_silent(site: Any, clock: SteppedClock) -> None:
    site.processor.fails = "before"
    async with request(site, "/v1/chat/completions", stream=False) as answer:
        await site.processor.entered.wait()
        await clock.advance(60.0)
        site.processor.gate.set()
        assert await answer.read_head() == 503


async def test_a_stream_that_cannot_begin_leaves_others_alone(
    site: Any, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.application.generation.concurrency.update_limits(2, 0)
    monkeypatch.setattr(MessageWriter, "encode_start", lambda _: 1 / 0)
    async with request(site, "/v1/messages") as broken, request(site, "/v1/completions") as other:
        while len(site.processor.requests) < 2:
            await asyncio.sleep(0)
        await clock.advance(2.0)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await broken.read_head()
        assert await other.read_head() == 200
        await clock.advance(15.0)
        await other.read_comment()
