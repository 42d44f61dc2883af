#!/usr/bin/env python3
"""Count the function calls of a short request in a frontend, and measure its CPU without sockets.

    benchmarks/request_calls.py --model MODEL_DIR [--mode kv] [--api responses] [--requests 200]
                                [--most 40] [--record] [--compare]
                                [--stories none|default|sampled|traced]

A whole frontend runs (one output token, streamed) without sockets: the client's bytes go directly
to the connection, and two fake workers answer each call with one frame. Counts do not depend on the
machine: calls of Python's functions, and with those of built-in ones. CPU is the minimum of 40
rounds of 512 requests, 64 at once, after which their stories are published. A response is not stored.
With `--stories`, no story is told, or spans are exported of 1 % or all requests; `--compare` measures
the CPU of these in turn. With `--record` the record of requests
is written, whose thread is not part of the CPU. The last lines in mode kv count the files of the
source that a request passes, and those of its decision. A decision lasts from the entry of the
router until the ledger has the chosen worker.
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
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import msgspec
import uvloop

import dynamo
from dynamo.application import Application, Gateway
from dynamo.application.frontend_metrics import FrontendMetrics
from dynamo.application.generation.stories import Stories
from dynamo.communication.frames import MAX_FRAME_BYTES, FrameSplitter, pack_items
from dynamo.communication.http import HttpLimits
from dynamo.communication.http.connection import HttpConnection, HttpServerState
from dynamo.communication.requests.client_connection import ClientConnection
from dynamo.communication.requests.protocol import DATA, OPEN, unpack_open
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import ModelSettings, RecordSettings, RuntimeSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import Finish, ProbeResult, Started
from dynamo.operations.observer.stages import STAGES
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.processes.process import GC_THRESHOLDS
from dynamo.services.model_watcher import ModelWatcher
from dynamo.services.observing.publisher import StoryPublisher
from dynamo.services.planning.record import RecordFiles, RequestRecorder
from dynamo.services.routing import ProcessRouting
from dynamo.services.worker import WorkerService
from dynamo.telemetry.story import StoryListener

BUILT_IN = "built-in "
SOURCE = str(Path(dynamo.__file__).parent)
END = b"0\r\n\r\n"
AT_ONCE, PUBLISHED = 64, 512
ROUNDS = 40
RATIOS = {"none": None, "default": None, "sampled": 0.01, "traced": 1.0}
"""The share of requests of which spans are exported."""
WORDS = ("over", "and", "after", "world", "water", "long", "house", "number", "people", "day")
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"max_tokens": 1, "stream_options": {"include_usage": True}},
    ),
    "messages": ("/v1/messages", {"max_tokens": 1}),
    "responses": ("/v1/responses", {"max_output_tokens": 1}),
}
"""Paths, and the fields of a request besides its model and prompt."""
encode = msgspec.msgpack.encode


class ClientTransport(asyncio.Transport):
    """The client's end of a connection, which stores the bytes written."""

    def __init__(self) -> None:
        super().__init__()
        self.received = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.received += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, since there is no buffer."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Do nothing: a request that comes before the end of the last one waits."""

    resume_reading = pause_reading


class WorkerTransport(ClientTransport):
    """A worker's end of a connection, which answers pending calls on request."""

    def __init__(self, peer: ClientConnection) -> None:
        super().__init__()
        self._link = peer.link
        self._real = peer.link.transport
        self._split = FrameSplitter(MAX_FRAME_BYTES)
        self.pending: list[int] = []
        self._link.transport = self

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for kind, _, body in self._split.feed(bytes(data)):
            if kind != OPEN:
                continue
            stream, _, payload = unpack_open(body)
            if payload:
                self.pending.append(stream)
            else:  # a probe
                self._say([stream, stream], [encode(ProbeResult()), b""], [1])

    def answer(self) -> None:
        """Answer all pending calls in one frame: start, one token, end."""
        pending, self.pending = self.pending, []
        streams, payloads = [], []
        for stream in pending:
            token = b"t" + struct.pack("<I", 345 + stream % 999)
            streams += [stream] * 4
            payloads += [
                b"b" + encode(Started(worker="w", prompt_tokens=150)),
                token,
                b"f" + encode(Finish("length", 1)),
                b"",
            ]
        if pending:
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
    """A connection to the frontend."""

    def __init__(self, shared: HttpServerState) -> None:
        self.transport = ClientTransport()
        self._connection = HttpConnection(shared)
        self._connection.connection_made(self.transport)

    def send(self, request: bytes) -> None:
        """Send a request."""
        self.transport.received = b""
        self._connection.data_received(request)

    @property
    def complete(self) -> bool:
        """True if the whole answer has arrived."""
        return self.transport.received.endswith(END)


