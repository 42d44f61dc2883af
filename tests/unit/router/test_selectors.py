"""Selectors: the choice of one scored worker within a request's constraints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from random import Random

import pytest
from tests.unit.router.fake_cluster import FakeCluster, instance

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError
from dynamo.core.labels import LABELS_KEY, parse_labels
from dynamo.core.settings.schema_router import RoutingStrategySettings
from dynamo.library.kv_router import worker_score
from dynamo.scheduling.router import (
    DefaultWorkerSelector,
    PerformanceRequirements,
    RouterError,
    SelectionStrategy,
    WorkerScore,
    WorkerSelector,
    WorkerStatus,
)
from dynamo.scheduling.router.features import FeatureFilter, excluded_workers
from dynamo.scheduling.router.selectors import adapt_selector, make_selector

SCORES = {
    "a": WorkerScore(0.3, load_factor=0.1, labels={"zone": "east"}),
    "b": WorkerScore(0.5, load_factor=0.9, labels={"zone": "west"}),
    "c": WorkerScore(0.49, load_factor=0.2, labels={"zone": "west"}),
}


def count_selections(strategy: SelectionStrategy, temperature: float = 1.0) -> Counter[str]:
    selector = DefaultWorkerSelector(strategy, temperature=temperature, rng=Random(1))
    return Counter(selector.select_worker(SCORES, {}) for _ in range(300))


def test_the_highest_score_wins() -> None:
    assert count_selections(SelectionStrategy.HighestScore) == {"b": 300}


def test_weighted_random_follows_the_scores() -> None:
    seen = count_selections(SelectionStrategy.WeightedRandom)
    assert seen["b"] > seen["c"] > seen["a"] > 0
    assert count_selections(SelectionStrategy.WeightedRandom, temperature=0) == {"b": 300}


def test_proportional_follows_score_over_sum() -> None:
    scores = {name: WorkerScore(total) for name, total in (("a", 1.0), ("b", 3.0), ("c", 0.0))}
    selector = DefaultWorkerSelector(SelectionStrategy.Proportional, rng=Random(1))
    seen = Counter(selector.select_worker(scores, {}) for _ in range(4_000))
    assert seen["b"] == pytest.approx(3_000, rel=0.05)
    assert seen["a"] == pytest.approx(1_000, rel=0.1)
    assert seen["c"] == 0


def test_proportional_counts_negative_scores_from_the_worst() -> None:
    scores = {name: WorkerScore(total) for name, total in (("a", -1.0), ("b", -2.0), ("c", -3.0))}
    selector = DefaultWorkerSelector(SelectionStrategy.Proportional, rng=Random(1))
    seen = Counter(selector.select_worker(scores, {}) for _ in range(3_000))
    assert seen["a"] == pytest.approx(2_000, rel=0.1)
    assert (seen["c"], selector.select_worker({"a": WorkerScore(0.0)}, {})) == (0, "a")


def test_load_balanced_selects_the_least_loaded_of_the_best() -> None:
    assert count_selections(SelectionStrategy.LoadBalanced) == {"c": 300}


@pytest.mark.parametrize("strategy", SelectionStrategy)
def test_constraints_are_respected(strategy: SelectionStrategy) -> None:
    selector = DefaultWorkerSelector(strategy, rng=Random(1))
    assert selector.select_worker(SCORES, {"zone": "east"}) == "a"
    with pytest.raises(RouterError.NoAvailableWorker):
        selector.select_worker(SCORES, {"zone": "north"})


def test_the_highest_negative_score_wins() -> None:
    selector = DefaultWorkerSelector(rng=Random(1))
    assert selector.select_worker({"a": WorkerScore(-3.0), "b": WorkerScore(-2.0)}, {}) == "b"


class LastSelector(WorkerSelector):
    def select_worker(
        self, worker_scores: Mapping[str, WorkerScore], constraints: Mapping[str, str]
    ) -> str:
        return max(worker_scores)


class FakeEntryPoint:
    value = "package:selector"
    name = "last"

    def load(self) -> type[WorkerSelector]:
        return LastSelector


def test_an_entry_point_provides_a_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [FakeEntryPoint()])
    selector = make_selector("last", 1.0, Random(1))
    cluster = FakeCluster(4, select=adapt_selector(selector))
    assert cluster.route(100) == "d"


class FailingSelector(WorkerSelector):
    """Return `answer`, or raise it."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer

    def select_worker(
        self, worker_scores: Mapping[str, WorkerScore], constraints: Mapping[str, str]
    ) -> str:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", ["unknown", ZeroDivisionError("a bug")])
