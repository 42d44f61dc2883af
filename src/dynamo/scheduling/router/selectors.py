"""How one worker is taken once all are scored; own ones are plain Python, found by entry point.

    [project.entry-points."dynamo.router.selectors"]
    mine = "my_package:MySelector"

and `router.selector: mine`.
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
from dynamo.scheduling.router.labels import Constraints, NoAvailableWorker
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.regret import pick_lowest
from dynamo.scheduling.router.placement.solver import SelectWorker
from dynamo.scheduling.router.worker_state import WorkerState

log = logging.getLogger(__name__)


class RouterError:
    """The seeds' name for what routing raises."""

    NoAvailableWorker = NoAvailableWorker


class SelectionStrategy(StrEnum):
    """`HighestScore`; `WeightedRandom`: chances by softmax of the scores; `LoadBalanced`: the least
    loaded of those whose score is near the best."""

    HighestScore = "highest_score"
    WeightedRandom = "weighted_random"
    LoadBalanced = "load_balanced"


class WorkerScore(msgspec.Struct, frozen=True):
    """`total_score`: the highest wins; `expected_latency`: seconds; `load_factor`: 0 to 1;
    `labels`: what constraints are about."""

    total_score: float
    cache_hit_ratio: float = 0.0
    expected_latency: float = 0.0
    load_factor: float = 0.0
    labels: dict[str, Any] = {}


class WorkerSelector(ABC):
    """Takes one worker by its score."""

    @abstractmethod
    def select_worker(
        self, worker_scores: Mapping[str, WorkerScore], constraints: Constraints
    ) -> str:
        """The id of one worker that satisfies `constraints`: the labels that the request asks for.
        A frontend shows only workers that bear them. Raises `NoAvailableWorker`, which the request
        is then answered."""


class DefaultWorkerSelector(WorkerSelector):
    """The three strategies of `SelectionStrategy`."""

    def __init__(
        self,
        strategy: SelectionStrategy = SelectionStrategy.HighestScore,
        *,
        temperature: float = 1.0,
        tolerance: float = 0.1,
        rng: Random | None = None,
    ) -> None:
        """`temperature`: of the softmax over scores, scaled to the distance of best and worst (0 =
        the best); `near`: the share of that distance within which scores count as equal."""
        self._strategy = strategy
        self._temperature = temperature
        self._tolerance = tolerance
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
        if self._strategy is SelectionStrategy.WeightedRandom:
            return names[softmax_pick(totals, self._temperature, self._rng)]
        best = max(totals)
        if self._strategy is SelectionStrategy.LoadBalanced:
            limit = best - self._tolerance * (best - min(totals))
            near = [name for name, total in zip(names, totals, strict=True) if total >= limit]
            return min(near, key=lambda name: (worker_scores[name].load_factor, self._rng.random()))
        equal = [name for name, total in zip(names, totals, strict=True) if total == best]
        return self._rng.choice(equal)


def softmax_pick(scores: Sequence[float], temperature: float, rng: Random) -> int:
    """An index, with chances by the softmax of scores scaled to [0, 1]; temperature 0: a best."""
    best = max(scores)
    spread = best - min(scores)
    if temperature <= 0.0 or spread == 0.0:
        equal = [index for index, score in enumerate(scores) if score == best]
        return rng.choice(equal)
    weights = [math.exp((score - best) / (spread * temperature)) for score in scores]
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
    """`selector`, as a placement asks for it: a score is the negative of a cost. While it fails,
    the best score wins; it may refuse a request by a DynamoError."""
    failing = False

    def select(
        arrival: PendingRequest, books: Sequence[WorkerState], costs: Sequence[float], rng: Random
    ) -> int:
        nonlocal failing
        scores = score_workers(arrival, books, costs)
        try:
            at = list(scores).index(selector.select_worker(scores, arrival.constraints))
        except DynamoError:
            raise
        except Exception:  # somebody else's code
            if not failing:
                log.exception("the selector fails: the best score wins meanwhile")
            failing = True
            return pick_lowest(costs, rng)
        failing = False
        return at

    return select


def score_workers(
    arrival: PendingRequest, books: Sequence[WorkerState], costs: Sequence[float]
) -> dict[str, WorkerScore]:
    """Of every one of `books`, in order."""
    tokens = max(1, arrival.prompt.tokens)
    return {
        book.name: WorkerScore(
            total_score=-cost,
            cache_hit_ratio=arrival.overlaps.get(book.name, 0) * arrival.block_tokens / tokens,
            expected_latency=book.predict_prefill_ms(arrival.uncached_tokens(book.name)) * 1e-3,
            load_factor=book.load_factor(),
            labels=book.instance.capabilities.get(LABELS_KEY) or {},
        )
        for book, cost in zip(books, costs, strict=True)
    }
