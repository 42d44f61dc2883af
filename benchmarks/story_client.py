"""A client of all surfaces that notes when its requests were sent and their answers came."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from time import monotonic, thread_time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import uvloop

TEXT = re.compile(rb'"(?:content|text|delta)":"[^"]')
"""Text in an event of any surface."""
WORDS = ("over", "and", "after", "world", "water", "long", "house", "number", "people", "day")
CUT_BYTES = 2_000
TOKENS = 12
EMBEDDING_MODEL = "all-MiniLM-L6-v2"
CHATS = (
    "chat", "chat stream", "text", "text stream n", "responses", "responses stream",
    "responses background", "messages", "messages stream", "cut", "bad",
)  # fmt: skip
"""Kinds of requests for text. "n": two choices; "cut": the client leaves; "bad": it is refused."""
EMBEDDINGS, CONTROL = "embeddings", "control"
CONTROL_S, WORK_S = 0.05, 0.0005


class Sent(NamedTuple):
    """A request as its client saw it. Times in seconds since its first byte was sent: `first_s` to
    the first text of a stream, `seconds` to the last byte that came, or to the cut. `answer`: the
    body of a control."""

    name: str
    surface: str
    first_s: float | None
    seconds: float
    answer: str


def make_call(model: str, surface: str, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request."""
    kind, *words = surface.split()
    fields = {"model": model, "stream": bool({"stream", "background"} & {*words})}
    if kind == EMBEDDINGS:
        return "/v1/embeddings", {"model": EMBEDDING_MODEL, "input": prompt}
    if kind == "responses":
        extra = {"max_output_tokens": TOKENS, "background": "background" in words}
        return "/v1/responses", fields | {"input": prompt} | extra
    fields |= {"max_tokens": TOKENS}
    if kind == "text":
        return "/v1/completions", fields | {"prompt": prompt, "n": 1 + ("n" in words)}
    fields |= {"messages": [{"role": "user", "content": prompt}]}
    if kind == "messages":
        return "/v1/messages", fields
    if kind == "cut":
        fields |= {"stream": True, "max_tokens": 400, "ignore_eos": True}
    if kind == "bad":
        fields |= {"temperature": -1}
    return "/v1/chat/completions", fields


class Connection(asyncio.Protocol):
    """Sends one request after the other. Each part of an answer is noted when it is read."""

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport, self.closed = transport, False

    def send(self, wire: bytes, *, cut: bool) -> asyncio.Future[None]:
        """Send a request. The future is done at the end of its answer, or when it is cut."""
        self._parser, self._bytes, self._cut = httptools.HttpResponseParser(self), 0, cut
        self.answer = b""
        self.first_at: float | None = None
        self._done = asyncio.get_running_loop().create_future()
        self.began_at = self.ended_at = monotonic()
        self._transport.write(wire)
        return self._done

    def data_received(self, data: bytes) -> None:
        """Note the time, and look for text."""
        self.ended_at = now = monotonic()
        self._bytes += len(data)
        if self.first_at is None and TEXT.search(data):
            self.first_at = now
        self._parser.feed_data(data)
        if self._cut and self._bytes > CUT_BYTES and not self._done.done():
            self.ended_at = monotonic()
            self._transport.abort()

    def on_body(self, body: bytes) -> None:
        """Keep the last part."""
        self.answer = body

    def on_message_complete(self) -> None:
        """End the request."""
        if not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, _: Exception | None) -> None:
        """End the request that was cut."""
        self.closed = True
        if not self._done.done():
            self._done.set_result(None)


class Task(NamedTuple):
    """Requests for `model`, one of each name and of the kinds in turn, `at_once` at a time. Their
    prompts have `words[0]` to `words[1]` words. `control`: the port for requests of that kind."""

    url: str
    control: int
    model: str
    names: Sequence[str]
    kinds: Sequence[str]
    words: tuple[int, int]
    at_once: int


class Client:
    """Sends requests over connections that are kept open."""

    def __init__(self, task: Task) -> None:
        where = urlsplit(task.url)
        self._address = where.hostname, where.port
        self._task, self._names = task, iter(task.names)
        self._rng = random.Random(task.names[0])
        self.sent: list[Sent] = []

    def encode(self, name: str, surface: str) -> bytes:
        """Return the bytes of a request."""
        prompt = " ".join(self._rng.choices(WORDS, k=self._rng.randrange(*self._task.words)))
        path, fields = make_call(self._task.model, surface, prompt)
        body = json.dumps(fields).encode()
        return (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nx-request-id: {name}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def work(self, surfaces: Mapping[str, str]) -> None:
        """Send requests until no name is left."""
        loop = asyncio.get_running_loop()
        connections = dict[bool, Connection]()
        for name in self._names:
            wire, control = self.encode(name, surfaces[name]), surfaces[name] == CONTROL
            connection = connections.get(control)
            if connection is None or connection.closed:
                host, port = self._address
                port = self._task.control if control else port
                _, connection = await loop.create_connection(Connection, host, port)
                connections[control] = connection
            await connection.send(wire, cut=surfaces[name] == "cut")
            first_at, began_at = connection.first_at, connection.began_at
            first_s = None if first_at is None else first_at - began_at
            seconds, answer = connection.ended_at - began_at, connection.answer
            self.sent.append(Sent(name, surfaces[name], first_s, seconds, answer.decode()))


class ControlServer(asyncio.Protocol):
    """Answers each request after `CONTROL_S` with the seconds that it took by its own clock. The
    server works
    for `WORK_S` when it has read a request and before it answers, as a frontend does."""

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, _: bytes) -> None:
        """Answer soon. A request is short enough for one read."""
        began_at = monotonic()
        _work()
        asyncio.get_running_loop().call_later(CONTROL_S, self._answer, began_at)

    def _answer(self, began_at: float) -> None:
        _work()
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n")
        self._transport.write(f"{monotonic() - began_at:012.9f}".encode())


def _work() -> None:
    until = thread_time() + WORK_S
    while thread_time() < until:
        pass


def serve_control(port: int) -> None:
    """Serve controls until the process is killed."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(ControlServer, "127.0.0.1", port)
        await server.serve_forever()

    uvloop.run(run())


def send_all(task: Task) -> list[Sent]:
    """Send the requests, and return them as they ended. Blocks."""

    async def run() -> list[Sent]:
        client = Client(task)
        surfaces = dict(zip(task.names, itertools.cycle(task.kinds), strict=False))
        async with asyncio.TaskGroup() as group:
            for _ in range(task.at_once):
                group.create_task(client.work(surfaces))
        return client.sent

    gc.disable()
    try:
        return uvloop.run(run())
    finally:
        gc.enable()
        gc.collect()
