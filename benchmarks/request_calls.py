#!/usr/bin/env python3
"""What one short request is made of in a frontend: calls of functions, and CPU without sockets.

    benchmarks/request_calls.py --model MODEL_DIR [--mode kv] [--requests 200] [--most 40]

A whole frontend (chat, streamed, one token out), with nothing behind its sockets: the client's bytes
are handed to the connection, two workers answer each call with one frame. Counts do not depend on the
machine; CPU is the least of 40 rounds of 64 requests at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvloop

from dynamo.application import Application, Gateway
from dynamo.communication.frames import MAX_FRAME_BYTES, FrameSplitter, pack_items
from dynamo.communication.http import HttpLimits
from dynamo.communication.http.connection import HttpConnection, HttpServerState
from dynamo.communication.requests.client_connection import ClientConnection
from dynamo.communication.requests.protocol import DATA, OPEN, unpack_open
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import ModelSettings, RuntimeSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import Finish, ProbeResult, Started
from dynamo.runtime import DistributedRuntime
from dynamo.services.model_watcher import ModelWatcher
from dynamo.services.routing import ProcessRouting
from dynamo.services.worker import WorkerService

END = b"0\r\n\r\n"
AT_ONCE = 64
ROUNDS = 40
WORDS = ("over", "and", "after", "world", "water", "long", "house", "number", "people", "day")
encode = msgspec.msgpack.encode


class Near(asyncio.Transport):
    """The client's end of one connection: keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.got = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.got += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def get_write_buffer_size(self) -> int:
        return 0


class Far(Near):
    """A worker's end of one connection: answers what was asked when it is told to."""

    def __init__(self, peer: ClientConnection) -> None:
        super().__init__()
        self._link = peer.link
        self._real = peer.link.transport
        self._split = FrameSplitter(MAX_FRAME_BYTES)
        self.asked: list[int] = []
        self._link.transport = self

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for kind, _, body in self._split.feed(bytes(data)):
            if kind != OPEN:
                continue
            stream, _, payload = unpack_open(body)
            if payload:
                self.asked.append(stream)
            else:  # a probe
                self._say([stream, stream], [encode(ProbeResult()), b""], [1])

    def answer(self) -> None:
        """One frame: to each the beginning, one token and the end."""
        asked, self.asked = self.asked, []
        streams, payloads = [], []
        for stream in asked:
            token = b"t" + struct.pack("<I", 345 + stream % 999)
            streams += [stream] * 4
            payloads += [
                b"b" + encode(Started(worker="w", prompt_tokens=150)),
                token,
                b"f" + encode(Finish("length", 1)),
                b"",
            ]
        if asked:
            self._link.data_received(pack_items(DATA, streams, payloads, range(3, len(streams), 4)))

    def _say(self, streams: list[int], payloads: list[bytes], ends: list[int]) -> None:
        frame = pack_items(DATA, streams, payloads, ends)
        asyncio.get_running_loop().call_soon(self._link.data_received, frame)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        if self._real is not None:
            self._real.close()


class Client:
    """One connection to the frontend."""

    def __init__(self, shared: HttpServerState) -> None:
        self.near = Near()
        self._connection = HttpConnection(shared)
        self._connection.connection_made(self.near)

    def ask(self, request: bytes) -> None:
        """Send a request."""
        self.near.got = b""
        self._connection.data_received(request)

    @property
    def answered(self) -> bool:
        """The whole answer has come."""
        return self.near.got.endswith(END)


class Frontend:
    """The frontend, its clients and what stands for its workers."""

    def __init__(self, shared: HttpServerState) -> None:
        self._shared = shared
        self.rng = random.Random(7)
        self._workers: list[Far] = []
        self.clients = [Client(shared) for _ in range(AT_ONCE)]

    async def meet(self, clock: Any) -> None:
        """Ask real workers until both are connected; from then on nobody is behind the sockets."""
        for client in self.clients[:8]:
            client.ask(self.request())
        while not all(client.answered for client in self.clients[:8]):
            await clock.sleep(0.01)
        peers = [one for one in gc.get_objects() if isinstance(one, ClientConnection)]
        self._workers = [Far(one) for one in peers if one.streams.frames_received]

    def request(self) -> bytes:
        """A chat of about 150 tokens, never the same."""
        text = " ".join(self.rng.choices(WORDS, k=118)) + f" {self.rng.random()}"
        body = msgspec.json.encode(
            {
                "model": "bench",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 1,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json"
        return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def serve(self, clients: list[Client], requests: list[bytes]) -> None:
        """Ask, let the workers answer, read to the end."""
        for client, request in zip(clients, requests, strict=True):
            client.ask(request)
        while sum(len(worker.asked) for worker in self._workers) < len(clients):
            await asyncio.sleep(0)
        for worker in self._workers:
            worker.answer()
        while not all(client.answered for client in clients):
            await asyncio.sleep(0)
        await asyncio.sleep(0)


def settings_of(arguments: argparse.Namespace, state: str) -> Settings:
    """A worker's, and the frontend's."""
    return Settings(
        model=ModelSettings(path=str(arguments.model), names=("bench",)),
        engine=EngineSettings(kind="mock", speedup_ratio=1e6),
        router=RouterSettings(mode=arguments.mode),
        runtime=RuntimeSettings(discovery=f"file:{state}"),
    )


async def count(frontend: Frontend, requests: int) -> Counter[str]:
    """Calls by function, of so many requests one after the other."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        del arg
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename != __file__
            and "asyncio/tasks" not in code.co_filename
        ):
            calls[f"{'/'.join(Path(code.co_filename).parts[-2:])} {code.co_qualname}"] += 1

    asked = [[frontend.request()] for _ in range(requests)]
    sys.setprofile(note)
    try:
        for request in asked:
            await frontend.serve(frontend.clients[:1], request)
    finally:
        sys.setprofile(None)
    return calls


async def measure(frontend: Frontend) -> float:
    """Microseconds of CPU a request."""
    took = []
    for _ in range(ROUNDS):
        requests = [frontend.request() for _ in range(AT_ONCE)]
        began = time.thread_time()
        await frontend.serve(frontend.clients, requests)
        took.append((time.thread_time() - began) / AT_ONCE * 1e6)
    return min(took)


async def main(arguments: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory())
        settings = settings_of(arguments, state)
        for _ in range(2):
            worker = await DistributedRuntime.create(settings, role="worker")
            await WorkerService().attach(await stack.enter_async_context(worker))
        runtime = await stack.enter_async_context(
            await DistributedRuntime.create(settings, role="frontend")
        )
        gateway = Gateway()
        application = Application(settings.server, gateway, runtime.clock, runtime.metrics)
        ModelWatcher(runtime, gateway, ProcessRouting(runtime)).start()
        while not runtime.health.healthy:
            await runtime.clock.sleep(0.05)
        limits = HttpLimits.from_settings(settings.server)
        frontend = Frontend(
            HttpServerState(application.handle, limits, runtime.clock, application.on_error)
        )
        await frontend.meet(runtime.clock)
        await measure(frontend)
        calls = await count(frontend, arguments.requests)
        print(f"{sum(calls.values()) / arguments.requests:.0f} calls a request")
        print(f"{await measure(frontend):.0f} us of CPU a request, without sockets")
        for name, number in calls.most_common(arguments.most):
            print(f"{number / arguments.requests:8.2f} {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mode", default="round_robin")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--most", type=int, default=0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parser.parse_args()))
