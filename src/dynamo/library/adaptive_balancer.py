"""The adaptive balancer for programs that choose a worker themselves."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.scheduling.router.policies.adaptive_balancer import (
    EWMA_WEIGHT,
    CapacityBalancer,
    PredictedLoad,
    TieBreaker,
    WorkerMetrics,
)

LOAD_HISTORY_LENGTH = 256


class WorkerAssignment(msgspec.Struct, frozen=True):
    """The worker for a request. A higher `assignment_score` is better; `expected_completion_time`
    is in seconds from now."""

    worker_id: str
    predicted_load: PredictedLoad
    assignment_score: float
    expected_completion_time: float


class BalancedWorker(Protocol):
    """A worker with an `id`, and optionally `metrics`: a mapping with WorkerMetrics' fields."""

    @property
    def id(self) -> str: ...


class AdaptiveLoadBalancer(CapacityBalancer):
    """Assign requests to workers, whose metrics, history and speed are kept by id."""

    def __init__(self, config: Any = None, tie_breaker: TieBreaker | None = None) -> None:
        """`config` is not read here. `tie_breaker` chooses between equal workers (default: the
        first)."""
        super().__init__(tie_breaker)
        self.config = config
        self.load_history: defaultdict[str, deque[PredictedLoad]] = defaultdict(
            lambda: deque(maxlen=LOAD_HISTORY_LENGTH)
        )

    async def balance_load(
        self, workers: Sequence[BalancedWorker], new_request: Any
    ) -> WorkerAssignment:
        """Call `assign`."""
        return self.assign(workers, new_request)

    def assign(self, workers: Sequence[BalancedWorker], new_request: Any) -> WorkerAssignment:
        """Return the worker with the most room left. Raises `LoadBalancingError` if none has room.
        Metrics that a worker carries are applied first."""
        for worker in workers:
            metrics = getattr(worker, "metrics", None)
            if isinstance(metrics, Mapping):
                self.update_metrics(
                    worker.id, msgspec.convert(metrics, WorkerMetrics, strict=False)
                )
        best, predicted, score = self.choose([worker.id for worker in workers], new_request)
        self.load_history[best].append(predicted)
        return WorkerAssignment(best, predicted, score, self._completion_s(best, predicted))

    def on_completed(self, worker_id: str, prompt: int, output: int, seconds: float) -> None:
        """Learn the answer's length and the worker's speed from a completed request."""
        self.prediction_model.observe(prompt, output)
        if seconds > 0 and output:
            speed = (prompt + output) / seconds
            before = self._speeds.get(worker_id, speed)
            self._speeds[worker_id] = before + (speed - before) * EWMA_WEIGHT

    def remove_worker(self, worker_id: str) -> None:
        super().remove_worker(worker_id)
        self.load_history.pop(worker_id, None)

    def _completion_s(self, worker_id: str, predicted: PredictedLoad) -> float:
        load = self.worker_metrics.get(worker_id, WorkerMetrics()).current_load
        speed = self._speeds.get(worker_id, self._mean_speed())
        return predicted.total * (1.0 + load) / speed
