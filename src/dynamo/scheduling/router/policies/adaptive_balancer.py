"""The adaptive balancer: predict the load of a request, and assign the worker with the most
capacity left after it. Caches are not considered, so engines need not publish KV events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


class WorkerMetrics(msgspec.Struct, frozen=True):
    """Metrics of a worker. Load and memory are shares, 0 to 1. `capacity_tokens` is the size of its
    KV memory. `speed` in tokens per second replaces the speed measured from completed requests."""

    current_load: float = 0.0
    available_memory: float = 1.0
    capacity_tokens: float = 1 << 20
    speed: float | None = None


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


class CapacityBalancer:
    """Choose workers by the room that they have left. `worker_metrics` has theirs by name."""

    def __init__(self, tie_breaker: TieBreaker | None = None) -> None:
        """`tie_breaker` chooses between equal workers (default: the first)."""
        self._tie_breaker = tie_breaker
        self.worker_metrics: dict[str, WorkerMetrics] = {}
        self.prediction_model = LoadPredictionModel()
        self._speeds: dict[str, float] = {}

    def choose(self, names: Sequence[str], request: Any) -> tuple[str, PredictedLoad, float]:
        """Return the worker with the most room left, the load of the request and its score. Raises
        `LoadBalancingError` if none has room."""
        predicted = self.prediction_model.predict_request_load(request)
        capacities = {name: self.capacity(name) for name in names}
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
        return best, predicted, scores[best]

    def update_metrics(self, worker_id: str, metrics: WorkerMetrics) -> None:
        """Replace the metrics of a worker."""
        self.worker_metrics[worker_id] = metrics
        if metrics.speed is not None:
            self._speeds[worker_id] = metrics.speed

    def remove_worker(self, worker_id: str) -> None:
        """Drop everything known of a worker."""
        self.worker_metrics.pop(worker_id, None)
        self._speeds.pop(worker_id, None)

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
