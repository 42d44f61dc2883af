"""A simulated day whose clients keep their own count of what `dynamo slo` counts.

Frontends answer HTTP without sockets: their application, stories and publishers are those of real
processes, and so are the observer and its books in a SQLite file. Workers crash and are cut off,
frontends are replaced and lose events, and the observer is killed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import httptools
import msgspec
from tests.simulation.chaos.faults import FaultSchedule, SimulatedWorkers, drop_events_repeatedly
from tests.simulation.chaos.processes import (
    MODEL_NAME,
    SimulatedFrontend,
    SimulatedNetwork,
    SimulatedRuntime,
)
from tests.simulation.http_frontend import SimulatedServer

from dynamo.communication.http.connection import HttpConnection, HttpServerState
from dynamo.core.clock import Clock
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.operations.observer.slo_books import SloBooks
from dynamo.services.observing import observer as observer_process
from dynamo.telemetry.story import Story

HOUR_S = 3_600.0
TTFT_S, GAP_S, TARGET, DEADLINE_S = 5.0, 2.0, 0.999, 20.0
"""The promises of the default settings, and the limit for a whole request."""
FAILED_STATUSES = (408, 429)
_numbers = count()


class SloDay(msgspec.Struct, frozen=True):
    """A day, or a part of it. `rate`: requests a second; `burst`: in the last of `burst_every`
    minutes, which is too much. Each kind of process is replaced or killed every so many seconds, on
    average."""

    hours: float = 24.0
    workers: int = 4
    frontends: int = 2
    rate: float = 0.5
    burst: float = 30.0
    burst_every: int = 60
    prompt_tokens: int = 512
    answer_tokens: int = 32
    faults: FaultSchedule = FaultSchedule(1_200.0, 900.0, (5.0, 30.0), event_loss_every_s=600.0)
    frontend_every_s: float = HOUR_S
    observer_every_s: float = HOUR_S
    seed: int = 0


class SloCount(msgspec.Struct, frozen=True):
    """`clients` counted so many requests that count, that failed and that were late. `report`: the
    same of the books. `left_out`: requests that do not count; `kinds`: outcomes by name.
    `difference_s`: the largest between a story and its client in the first text and the end."""

    clients: tuple[int, int, int]
    report: tuple[int, int, int]
    left_out: int
    kinds: dict[str, int]
    crashes: int
    observers: int
    difference_s: float


class Tally:
    """The counts of the clients."""

    def __init__(self) -> None:
        self.kinds, self.difference_s = Counter[str](), 0.0


class Exchange(asyncio.Transport):
    """A client and its connection: sends a request, and notes when the parts of its answer come."""

    def __init__(self, state: HttpServerState, clock: Clock) -> None:
        super().__init__()
        self._clock, self._parser = clock, httptools.HttpResponseParser(self)
        self._connection = HttpConnection(state)
        self._connection.connection_made(self)
        self.done = asyncio.Event()
        self.first_at: float | None = None
        self.body, self.last_at, self.longest_gap_s = b"", 0.0, 0.0

    def send(self, name: str, body: dict[str, Any]) -> None:
        """Send a request."""
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json"
        head += f"\r\nx-request-id: {name}"
        self.began_at = self._clock.now()
        wire = f"{head}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        self._connection.data_received(wire)

    def leave(self) -> None:
        """Close the connection."""
        if not self.done.is_set():
            self.done.set()
            self._connection.connection_lost(None)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Note the time of text."""
        self.body += body
        if b'"content":"word' in body:
            now = self._clock.now()
            if self.first_at is None:
                self.first_at = now
            else:
                self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
            self.last_at = now

    def on_message_complete(self) -> None:
        """End the request."""
        asyncio.get_running_loop().call_soon(self.leave)

    def difference_s(self, story: Story) -> float:
        """Return the larger difference between a story and this client."""
        ends_s = abs(story.ended_s - self._clock.now())
        if self.first_at is None or story.first_s is None:
            return ends_s
        return max(ends_s, abs(story.first_s - self.first_at))

    def judge(self, *, left: bool) -> str:
        """Return what the client says of the answer."""
        now, first_at = self._clock.now(), self.first_at
        waited_s = (now if first_at is None else first_at) - self.began_at
        gap_s = self.longest_gap_s
        if left and first_at is not None:
            gap_s = max(gap_s, now - self.last_at)
        late = waited_s > TTFT_S or gap_s > GAP_S
        if left:
            return "late" if late else "left"
        status = self._parser.get_status_code()
        if status != 200:
            refused = status < 500 and status not in FAILED_STATUSES
            return "client" if refused else "failed"
        if not self.body.endswith(b"data: [DONE]\n\n") or b'"error"' in self.body:
            return "failed"
        return "late" if late else "good"

    abort = close = leave
    """The server cuts the connection."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, since there is no buffer."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        del name
        return default


def run_slo_day(day: SloDay, books: Path) -> SloCount:
    """Run the day in virtual time, with the books in a file."""

    async def no_pages(*_: Any, **__: Any) -> None:
        """Sockets do not work in virtual time."""

    with (
        patch.object(observer_process, "serve_pages", no_pages),
        patch.object(observer_process, "slo_file", lambda _: books),
    ):
        return run_in_virtual_time(lambda clock: _run(day, clock, books))


async def _run(day: SloDay, clock: VirtualClock, books: Path) -> SloCount:
    engine = EngineInfo(
        engine="mock", block_tokens=16, num_blocks=1_024, context_tokens=16_384,
        max_num_seqs=4, max_num_batched_tokens=2_048,
    )  # fmt: skip
    network = SimulatedNetwork(
        f"memory:slo-{next(_numbers)}", clock, engine, Timing(c0=20.0, c1=0.5), "kv"
    )
    clock.on_time_advanced(network.deliver_tokens)
    rng, tally = Random(day.seed), Tally()
    workers = SimulatedWorkers(network, day.faults, Random(day.seed), day.workers)
    await workers.start()
    processes = ReplacedProcesses(day, network, rng)
    await processes.start()
    async with BackgroundTasks() as faults:
        workers.start_faults()
        faults.start(processes.replace_servers(), "servers")
        faults.start(processes.replace_observers(), "observers")
        faults.start(drop_events_repeatedly(network, day.faults, rng, processes), "events")
        await _send_requests(day, clock, rng, processes.servers, tally)
        await workers.stop_faults()
    await processes.stop()
    await workers.shutdown()
    report = SloBooks(lambda: books, clock.wall).report(TARGET, TTFT_S, GAP_S)["windows"][-1]
    kinds = tally.kinds
    counted = kinds["good"] + kinds["late"] + kinds["failed"]
    return SloCount(
        (counted, kinds["failed"], kinds["late"]),
        (report["requests"], report["failed"], report["late"]),
        kinds["left"] + kinds["client"],
        dict(kinds),
        workers.crashes,
        processes.observers,
        tally.difference_s,
    )


class ReplacedProcesses(Sequence[SimulatedFrontend]):
    """The frontends and the observer. As a sequence, the frontends that take requests."""

    def __init__(self, day: SloDay, network: SimulatedNetwork, rng: Random) -> None:
        self._day, self._network, self._rng = day, network, rng
        self._numbers, self._stopping = count(), BackgroundTasks()
        self._observer: SimulatedRuntime | None = None
        self.servers: list[SimulatedServer] = []
        self.observers = 0

    def __len__(self) -> int:
        return len(self.servers)

    def __getitem__(self, index: Any) -> Any:
        return self.servers[index].frontend

    async def start(self) -> None:
        """Start all processes."""
        await self._start_observer()
        for _ in range(self._day.frontends):
            await self._start_server()

    async def _start_server(self) -> None:
        server = SimulatedServer(
            self._network, next(self._numbers), self._day.prompt_tokens, DEADLINE_S
        )
        await server.start()
        self.servers.append(server)

    async def _start_observer(self) -> None:
        name = f"observer-{self.observers}"
        self.observers += 1
        runtime, _ = await self._network.create_runtime("observer", name, self.observers)
        await observer_process.ObserverService().attach(runtime)
        self._observer = runtime

    async def replace_servers(self) -> None:
        """Replace the oldest frontend, again and again."""
        while True:
            await self._network.clock.sleep(self._rng.expovariate(1 / self._day.frontend_every_s))
            await self._start_server()
            self._stopping.start(self.servers.pop(0).stop(), "a frontend that stops")

    async def replace_observers(self) -> None:
        """Kill the observer, and start another one within a minute, again and again."""
        clock, rng = self._network.clock, self._rng
        while True:
            await clock.sleep(rng.expovariate(1 / self._day.observer_every_s))
            await self._kill_observer()
            await clock.sleep(rng.uniform(1.0, 60.0))
            await self._start_observer()

    async def _kill_observer(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            await observer.shutdown(0.0)
            await observer.discovery.close()

    async def stop(self) -> None:
        """Stop all processes. The observer writes what it has, as it does all the time."""
        await self._stopping.join()
        if self._observer is None:
            await self._start_observer()
        clock = self._network.clock
        await clock.sleep(observer_process.BOOKS_INTERVAL_S)
        for server in self.servers:
            await server.stop()
        await clock.sleep(2 * observer_process.BOOKS_INTERVAL_S)
        await self._kill_observer()


async def _send_requests(
    day: SloDay,
    clock: VirtualClock,
    rng: Random,
    servers: Sequence[SimulatedServer],
    tally: Tally,
) -> None:
    """Send requests until the day has ended, and wait for their answers."""
    end = clock.now() + day.hours * HOUR_S
    async with BackgroundTasks() as tasks:
        while (now := clock.now()) < end:
            crowded = int(now / 60) % day.burst_every == day.burst_every - 1
            rate = day.burst if crowded else day.rate
            await clock.sleep(rng.expovariate(rate))
            tasks.start(_send(day, clock, rng, rng.choice(servers), tally))
        await tasks.join()


async def _send(
    day: SloDay, clock: VirtualClock, rng: Random, server: SimulatedServer, tally: Tally
) -> None:
    """Send a request, and count its outcome. Some are wrong, and some clients leave."""
    exchange = Exchange(server.http, clock)
    leave_s = rng.uniform(0.0, 8.0) if rng.random() < 0.05 else None
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "max_tokens": day.answer_tokens,
        "temperature": -1 if rng.random() < 0.02 else 1,
    }
    name = f"r{tally.kinds.total()}-{rng.getrandbits(40):x}"
    exchange.send(name, body)
    left = False
    try:
        async with asyncio.timeout(leave_s):
            await exchange.done.wait()
    except TimeoutError:
        left = True
        exchange.leave()
    tally.kinds[exchange.judge(left=left)] += 1
    await clock.wait_until_idle()
    difference_s = exchange.difference_s(server.take_story(name))
    tally.difference_s = max(tally.difference_s, difference_s)