class Frontend:
    """The frontend, its clients and its fake workers."""

    def __init__(self, shared: HttpServerState, api: str) -> None:
        self._api = api
        self.rng = random.Random(7)
        self._workers: list[WorkerTransport] = []
        self.clients = [Client(shared) for _ in range(AT_ONCE)]

    async def connect_workers(self, clock: Any) -> None:
        """Call real workers until both are connected, then replace their transports."""
        for client in self.clients[:8]:
            client.send(self.request())
        while not all(client.complete for client in self.clients[:8]):
            await clock.sleep(0.01)
        peers = [peer for peer in gc.get_objects() if isinstance(peer, ClientConnection)]
        self._workers = [WorkerTransport(peer) for peer in peers if peer.streams.frames_received]

    def request(self) -> bytes:
        """Return a request of about 150 tokens, different each time."""
        text = " ".join(self.rng.choices(WORDS, k=118)) + f" {self.rng.random()}"
        path, fields = APIS[self._api]
        prompt = text if self._api == "responses" else [{"role": "user", "content": text}]
        name = "input" if self._api == "responses" else "messages"
        body = msgspec.json.encode({"model": "bench", name: prompt, "stream": True, **fields})
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json"
        return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def serve(self, clients: list[Client], requests: list[bytes]) -> None:
        """Send the requests, let the workers answer, and wait for the answers."""
        for client, request in zip(clients, requests, strict=True):
            client.send(request)
        while sum(len(worker.pending) for worker in self._workers) < len(clients):
            await asyncio.sleep(0)
        for worker in self._workers:
            worker.answer()
        while not all(client.complete for client in clients):
            await asyncio.sleep(0)
        await asyncio.sleep(0)


def settings_of(arguments: argparse.Namespace, state: str) -> Settings:
    """Return the settings of a worker and of the frontend."""
    return Settings(
        model=ModelSettings(path=str(arguments.model), names=("bench",)),
        engine=EngineSettings(kind="mock", speedup_ratio=1e6),
        router=RouterSettings(mode=arguments.mode),
        runtime=RuntimeSettings(discovery=f"file:{state}"),
    )


