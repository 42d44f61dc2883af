"""Cache and load of every worker over time, as far as the router knows them: for the picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.core.values import Load
from dynamo.scheduling.router.explain.recorder import RoutingRecorder

SAMPLE_INTERVAL_S = 1.0
MAX_SAMPLES = 900


class WorkerSample(msgspec.Struct, frozen=True):
    """One worker at one moment. Blocks and requests are counts of its own; `sent`: requests under
    way there from this router; `routed`: those sent since the sample before."""

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
    """All workers at one moment (Unix time); `waiting`: requests held in the router."""

    at: float
    waiting: int
    workers: dict[str, WorkerSample]


class RoutingTimeline:
    """The last `kept` samples."""

    def __init__(self, watch: RoutingRecorder, max_samples: int = MAX_SAMPLES) -> None:
        self._recorder = watch
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
        """Keep how it is now."""
        made = {
            name: self._sample_worker(name, loads.get(name), views.get(name, ""))
            for name in workers
        }
        self._recorder.retain_workers(workers)
        self._routed_before = dict(self._recorder.routed_requests)
        self._samples.append(TimelineSample(at, waiting, made))

    def samples_since(self, at: float = 0.0) -> list[TimelineSample]:
        """Samples after a moment, oldest first."""
        return [one for one in self._samples if one.at > at]

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
