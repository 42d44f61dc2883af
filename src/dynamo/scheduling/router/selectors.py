"""Selectors: how one worker is chosen once all workers have a score.

A selector of another package is a WorkerSelector that an entry point names:

    [project.entry-points."dynamo.router.selectors"]
    mine = "my_package:MySelector"

The setting `router.selector: mine` then chooses it.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.labels import LABELS_KEY, satisfies_constraints
from dynamo.core.plugins import SELECTORS
from dynamo.scheduling.router.costs.interface import lowest_indices
from dynamo.scheduling.router.features import Constraints, NoAvailableWorker
from dynamo.scheduling.router.placement.candidates import SelectWorker
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.worker import WorkerState

log = logging.getLogger(__name__)

NEAR_BEST_SHARE = 0.1
"""Share of the distance of best and worst score within which `LoadBalanced` picks by load."""


class RouterError:
    """Routing errors under the name that Dynamo's documents use."""

    NoAvailableWorker = NoAvailableWorker


class SelectionStrategy(StrEnum):
    """`HighestScore`; `WeightedRandom`: by a softmax over the scores; `Proportional`: with the
    probability score / sum; `LoadBalanced`: the least loaded worker whose score is near the best.
    """

    HighestScore = "highest_score"
    WeightedRandom = "weighted_random"
    Proportional = "proportional"
    LoadBalanced = "load_balanced"


class WorkerScore(msgspec.Struct, frozen=True):
    """The score of one worker. The highest `total_score` wins; `expected_latency` is in seconds,
    `load_factor` in 0 to 1; constraints are matched against `labels`."""

    total_score: float
    cache_hit_ratio: float = 0.0
    expected_latency: float = 0.0
    load_factor: float = 0.0
    labels: dict[str, Any] = {}


class WorkerSelector(ABC):
    """Choose one worker by its score."""

    @abstractmethod
    def select_worker(
        self, worker_scores: Mapping[str, WorkerScore], constraints: Constraints
    ) -> str:
        """Return the id of a worker that satisfies `constraints`, the labels of the request. A
        frontend passes only workers that satisfy them. `NoAvailableWorker` may be raised to refuse
        the request."""


class DefaultWorkerSelector(WorkerSelector):
    """The strategies of `SelectionStrategy`."""

    def __init__(
        self,
        strategy: SelectionStrategy = SelectionStrategy.HighestScore,
        *,
        temperature: float = 1.0,
        rng: Random | None = None,
    ) -> None:
        """`temperature` of the softmax applies to scores scaled to 0..1; 0 takes the best."""
        self._strategy = strategy
        self._temperature = temperature
        self._rng = rng or Random()

    def select_worker(
        self, worker_scores: Mapping[str, WorkerScore], constraints: Constraints
    ) -> str:
        names = [
            name
            for name, score in worker_scores.items()
            if satisfies_constraints(score.labels, constraints)
        ]
        if not names:
            raise NoAvailableWorker("no worker satisfies the constraints", retry_after_s=1.0)
        totals = [worker_scores[name].total_score for name in names]
        if self._strategy is SelectionStrategy.LoadBalanced:
            best = max(totals)
            limit = best - NEAR_BEST_SHARE * (best - min(totals))
            near = [name for name, total in zip(names, totals, strict=True) if total >= limit]
            return min(near, key=lambda name: (worker_scores[name].load_factor, self._rng.random()))
        if self._strategy is SelectionStrategy.Proportional:
            return names[proportional_pick(totals, self._rng)]
        weighted = self._strategy is SelectionStrategy.WeightedRandom
        return names[softmax_pick(totals, self._temperature if weighted else 0.0, self._rng)]


def softmax_pick(scores: Sequence[float], temperature: float, rng: Random) -> int:
    """Return an index by a softmax over scores scaled to 0..1; temperature 0 takes a best one."""
    best = max(scores)
    spread = best - min(scores)
    if temperature <= 0.0 or spread == 0.0:
        return rng.choice([index for index, score in enumerate(scores) if score == best])
    weights = [math.exp((score - best) / (spread * temperature)) for score in scores]
    return rng.choices(range(len(scores)), weights)[0]


def proportional_pick(scores: Sequence[float], rng: Random) -> int:
    """Return an index with the probability score / sum. Negative scores, as of costs, are counted
    from the worst one."""
    lowest = min(0.0, *scores)
    weights = [score - lowest for score in scores]
    if not any(weights):
        return rng.randrange(len(scores))
    return rng.choices(range(len(scores)), weights)[0]


def make_selector(name: str, temperature: float, rng: Random) -> WorkerSelector:
    """Make the selector of a strategy or of an entry point. Raises `ConfigError`."""
    selector_class = SELECTORS.load(name)
    if selector_class is DefaultWorkerSelector:
        return DefaultWorkerSelector(SelectionStrategy(name), temperature=temperature, rng=rng)
    try:
        selector = selector_class()
    except Exception as error:
        raise ConfigError(f"selector {name!r} cannot be made: {error!r}") from error
    if not isinstance(selector, WorkerSelector):
        raise ConfigError(f"selector {name!r} is not a WorkerSelector")
    return selector


def adapt_selector(selector: WorkerSelector) -> SelectWorker:
    """Return `selector` as a function over costs; a score is a negative cost. A DynamoError of the
    selector refuses the request. After any other error the best score wins; the first such error is
    logged."""
    failing = False

    def select(
        request: PendingRequest,
        workers: Sequence[WorkerState],
        costs: Sequence[float],
        rng: Random,
    ) -> int:
        nonlocal failing
        scores = score_workers(request, workers, costs)
        try:
            index = list(scores).index(selector.select_worker(scores, request.constraints))
        except DynamoError:
            raise
        except Exception:  # a selector may be a user's code
            if not failing:
                log.exception("the selector failed; the best score wins until it works again")
            failing = True
            return rng.choice(lowest_indices(costs))
        failing = False
        return index

    return select


def score_workers(
    request: PendingRequest, workers: Sequence[WorkerState], costs: Sequence[float]
) -> dict[str, WorkerScore]:
    """Return the score of each worker by name, in the order of `workers`."""
    tokens = max(1, request.prompt.tokens)
    return {
        worker.name: WorkerScore(
            total_score=-cost,
            cache_hit_ratio=request.overlaps.get(worker.name, 0) * request.block_tokens / tokens,
            expected_latency=worker.predict_prefill_ms(request.uncached_tokens(worker.name)) * 1e-3,
            load_factor=worker.load_factor(),
            labels=worker.instance.capabilities.get(LABELS_KEY) or {},
        )
        for worker, cost in zip(workers, costs, strict=True)
    }
