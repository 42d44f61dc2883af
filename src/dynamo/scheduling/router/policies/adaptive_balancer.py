"""The adaptive balancer: predict the load of a request, and assign the worker with the most
capacity left after it. Caches are not considered, so engines need not publish KV events."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.core.errors import Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.scheduling.router.costs.interface import lowest_indices

EWMA_WEIGHT = 0.1
"""Weight of the newest observation in every running mean."""
MEMORY_CONSTRAINED_BELOW = 0.8
"""Share of free memory below which a worker counts as memory-constrained."""
DEFAULT_TOKENS_PER_S = 1000.0
"""Speed of a worker before the first observation."""
INITIAL_MEAN_OUTPUT_TOKENS = 256
LOAD_HISTORY_LENGTH = 256
RETRY_S = 1.0

TieBreaker = Callable[[Sequence[str]], str]
"""Choose one of several equal workers by name."""


class LoadBalancingError(Overloaded):
    """No worker has room for the request."""


class PredictedLoad(msgspec.Struct, frozen=True):
    """The predicted load of a request, in tokens. A request cannot start without room for
    `min_required` tokens."""

    prompt_tokens: int
    output_tokens: int
    min_required: int

    @property
    def total(self) -> int:
        """Tokens that the request holds at its end."""
        return self.prompt_tokens + self.output_tokens


class Capacity(msgspec.Struct, frozen=True):
    """The capacity of a worker in tokens: `base` in all, `available` after its load, `effective`
    after its memory."""

    base: float
    available: float
    effective: float
    memory_constrained: bool


class WorkerAssignment(msgspec.Struct, frozen=True):
    """The worker for a request. A higher `assignment_score` is better; `expected_completion_time`
    is in seconds from now."""

    worker_id: str
    predicted_load: PredictedLoad
    assignment_score: float
    expected_completion_time: float


class WorkerMetrics(msgspec.Struct, frozen=True):
    """Metrics of a worker. Load and memory are shares, 0 to 1. `capacity_tokens` is the size of its
    KV memory. `speed` in tokens per second replaces the speed measured from completed requests."""

    current_load: float = 0.0
    available_memory: float = 1.0
    capacity_tokens: float = 1 << 20
    speed: float | None = None


class BalancedWorker(Protocol):
    """A worker with an `id`, and optionally `metrics`: a mapping with WorkerMetrics' fields."""

    @property
    def id(self) -> str: ...


class LoadPredictionModel:
    """Learn the mean answer length for each octave of prompt lengths. A prediction never exceeds
    the request's limit."""

    def __init__(self) -> None:
        self._mean_output_tokens: dict[int, float] = {}

    def predict_request_load(self, request: Any) -> PredictedLoad:
        """Predict from `token_ids` (packed or a sequence) or `prompt` (about four characters per
        token), and the limit in `max_tokens` or `stops.max_tokens`."""
        prompt = count_prompt_tokens(request)
        limit = getattr(getattr(request, "stops", request), "max_tokens", None)
        expected = self._mean_output_tokens.get(prompt.bit_length(), INITIAL_MEAN_OUTPUT_TOKENS)
        output = int(expected if limit is None else min(expected, limit))
        return PredictedLoad(prompt, output, prompt + 1)

    def observe(self, prompt: int, output: int) -> None:
        """Learn from an answer of `output` tokens to a prompt of `prompt` tokens."""
        octave = prompt.bit_length()
        mean = self._mean_output_tokens.get(octave, float(output))
        self._mean_output_tokens[octave] = mean + (output - mean) * EWMA_WEIGHT


