"""Samples of every worker's cache and load over time, as far as the router knows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.core.values import Load
from dynamo.scheduling.router.explain.recorder import RoutingRecorder

SAMPLE_INTERVAL_S = 1.0
MAX_SAMPLES = 900


class WorkerSample(msgspec.Struct, frozen=True):
    """A worker at one time. Blocks, requests and prefill tokens come from its load report.
    `sent`: requests of this router at the worker. `routed`: requests since the last sample."""

    cached_blocks: int = 0
    active_blocks: int = 0
    total_blocks: int = 0
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    sent: int = 0
    routed: int = 0
    view: str = ""


class TimelineSample(msgspec.Struct, frozen=True):
    """All workers at the Unix time `at`. `waiting` counts requests held in the router."""

    at: float
    waiting: int
    workers: dict[str, WorkerSample]


class RoutingTimeline:
    """Keep the last `max_samples` samples."""

    def __init__(self, recorder: RoutingRecorder, max_samples: int = MAX_SAMPLES) -> None:
        self._recorder = recorder
        self._samples: deque[TimelineSample] = deque(maxlen=max_samples)
        self._routed_before: dict[str, int] = {}

    def record(
        self,
        at: float,
        workers: Sequence[str],
        loads: Mapping[str, Load],
        *,
        views: Mapping[str, str],
        waiting: int,
    ) -> None:
        """Add a sample. Counters of workers that are not in `workers` are dropped."""
        samples = {
            name: self._sample_worker(name, loads.get(name), views.get(name, ""))
            for name in workers
        }
        self._recorder.retain_workers(workers)
        self._routed_before = dict(self._recorder.routed_requests)
        self._samples.append(TimelineSample(at, waiting, samples))

    def samples_since(self, at: float = 0.0) -> list[TimelineSample]:
        """Return the samples after a Unix time, oldest first."""
        return [sample for sample in self._samples if sample.at > at]

    def _sample_worker(self, name: str, load: Load | None, view: str) -> WorkerSample:
        load = load or Load()
        routed = self._recorder.routed_requests[name] - self._routed_before.get(name, 0)
        return WorkerSample(
            cached_blocks=load.cached_blocks,
            active_blocks=load.active_blocks,
            total_blocks=load.total_blocks,
            running=load.running,
            waiting=load.waiting,
            prefill_tokens=load.prefill_tokens,
            sent=self._recorder.active_requests[name],
            routed=routed,
            view=view,
        )
