"""Send sessions to a server and keep what they come to."""

from __future__ import annotations

import asyncio
import gc
import math
from array import array
from collections.abc import Iterable, Iterator
from time import monotonic as now

from dynamo.core.clock import Clock
from dynamo.core.tasks import Tasks, first_of, run_all
from dynamo.operations.bench.arrivals import timed
from dynamo.operations.bench.figures import Run
from dynamo.operations.bench.plan import Load, Session, Target, Turn
from dynamo.operations.bench.prompts import Prompts, body_of
from dynamo.operations.bench.sample import Sample
from dynamo.operations.bench.wire import Server

AHEAD_S = 0.2
"""A session is made so long before it is due."""
PATHS = {False: "/v1/chat/completions", True: "/v1/completions"}


class Measurement:
    """One run against one server, cut short by `stop`. `samples` and `in_flight` may be looked at
    while it runs."""

    def __init__(
        self, target: Target, server: Server, prompts: Prompts, clock: Clock, stop: asyncio.Event
    ) -> None:
        self._stop = stop
        self._target = target
        self._server = server
        self._prompts = prompts
        self._clock = clock
        self._path = PATHS[target.completions]
        self._gaps: array[float] = array("d")
        self._budget = math.inf
        self._late_s = 0.0
        self._peak = 0
        self._began = 0.0
        self.samples: list[Sample] = []
        self.in_flight = 0

    @property
    def texts(self) -> int:
        """Events with text so far."""
        return len(self._gaps) + len(self.samples)

    async def warm_up(self, sessions: Iterator[Session], load: Load) -> None:
        """Unmeasured requests, as many at a time as later."""
        self._budget = load.warmup
        places = min(load.concurrency, load.warmup)
        await first_of(self._closed(sessions, places, math.inf), self._stop.wait())
        self.samples.clear()
        self._gaps = array("d")
        self._peak = 0

    async def run(self, sessions: Iterable[Session], load: Load) -> Run:
        """Until the load's end and the answers of all that was sent, or until `stop`."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            self._budget = load.requests or math.inf
            self._began = now()
            await first_of(self._load(sessions, load), self._stop.wait())
        finally:
            gc.enable()
            gc.unfreeze()
        ended = max((one.ended for one in self.samples), default=now())
        if self._stop.is_set():
            ended = now()
        return Run(self.samples, self._gaps, self._began, ended, self._peak, self._late_s)

    async def _load(self, sessions: Iterable[Session], load: Load) -> None:
        end = self._began + load.duration_s if load.duration_s else math.inf
        every = timed(iter(sessions), load)
        first = next(every, None)
        if first is None:
            return
        every = _again(first, every)
        if first.start_s is None:
            await self._closed(every, load.concurrency, end)
        else:
            await self._open(every, end)

    async def _closed(self, sessions: Iterator[Session], places: int, end: float) -> None:
        async def place() -> None:
            while now() < end and self._budget > 0:
                session = next(sessions, None)
                if session is None:
                    return
                await self._session(session, end)

        await run_all(*(place() for _ in range(places)))

    async def _open(self, sessions: Iterator[Session], end: float) -> None:
        failures: list[BaseException] = []
        async with Tasks(failures.append) as tasks:
            for session in sessions:
                due = self._began + (session.start_s or 0.0)
                if self._budget <= 0 or due > end or failures:
                    break
                await self._clock.sleep_until(due - AHEAD_S)
                tasks.start(self._session(session, math.inf, due))
            await tasks.join()
        if failures:
            raise failures[0]

    async def _session(self, session: Session, end: float, due: float = 0.0) -> None:
        messages: list[dict[str, str]] = []
        for turn in session.turns:
            if self._budget <= 0 or now() >= end:
                return
            self._budget -= 1
            if turn.delay_s:
                await self._clock.sleep(turn.delay_s)
            if not session.history:
                messages.clear()
            messages.append({"role": "user", "content": self._prompts.text(turn)})
            keep = session.history and not turn.answer
            sample = await self._turn(messages, turn, due, keep=keep)
            due = 0.0
            if sample.error:
                return
            if session.history:
                said = turn.answer or sample.text()
                messages.append({"role": "assistant", "content": said})
                sample.body.clear()

    async def _turn(
        self, messages: list[dict[str, str]], turn: Turn, due: float, *, keep: bool
    ) -> Sample:
        body = body_of(self._target, messages, turn)
        request = self._server.request(self._path, body)
        sample = Sample(self._gaps, keep=keep)
        if due:
            self._late_s = max(self._late_s, now() - due)
            await self._clock.sleep_until(due)
        self.in_flight += 1
        self._peak = max(self._peak, self.in_flight)
        try:
            await self._server.send(request, sample)
        finally:
            self.in_flight -= 1
        if not (sample.error or sample.usage or sample.events):
            sample.error = "an empty answer"
        self.samples.append(sample)
        return sample


def _again(first: Session, rest: Iterator[Session]) -> Iterator[Session]:
    yield first
    yield from rest
