"""The backtest of the policy `flow` on the record of a deployment, beside its planner."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.settings import Settings
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo
from dynamo.operations.bench.traces import read_record
from dynamo.operations.planner.backtest import Backtest, backtest, short_record
from dynamo.operations.planner.options import make_planner, promise_of
from dynamo.operations.planner.simulation import Trial
from dynamo.operations.planner.values import EngineLimits
from dynamo.operations.replay.fleet import Startup
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
from dynamo.scheduling.request_record import RequestRecord

MAX_RECORD_S, MAX_REQUESTS = 7200.0, 100_000
"""The newest part of the record that is played."""
BLOCK_TOKENS = 64
NICENESS = 19
T = TypeVar("T")


class WorkerFacts(msgspec.Struct, frozen=True):
    """The facts of the workers of a model, and how long a start takes."""

    timing: Timing
    limits: EngineLimits
    start_s: float


def run_backtest(settings: Settings, record: Path, facts: WorkerFacts) -> Backtest:
    """Return the result for the newest part of a record. Prompts have the length that was not
    cached. Blocks for minutes. Raises `ConfigError` if the record is too short."""
    requests = recorded_requests(record)
    workers = replay_workers(facts.limits, facts.timing, 1)
    routing = replace(settings.router, mode="least_loaded", max_queue_wait=math.inf, ttft_slo=0.0)
    startup = Startup(facts.start_s, facts.start_s)
    plan = ReplayPlan("record", workers, routing, startup=startup)
    unlimited = replace(settings, planner=replace(settings.planner, budget=None, max=0))
    trial = Trial(plan, requests, promise_of(settings))
    return backtest(trial, lambda eta, peak: make_planner(unlimited, eta=eta, peak=peak))


def recorded_requests(record: Path) -> list[TraceConversation]:
    """Return the newest part of a record, with the prompts that were not cached. Blocks. Raises
    `ConfigError` if the record is too short."""
    rows = read_record(str(record), RequestRecord).rows[-MAX_REQUESTS:]
    first_ms = max(rows[0].timestamp, rows[-1].timestamp - MAX_RECORD_S * 1e3) if rows else 0.0
    requests = [
        TraceConversation(
            (row.timestamp - first_ms) / 1e3,
            [
                TraceRequest(
                    number, max(1, row.input_length - row.cached_tokens), max(1, row.output_length)
                )
            ],
        )
        for number, row in enumerate(rows)
        if row.timestamp >= first_ms and row.input_length
    ]
    if missing := short_record(requests[-1].start_s if requests else 0.0, len(requests)):
        raise ConfigError(missing)
    return requests


def replay_workers(limits: EngineLimits, timing: Timing, count: int) -> ReplayWorkers:
    """Return workers of a replay, without caches."""
    engine = EngineInfo(
        "mock",
        BLOCK_TOKENS,
        max(1, limits.kv_tokens // BLOCK_TOKENS),
        limits.kv_tokens,
        limits.max_seqs,
        limits.step_tokens,
    )
    return ReplayWorkers([ReplayGroup(count, engine, timing)], "lru", prefix_caching=False)


def start_thread(work: Callable[[], T]) -> Future[T]:
    """Run on a thread of low priority, which does not delay the end of the process."""
    future = Future[T]()

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            future.set_result(work())
        except (DynamoError, OSError) as error:
            future.set_exception(error)

    threading.Thread(target=run, name="replays", daemon=True).start()
    return future
