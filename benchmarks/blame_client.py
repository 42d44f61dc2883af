"""The client of benchmarks/blame.py, sizes of its scenes, and a network that is slow at times."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from processes import deployment_of, ready
from servers import Server

from dynamo.runtime.deployment import ProcessRecord

sys.path.insert(0, str(Path(__file__).parents[1]))  # from here on, for tests.support
from tests.support.servers import ServerProcess

WORDS = ("over", "and", "after", "world", "water", "long", "house", "number", "people", "day")
SLOWED_S, LATE_S = 0.15, 0.1
DELAY_FILE = "DYNAMO_BLAME_DELAY"
"""The variable that names a file. While it exists, pulls between workers take so many seconds more."""
PLUG = f"""
import os, sys, time, threading
from importlib.machinery import PathFinder

def slow_down(module):
    copy = module.TcpPeer._copy
    async def slowly(self, reads):
        import asyncio
        try:
            await asyncio.sleep(float(open(os.environ["{DELAY_FILE}"]).read()))
        except FileNotFoundError:
            pass
        await copy(self, reads)
    module.TcpPeer._copy = slowly

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = None
        if name == "dynamo.communication.transfer.tcp":
            spec = PathFinder.find_spec(name, path, target)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), slow_down(module))
        return spec

sys.meta_path.insert(0, Finder)
"""
"""Read by each process of a deployment (`sitecustomize`): a network that is slow at times."""


class Size(NamedTuple):
    """The size of a scene. `token_ms`, `step_ms`: the time of a prompt token and of a step. `short`,
    `long`, `cached`: the prompt tokens of such requests. `answer`: the tokens of an answer. `block`:
    the tokens of a KV block. `every_s`: the pause between healthy requests. `slots`: the sequences
    that a worker computes at once, where that matters."""

    workers: int = 2
    token_ms: float = 0.1
    step_ms: float = 5.0
    short: int = 60
    long: int = 5_000
    cached: int = 2_400
    answer: int = 40
    engine: str = "mock"
    block: int = 16
    every_s: float = 0.05
    slots: int = 24
    flags: tuple[str, ...] = ()


TUNED = Size()
HELD_OUT = Size(
    4,
    0.08,
    8.0,
    100,
    6_500,
    3_000,
    28,
    block=32,
    every_s=0.08,
    slots=12,
    flags=("--router-replicas", "1"),
)
NATIVE = Size(2, 0.0, 0.0, 40, 4_000, 2_500, 30, "native", slots=8, flags=("--threads", "1"))


class Call(NamedTuple):
    """A request that ended: its id, when it was sent (monotonic), how long it took, and how long
    this process stood still meanwhile."""

    name: str
    began_s: float
    seconds: float
    lag_s: float


PAUSE_S = 0.12
TICK_S = 0.01
CACHE_TOKENS = 8_000
"""The prompt tokens that a small cache of a worker holds."""


class Client:
    """Sends requests to a deployment and keeps their times by kind. "h": healthy ones. "v": may be
    hit by the cause. "c": like "v", without the cause. "x": prepare or are the cause.

    While it is `calm`, causes do not happen, and "c" is sent for "v"."""

    def __init__(
        self, server: Server, size: Size, answers: int, service: ServerProcess | None, delay: Path
    ) -> None:
        """`answers`: those of requests that may be hit are so many times as long as others."""
        self._answers = answers
        self._lag_s = 0.0
        self.calm = True
        self._pool: list[str] = []
        self.server, self.size, self.service, self.delay = server, size, service, delay
        self._where = urlsplit(server.url)
        self._numbers = itertools.count()
        self.rng = random.Random(7)
        self.calls: dict[str, list[Call]] = {"h": [], "v": [], "c": [], "x": []}

    def usual_s(self, kind: str) -> float:
        """Return the median time of healthy requests, for "v" that of equal ones."""
        return median(call.seconds for call in self.calls["c" if kind == "v" else "h"])

    def is_slowed(self, call: Call) -> bool:
        """Return whether a request took longer than equal ones without the cause."""
        seconds = sorted(each.seconds - each.lag_s for each in self.calls["c"])
        slow_s = seconds[int(len(seconds) * 0.95)]
        return call.seconds - call.lag_s > max(slow_s, self.usual_s("v") + SLOWED_S)

    def is_in_time(self, call: Call) -> bool:
        """Return whether a request took no longer than equal ones without the cause."""
        return call.seconds <= self.usual_s(call.name[0])

    def words(self, count: int) -> str:
        """Return a prompt of about so many tokens."""
        return " ".join(self.rng.choices(WORDS, k=count))

    async def send(
        self,
        kind: str,
        prompt: str,
        *,
        tokens: int = 0,
        read_after_s: float = 0.0,
        **body: Any,
    ) -> None:
        """Send a request and wait for its whole answer."""
        kind = "c" if self.calm and kind == "v" else kind
        name, began_s, lag_s = f"{kind}{next(self._numbers)}", time.monotonic(), self._lag_s
        fields = {
            "model": "smol",
            "prompt": prompt,
            "max_tokens": tokens or self.size.answer * (self._answers if kind in "cv" else 1),
            "ignore_eos": True,
            **body,
        }
        data = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: {name}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        sock = socket.socket()
        if read_after_s:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (self._where.hostname, self._where.port))
        try:
            await loop.sock_sendall(sock, head.encode() + data)
            if read_after_s:
                await asyncio.sleep(read_after_s)
            while await loop.sock_recv(sock, 1 << 16):
                pass
        finally:
            sock.close()
        seconds = time.monotonic() - began_s
        self.calls[kind].append(Call(name, began_s, seconds, self._lag_s - lag_s))

    async def measure_lag(self) -> None:
        """Sum up how long the event loop of this process stood still."""
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - due_s
            self._lag_s += late_s if late_s > TICK_S else 0.0

    async def burst(self, kind: str, count: int, **body: Any) -> None:
        """Send so many short requests at once."""
        sends = (self.send(kind, self.words(self.size.short), **body) for _ in range(count))
        await asyncio.gather(*sends)

    def start_long(self) -> list[asyncio.Task[None]]:
        """Send a long prompt to each worker."""
        words = () if self.calm else [self.words(self.size.long) for _ in self.each_worker()]
        return [asyncio.create_task(self.send("x", prompt, tokens=1)) for prompt in words]

    def each_worker(self) -> range:
        """Return a number for each worker."""
        return range(self.size.workers)

    async def send_all(self, prompts: Sequence[str], kind: str = "x", **body: Any) -> None:
        """Send prompts, as many at once as there are workers."""
        for first in range(0, len(prompts), self.size.workers):
            some = prompts[first : first + self.size.workers]
            await asyncio.gather(*(self.send(kind, prompt, **body) for prompt in some))

    def prompts(self, share: float) -> list[str]:
        """Return new prompts that take such a share of all small caches."""
        tokens = self.size.workers * CACHE_TOKENS * share
        return [self.words(self.size.cached) for _ in range(max(1, int(tokens / self.size.cached)))]

    async def next_prompts(self, count: int) -> list[str]:
        """Return the next of some prompts that come in turn: more than the caches hold, so that
        others have taken their blocks. While it is calm, they are so few that all are cached."""
        if not self._pool:
            self._pool = self.prompts(1.6)
            for prompt in self._pool:  # blocks that are used again are worth a place in a tier
                await self.send("x", prompt, tokens=1)
                await self.send("x", prompt, tokens=1)
        if self.calm:
            prompts = self.prompts(0.3)[:2]
            await self.send_all(prompts * 2, tokens=1)
            return [prompts[number % len(prompts)] for number in range(count)]
        taken, self._pool = self._pool[:count], self._pool[count:]
        self._pool += taken
        return taken

    async def signal_one(self, role: str, number: signal.Signals) -> int:
        """Signal the first process of a role, and return its pid."""
        processes = await self._ready(role)
        if not self.calm:
            os.kill(processes[0].pid, number)
        return processes[0].pid

    async def signal_service(self, number: signal.Signals) -> None:
        """Signal the server that the scenario needs."""
        assert self.service is not None
        if not self.calm:
            await asyncio.to_thread(self.service.signal, number)

    async def wait_for_workers(self) -> None:
        """Wait until every worker is ready."""
        while len(await self._ready("worker")) < self.size.workers:
            await asyncio.sleep(0.2)

    async def _ready(self, role: str) -> list[ProcessRecord]:
        return await asyncio.to_thread(lambda: ready(deployment_of(self.server), role))