def test_while_a_selector_fails_the_best_score_wins(
    answer: str | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    selector = FailingSelector(answer)
    cluster = FakeCluster(4, select=adapt_selector(selector))
    cluster.view.caches["c"] = set(range(1, 101))
    assert [cluster.route(1_600, list(range(1, 101))) for _ in range(2)] == ["c", "c"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    selector.answer = "b"
    assert cluster.route(1_600, list(range(1, 101))) == "b"


def test_a_selector_may_refuse_a_request() -> None:
    error = RouterError.NoAvailableWorker("none will do")
    cluster = FakeCluster(2, select=adapt_selector(FailingSelector(error)))
    refused = [cluster.submit(100), cluster.submit(200)]
    assert cluster.place() == {}
    assert cluster.solver.pop_rejected() == [(request, error) for request in refused]
    assert not len(cluster.solver)


def test_a_selector_that_cannot_be_imported_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(FakeEntryPoint):
        def load(self) -> type[WorkerSelector]:
            raise ImportError("no module")

    monkeypatch.setattr(metadata, "entry_points", lambda group: [Broken()])
    with pytest.raises(ConfigError, match="no module"):
        make_selector("last", 1.0, Random(1))


def test_an_unknown_selector_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown"):
        make_selector("unknown", 1.0, Random(1))


def test_label_constraints_exclude_workers() -> None:
    assert parse_labels("zone=a, gpu = h100,fast") == {"zone": "a", "gpu": "h100", "fast": "true"}
    workers = {"a": instance("a", **{LABELS_KEY: {"zone": "x"}}), "b": instance("b")}
    assert excluded_workers(workers, Context("r")) == frozenset()
    assert excluded_workers(workers, Context("r", metadata={LABELS_KEY: "zone=x"})) == {"b"}
    with pytest.raises(RouterError.NoAvailableWorker, match="zone=y"):
        excluded_workers(workers, Context("r", metadata={LABELS_KEY: "zone=y"}))


def test_excluded_workers_are_remembered_until_the_instances_change() -> None:
    cache, context = FeatureFilter(), Context("r", metadata={LABELS_KEY: "zone=x"})
    workers = {"a": instance("a", **{LABELS_KEY: {"zone": "x"}}), "b": instance("b")}
    first = cache.workers_without_labels(workers, context)
    assert first == {"b"}
    assert cache.workers_without_labels(workers, context) is first
    assert cache.workers_without_labels({**workers, "c": instance("c")}, context) == {"b", "c"}
    for number in range(200):
        with pytest.raises(RouterError.NoAvailableWorker):
            cache.workers_without_labels(
                workers, Context("r", metadata={LABELS_KEY: f"zone={number}"})
            )
    assert cache.workers_without_labels(workers, context) == {"b"}


def test_the_score_of_the_seeds_example() -> None:
    """Overlaps of 5, 50, 75 %, loads of 30, 50, 80 %, equal latency, free memory = 1 - load."""
    scores = {
        name: worker_score(
            hit,
            WorkerStatus(load, 0.01, 1.0 - load),
            PerformanceRequirements(),
            RoutingStrategySettings(),
        )
        for name, hit, load in (("1", 0.05, 0.3), ("2", 0.5, 0.5), ("3", 0.75, 0.8))
    }
    assert DefaultWorkerSelector().select_worker(scores, {}) == "2"
    assert scores["2"].total_score == pytest.approx(0.2 + 0.15 + 0.2 * 0.995 + 0.05)
