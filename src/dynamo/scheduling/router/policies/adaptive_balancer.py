"""The adaptive balancer: predicts what a request will need, and gives it to the worker that has
most left once it is there. It looks at no cache: for engines that publish nothing of theirs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.core.errors import Overloaded
from dynamo.core.hashing import TOKEN_BYTES

EWMA_WEIGHT = 0.1
"""Weight of the newest observation in every running mean."""
MEMORY_CONSTRAINED_BELOW = 0.8
"""Below this share of free memory a worker is memory-constrained."""
DEFAULT_TOKENS_PER_S = 1000.0
"""Tokens a second of a worker that nothing is known of."""
DEFAULT_OUTPUT_TOKENS = 256
LOAD_HISTORY_LENGTH = 256
RETRY_S = 1.0
TIE_TOLERANCE = 1e-3
"""Scores nearer than this share of the best are equal."""

TieBreaker = Callable[[Sequence[str]], str]
"""One of several equal workers."""


class LoadBalancingError(Overloaded):
    """No worker has room for the request."""


class PredictedLoad(msgspec.Struct, frozen=True):
    """In tokens. `min_required`: without room for these the request cannot start."""

    prompt_tokens: int
    output_tokens: int
    min_required: int

    @property
    def total(self) -> int:
        """All that it will hold in the end."""
        return self.prompt_tokens + self.output_tokens


class Capacity(msgspec.Struct, frozen=True):
    """What a worker can take on, in tokens: of all, of what is free, of what memory allows."""

    base: float
    available: float
    effective: float
    memory_constrained: bool


class WorkerAssignment(msgspec.Struct, frozen=True):
    """Who gets the request. `assignment_score`: higher is better; `expected_completion_time`:
    seconds from now."""

    worker_id: str
    predicted_load: PredictedLoad
    assignment_score: float
    expected_completion_time: float


class WorkerMetrics(msgspec.Struct, frozen=True):
    """Shares between 0 and 1; `capacity_tokens`: of its KV memory; `speed`: tokens a second, where
    that is known better than from what completed."""

    current_load: float = 0.0
    available_memory: float = 1.0
    capacity_tokens: float = 1 << 20
    speed: float | None = None


class BalancedWorker(Protocol):
    """A worker: `id`, and optionally `metrics`, a mapping with the fields of `WorkerMetrics`."""

    @property
    def id(self) -> str: ...


class LoadPredictionModel:
    """Learns how long answers are, by the length of the prompt (in octaves), and never predicts
    more than a request allows."""

    def __init__(self) -> None:
        self._mean_output_tokens: dict[int, float] = {}

    def predict_request_load(self, request: Any) -> PredictedLoad:
        """Of anything with `token_ids` (packed, or a sequence) or `prompt` (about four characters a
        token), and a limit as `max_tokens` or `stops.max_tokens`."""
        prompt = count_prompt_tokens(request)
        limit = getattr(getattr(request, "stops", request), "max_tokens", None)
        expected = self._mean_output_tokens.get(prompt.bit_length(), DEFAULT_OUTPUT_TOKENS)
        output = int(expected if limit is None else min(expected, limit))
        return PredictedLoad(prompt, output, prompt + 1)

    def observe(self, prompt: int, output: int) -> None:
        """An answer to a prompt of `prompt` tokens had `output` of them."""
        octave = prompt.bit_length()
        mean = self._mean_output_tokens.get(octave, float(output))
        self._mean_output_tokens[octave] = mean + (output - mean) * EWMA_WEIGHT


class AdaptiveLoadBalancer:
    """Keeps what it knows of workers by their ids."""

    def __init__(self, config: Any = None, tie_breaker: TieBreaker | None = None) -> None:
        """`config`: free for the caller's use; `pick`: between equals (the first)."""
        self.config = config
        self._tie_breaker = tie_breaker or _pick_first
        self.worker_metrics: dict[str, WorkerMetrics] = {}
        self.load_history: defaultdict[str, deque[PredictedLoad]] = defaultdict(
            lambda: deque(maxlen=LOAD_HISTORY_LENGTH)
        )
        self.prediction_model = LoadPredictionModel()
        self._speeds: dict[str, float] = {}

    async def balance_load(
        self, workers: Sequence[BalancedWorker], new_request: Any
    ) -> WorkerAssignment:
        """`assign`, as a coroutine."""
        return self.assign(workers, new_request)

    def assign(self, workers: Sequence[BalancedWorker], new_request: Any) -> WorkerAssignment:
        """The worker with the most room left. Raises `LoadBalancingError` where none has enough."""
        for worker in workers:
            told = getattr(worker, "metrics", None)
            if isinstance(told, Mapping):
                self.update_metrics(worker.id, msgspec.convert(told, WorkerMetrics, strict=False))
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
        """What a worker says of itself."""
        self.worker_metrics[worker_id] = metrics
        if metrics.speed is not None:
            self._speeds[worker_id] = metrics.speed

    def on_completed(self, worker_id: str, prompt: int, output: int, seconds: float) -> None:
        """A request ended there: how long answers get and how fast the worker is."""
        self.prediction_model.observe(prompt, output)
        if seconds > 0 and output:
            speed = (prompt + output) / seconds
            before = self._speeds.get(worker_id, speed)
            self._speeds[worker_id] = before + (speed - before) * EWMA_WEIGHT

    def remove_worker(self, worker_id: str) -> None:
        """The worker left."""
        for known in (self.worker_metrics, self.load_history, self._speeds):
            known.pop(worker_id, None)

    def capacity(self, worker_id: str) -> Capacity:
        """base x (1 - load) x share of memory that is free; the base is the worker's memory,
        scaled by how fast it has been beside the others."""
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
        best = max(scores.values())
        limit = best - abs(best) * TIE_TOLERANCE
        equal = [name for name, score in scores.items() if score >= limit]
        return equal[0] if len(equal) == 1 else self._tie_breaker(equal)

    def _score(self, worker_id: str, predicted: PredictedLoad, capacity: Capacity) -> float:
        """The share left with the request there, times how fast the worker is."""
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


def _pick_first(names: Sequence[str]) -> str:
    return names[0]


def count_prompt_tokens(request: Any) -> int:
    """How long a request's prompt is."""
    ids = getattr(request, "token_ids", None)
    if isinstance(ids, bytes):
        return len(ids) // TOKEN_BYTES
    return len(ids) if ids else len(getattr(request, "prompt", None) or "") // 4
