"""Fixtures for engine tests: a jumping clock, recording replies, requests and fast mock engines."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.reply import Reply
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import Finish, GenerateRequest, SamplingParams, Started, StopConditions
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.mock.engine import make_mock_engine


class JumpingClock(Clock):
    """A clock on which sleeping moves the time at once."""

    def __init__(self) -> None:
        self.time = 100.0
        self.sleeps = 0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def sleep_until(self, when: float) -> None:
        self.sleeps += 1
        await asyncio.sleep(0)
        self.time = max(self.time, when)

    async def offload(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return work(*args, **kwargs)


class RecordingReply(Reply):
    """Records the answer and checks the order of calls. `tokens` answers False from `limit` tokens
    on."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.started: Started | None = None
        self.ids: list[int] = []
        self.extras: list[Any] = []
        self.end: Finish | None = None
        self.times: WorkerTimes | None = None
        self.first = asyncio.Event()
        self._limit = limit

    def begin(self, started: Started) -> None:
        assert self.started is None
        self.started = replace(started, times=None)

    def tokens(self, ids: Any, logprobs: Any = None) -> bool:
        assert self.started is not None
        assert self.end is None
        self.ids += ids
        self.extras += logprobs or [None] * len(ids)
        self.first.set()
        return len(self.ids) < self._limit

    def finish(self, end: Finish) -> None:
        assert self.started is not None
        assert self.end is None
        self.end, self.times = replace(end, times=None), end.times


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


@pytest.fixture
def make_request() -> Callable[..., GenerateRequest]:
    def make(
        ids: list[int] | range,
        *,
        resumed: int = 0,
        top_logprobs: int | None = None,
        priority: int = 0,
        salt: str = "",
        **stops: Any,
    ) -> GenerateRequest:
        return GenerateRequest(
            "r",
            "m",
            array("I", ids).tobytes(),
            SamplingParams(),
            StopConditions(**stops),
            resumed=resumed,
            top_logprobs=top_logprobs,
            priority=priority,
            salt=salt,
        )

    return make


@pytest.fixture
def make_engine(clock: JumpingClock) -> Callable[..., BatchedEngine]:
    def make(context_tokens: int = 4096, vocab_size: int = 1000, **settings: Any) -> BatchedEngine:
        engine_settings = EngineSettings(kind="mock", **settings)
        vocabulary = range(100, 900)
        return make_mock_engine(
            engine_settings, vocabulary, clock, context_tokens=context_tokens, vocab_size=vocab_size
        )

    return make