async def count(frontend: Frontend, requests: int, publish: Callable[[], None]) -> Counter[str]:
    """Count the calls by function for sequential requests, and for `publish` of their stories."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if code.co_filename == __file__ or "asyncio/tasks" in code.co_filename:
            return
        if event == "c_call":
            calls[f"{BUILT_IN}{arg.__qualname__}"] += 1
        elif event == "call":
            calls[f"{'/'.join(Path(code.co_filename).parts[-2:])} {code.co_qualname}"] += 1

    pending = [[frontend.request()] for _ in range(requests)]
    publish()  # the stories of earlier requests
    sys.setprofile(note)
    try:
        for request in pending:
            await frontend.serve(frontend.clients[:1], request)
        publish()
    finally:
        sys.setprofile(None)
    return calls


async def trace_files(frontend: Frontend) -> tuple[list[str], list[str]]:
    """Return the files of the source that one request enters, call by call, and those of its
    decision."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE):
            calls.append((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        await frontend.serve(frontend.clients[:1], [frontend.request()])
    finally:
        sys.setprofile(None)
    names = [name for _, name in calls]
    decision = calls[names.index("WorkerRouter.send") : names.index("Ledger.place")]
    return [file for file, _ in calls], [file for file, _ in decision]


async def measure_round(frontend: Frontend, publish: Callable[[], None]) -> float:
    """Return the CPU microseconds per request of one round."""
    spent = 0.0
    for _ in range(PUBLISHED // AT_ONCE):
        requests = [frontend.request() for _ in range(AT_ONCE)]
        began = time.thread_time()
        await frontend.serve(frontend.clients, requests)
        spent += time.thread_time() - began
    began = time.thread_time()
    publish()
    return (spent + time.thread_time() - began) / PUBLISHED * 1e6


async def measure(frontend: Frontend, publish: Callable[[], None]) -> float:
    """Return the CPU microseconds per request."""
    return min([await measure_round(frontend, publish) for _ in range(ROUNDS)])


async def compare_stories(
    frontend: Frontend, publish: Callable[[], None], tell: Callable[[str], None]
) -> None:
    """Print the CPU with each kind of stories, in random order, and its ratio to none."""
    times: dict[str, list[float]] = {name: [] for name in RATIOS}
    for _ in range(ROUNDS):
        for name in frontend.rng.sample(list(times), len(times)):
            tell(name)
            times[name].append(await measure_round(frontend, publish))
    for name, each in times.items():
        ratio = median(ours / none for ours, none in zip(each, times["none"], strict=True))
        print(f"stories {name}: {min(each):.1f} us, ratio {ratio:.3f}")


async def open_listeners(
    runtime: DistributedRuntime, publisher: StoryPublisher, stack: AsyncExitStack, record: str
) -> list[StoryListener]:
    """Publish the stories of requests, and record them below the folder `record` if it is set."""
    await publisher.start()
    if not record:
        return [publisher.add]
    files = RecordFiles(lambda: Path(record) / "record", "b", RecordSettings(), runtime.clock)
    recorder = RequestRecorder(files, runtime.clock, runtime.metrics)
    recorder.start()
    stack.push_async_callback(recorder.close)
    return [publisher.add, recorder.add]


async def report(
    arguments: argparse.Namespace,
    frontend: Frontend,
    publish: Callable[[], None],
    tell: Callable[[str], None],
) -> None:
    """Print the calls and the CPU of a request, and what the arguments ask."""
    await measure(frontend, publish)
    calls = await count(frontend, arguments.requests, publish)
    own = sum(number for name, number in calls.items() if not name.startswith(BUILT_IN))
    print(f"{own / arguments.requests:.0f} calls per request")
    print(f"{calls.total() / arguments.requests:.0f} with those of built-in functions")
    print(f"{await measure(frontend, publish):.1f} us of CPU per request, without sockets")
    if arguments.compare:
        await compare_stories(frontend, publish, tell)
    elif arguments.mode == "kv":
        traces = [await trace_files(frontend) for _ in range(9)]
        request, decision = min(traces, key=lambda each: len(each[1]))  # without load reports
        changes = sum(before != after for before, after in pairwise(decision))
        print(f"{len(set(request))} files a request")
        print(f"{len(set(decision))} files and {changes} changes of file a decision")
    for name, number in calls.most_common(arguments.most):
        print(f"{number / arguments.requests:8.2f} {name}")


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
        stages = FrontendMetrics(runtime.metrics, stage_names=STAGES)
        application = Application(
            settings.server, gateway, runtime.clock, runtime.metrics, metrics=stages
        )
        routing = ProcessRouting(runtime)
        publisher = StoryPublisher(runtime, routing.sample, application.metrics)
        record = state if arguments.record else ""
        listeners = await open_listeners(runtime, publisher, stack, record)
        stories = Stories(listeners, runtime.clock)

        def publish() -> None:
            stories.flush()
            publisher.publish()

        def tell(name: str) -> None:
            application.generation.stories = None if name == "none" else stories
            application.trace_ratio = RATIOS[name]
            publisher.exports = application.trace_ratio is not None

        tell(arguments.stories)
        ModelWatcher(runtime, gateway, routing).start()
        while not runtime.health.healthy:
            await runtime.clock.sleep(0.05)
        limits = HttpLimits.from_settings(settings.server)
        checks = application.on_error, application.check_headers
        server = HttpServerState(application.handle, limits, runtime.clock, *checks)
        frontend = Frontend(server, arguments.api)
        await frontend.connect_workers(runtime.clock)
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)  # as in a process that is ready
        await report(arguments, frontend, publish, tell)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mode", default="round_robin")
    parser.add_argument("--api", choices=APIS, default="chat")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--stories", choices=RATIOS, default="default")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--record", action="store_true")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parser.parse_args()))
