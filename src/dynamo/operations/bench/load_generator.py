"""The load generator: sends sessions at their times and collects a sample of each request."""

from __future__ import annotations

import asyncio
import gc
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from time import monotonic as now

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.tasks import BackgroundTasks, run_all, wait_for_first
from dynamo.operations.bench.bench_result import BenchRun
from dynamo.operations.bench.load_client import LoadClient
from dynamo.operations.bench.prompts import PromptGenerator, request_body
from dynamo.operations.bench.request_sample import RequestSample
from dynamo.operations.bench.workload import (
    BenchTarget,
    LoadProfile,
    RequestPlan,
    RequestShape,
    SessionPlan,
)


def synthetic_sessions(shape: RequestShape) -> Iterator[SessionPlan]:
    """Yield endless sessions of one shape."""
    turn = RequestPlan(shape.input_tokens, shape.output_tokens)
    while True:
        yield SessionPlan([turn] * shape.turns, history=shape.turns > 1)


def schedule_sessions(
    sessions: Iterator[SessionPlan] | Sequence[SessionPlan], load: LoadProfile
) -> Iterator[SessionPlan]:
    """Yield the sessions with their start times; a rate in `load` replaces their own."""
    if not load.rate:
        yield from sessions
        return
    for start_s, session in zip(load.start_times(), sessions, strict=False):
        yield SessionPlan(session.turns, start_s, session.history)


SCHEDULE_AHEAD_S = 0.2
"""A session is prepared this long before its start."""
PATH_BY_COMPLETIONS = {False: "/v1/chat/completions", True: "/v1/completions"}


class LoadGenerator:
    """Runs one load against one server until `stop` is set. `samples` and `in_flight` may be read
    during the run."""

    def __init__(
        self,
        target: BenchTarget,
        server: LoadClient,
        prompts: PromptGenerator,
        clock: Clock,
        stop: asyncio.Event,
    ) -> None:
        self._stop = stop
        self._target = target
        self._server = server
        self._prompts = prompts
        self._clock = clock
        self._path = PATH_BY_COMPLETIONS[target.completions]
        self._inter_token_s: array[float] = array("d")
        self._requests_left = math.inf
        self._late_s = 0.0
        self._peak_in_flight = 0
        self._started = 0.0
        self.samples: list[RequestSample] = []
        self.in_flight = 0

    @property
    def text_events(self) -> int:
        """Number of text events so far. The first of a request counts when the request ends."""
        return len(self._inter_token_s) + len(self.samples)

    async def warm_up(self, sessions: Iterator[SessionPlan], load: LoadProfile) -> None:
        """Send `load.warmup` unmeasured requests at the concurrency of the run."""
        self._requests_left = load.warmup
        concurrency = min(load.concurrency, load.warmup)
        warmup = self._run_closed_loop(sessions, concurrency, math.inf)
        await wait_for_first(warmup, self._stop.wait())
        self.samples.clear()
        self._inter_token_s = array("d")
        self._peak_in_flight = 0

    async def run(self, sessions: Iterable[SessionPlan], load: LoadProfile) -> BenchRun:
        """Send sessions until the load ends and all responses are complete, or until `stop`.
        Garbage collection is disabled meanwhile, since its pauses would count as latency."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            self._requests_left = load.requests or math.inf
            self._started = now()
            await wait_for_first(self._run_load(sessions, load), self._stop.wait())
        finally:
            gc.enable()
            gc.unfreeze()
        ended = max((sample.ended_at for sample in self.samples), default=now())
        if self._stop.is_set():
            ended = now()
        times = (self._started, ended, self._peak_in_flight, self._late_s)
        return BenchRun(self.samples, self._inter_token_s, *times)

    async def _run_load(self, sessions: Iterable[SessionPlan], load: LoadProfile) -> None:
        end = self._started + load.duration_s if load.duration_s else math.inf
        scheduled = schedule_sessions(iter(sessions), load)
        first = next(scheduled, None)
        if first is None:
            return
        scheduled = chain((first,), scheduled)
        if first.start_s is None:
            await self._run_closed_loop(scheduled, load.concurrency, end)
        else:
            await self._run_open_loop(scheduled, end)

    async def _run_closed_loop(
        self, sessions: Iterator[SessionPlan], concurrency: int, end: float
    ) -> None:
        async def run_sessions() -> None:
            while now() < end and self._requests_left > 0:
                session = next(sessions, None)
                if session is None:
                    return
                await self._run_session(session, end)

        await run_all(*(run_sessions() for _ in range(concurrency)))

    async def _run_open_loop(self, sessions: Iterator[SessionPlan], end: float) -> None:
        failures: list[BaseException] = []
        async with BackgroundTasks(failures.append) as tasks:
            for session in sessions:
                due = self._started + (session.start_s or 0.0)
                if self._requests_left <= 0 or due > end or failures:
                    break
                await self._clock.sleep_until(due - SCHEDULE_AHEAD_S)
                tasks.start(self._run_session(session, math.inf, due))
            await tasks.join()
        if failures:
            raise failures[0]

    async def _run_session(self, session: SessionPlan, end: float, due: float = 0.0) -> None:
        messages: list[dict[str, str]] = []
        for turn in session.turns:
            if self._requests_left <= 0 or now() >= end:
                return
            self._requests_left -= 1
            if turn.delay_s:
                await self._clock.sleep(turn.delay_s)
            if not session.history:
                messages.clear()
            messages.append({"role": "user", "content": self._prompts.make_prompt(turn)})
            keep_body = session.history and not turn.answer
            sample = await self._send_request(messages, turn, due, keep_body=keep_body)
            due = 0.0
            if sample.error:
                return
            if session.history:
                answer = turn.answer or sample.response_text()
                messages.append({"role": "assistant", "content": answer})
                sample.body.clear()

    async def _send_request(
        self, messages: list[dict[str, str]], turn: RequestPlan, due: float, *, keep_body: bool
    ) -> RequestSample:
        body = msgspec.json.encode(request_body(self._target, messages, turn))
        sample = RequestSample(self._inter_token_s, keep_body=keep_body)
        if due:
            self._late_s = max(self._late_s, now() - due)
            await self._clock.sleep_until(due)
        self.in_flight += 1
        self._peak_in_flight = max(self._peak_in_flight, self.in_flight)
        try:
            await self._server.send(self._path, body, sample)
        finally:
            self.in_flight -= 1
        if not (sample.error or sample.usage or sample.text_events):
            sample.error = "empty response"
        self.samples.append(sample)
        return sample


PROGRESS_INTERVAL_S = 0.25
TICKS_PER_SECOND = 4


class ThroughputTimeline:
    """Counts the text events of every second and reports progress."""

    def __init__(
        self,
        generator: LoadGenerator,
        on_progress: Callable[[LoadGenerator, float], None] | None,
        clock: Clock,
    ) -> None:
        self._generator = generator
        self._on_progress = on_progress
        self._clock = clock
        self.per_second: list[int] = []

    async def run(self) -> None:
        """Count until cancelled."""
        started = self._clock.now()
        counted = ticks = 0
        while True:
            ticks += 1
            await self._clock.sleep_until(started + ticks * PROGRESS_INTERVAL_S)
            if self._on_progress is not None:
                self._on_progress(self._generator, ticks * PROGRESS_INTERVAL_S)
            if ticks % TICKS_PER_SECOND == 0:
                text_events = self._generator.text_events
                self.per_second.append(text_events - counted)
                counted = text_events