class AdaptiveLoadBalancer:
    """Assign requests to workers, whose metrics, history and speed are kept by id."""

    def __init__(self, config: Any = None, tie_breaker: TieBreaker | None = None) -> None:
        """`config` is not read here. `tie_breaker` chooses between equal workers (default: the
        first)."""
        self.config = config
        self._tie_breaker = tie_breaker
        self.worker_metrics: dict[str, WorkerMetrics] = {}
        self.load_history: defaultdict[str, deque[PredictedLoad]] = defaultdict(
            lambda: deque(maxlen=LOAD_HISTORY_LENGTH)
        )
        self.prediction_model = LoadPredictionModel()
        self._speeds: dict[str, float] = {}

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
        predicted = self.prediction_model.predict_request_load(new_request)
        capacities = {worker.id: self.capacity(worker.id) for worker in workers}
        scores = {
            name: self._score(name, predicted, capacity)
            for name, capacity in capacities.items()
            if capacity.effective >= predicted.min_required
        }
        if not scores:
            raise LoadBalancingError(
                f"none of {len(capacities)} workers has room for {predicted.min_required} tokens",
                hint="add workers, or shorten the prompt",
                retry_after_s=RETRY_S,
            )
        best = self._best_worker(scores)
        self.load_history[best].append(predicted)
        return WorkerAssignment(best, predicted, scores[best], self._completion_s(best, predicted))

    def update_metrics(self, worker_id: str, metrics: WorkerMetrics) -> None:
        """Replace the metrics of a worker."""
        self.worker_metrics[worker_id] = metrics
        if metrics.speed is not None:
            self._speeds[worker_id] = metrics.speed

    def on_completed(self, worker_id: str, prompt: int, output: int, seconds: float) -> None:
        """Learn the answer's length and the worker's speed from a completed request."""
        self.prediction_model.observe(prompt, output)
        if seconds > 0 and output:
            speed = (prompt + output) / seconds
            before = self._speeds.get(worker_id, speed)
            self._speeds[worker_id] = before + (speed - before) * EWMA_WEIGHT

    def remove_worker(self, worker_id: str) -> None:
        """Drop everything known of a worker."""
        for by_worker in (self.worker_metrics, self.load_history, self._speeds):
            by_worker.pop(worker_id, None)

    def capacity(self, worker_id: str) -> Capacity:
        """Return base * (1 - load) * share of free memory. The base is the worker's memory times
        its speed relative to the other workers."""
        metrics = self.worker_metrics.get(worker_id, WorkerMetrics())
        base = metrics.capacity_tokens * self._relative_speed(worker_id)
        available = base * max(0.0, 1.0 - metrics.current_load)
        return Capacity(
            base=base,
            available=available,
            effective=available * metrics.available_memory,
            memory_constrained=metrics.available_memory < MEMORY_CONSTRAINED_BELOW,
        )

    def _best_worker(self, scores: Mapping[str, float]) -> str:
        names = list(scores)
        equal = [names[index] for index in lowest_indices([-score for score in scores.values()])]
        if len(equal) == 1 or self._tie_breaker is None:
            return equal[0]
        return self._tie_breaker(equal)

    def _score(self, worker_id: str, predicted: PredictedLoad, capacity: Capacity) -> float:
        """Return the share of capacity left after the request, times the relative speed."""
        left = (capacity.effective - predicted.total) / max(capacity.base, 1.0)
        return left * self._relative_speed(worker_id)

    def _completion_s(self, worker_id: str, predicted: PredictedLoad) -> float:
        load = self.worker_metrics.get(worker_id, WorkerMetrics()).current_load
        speed = self._speeds.get(worker_id, self._mean_speed())
        return predicted.total * (1.0 + load) / speed

    def _relative_speed(self, worker_id: str) -> float:
        mean = self._mean_speed()
        return self._speeds.get(worker_id, mean) / mean

    def _mean_speed(self) -> float:
        return (
            sum(self._speeds.values()) / len(self._speeds) if self._speeds else DEFAULT_TOKENS_PER_S
        )


def count_prompt_tokens(request: Any) -> int:
    """Return the number of prompt tokens, estimated if the request has a text only."""
    ids = getattr(request, "token_ids", None)
    if isinstance(ids, bytes):
        return len(ids) // TOKEN_BYTES
    return len(ids) if ids else len(getattr(request, "prompt", None) or "") // 4
