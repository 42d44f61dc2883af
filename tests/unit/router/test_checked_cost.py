"""Costs of other packages that return no costs, or raise: every request is placed all the same."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from tests.unit.router.fake_cluster import FakeCluster

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.scheduling.router import DefaultWorkerSelector
from dynamo.scheduling.router.costs.interface import Cost, CostMatrix, lowest_indices
from dynamo.scheduling.router.factory import make_cost
from dynamo.scheduling.router.placement.solver import LARGE_FLEET
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.router.selectors import SelectionStrategy, adapt_selector
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState

HASHES = list(range(1, 101))
WRONG = (nan, -inf, inf, "7", None, 1j, [1.0], 10**400, ZeroDivisionError("a bug"))


class OneValue(Cost):
    """Costs `value` at each worker, or raises it; `good` are the workers with another cost."""

    def __init__(self, value: Any, joint: bool = False) -> None:
        self.value = value
        self.joint = joint
        self.good: dict[str, float] = {}

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        value = self.good.get(worker.name, self.value)
        if isinstance(value, Exception):
            raise value
        return {"value": value}

    def cost(self, request: PendingRequest, worker: WorkerState, now: float) -> float:
        return self.terms(request, worker, now)["value"]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_cost_that_fails_is_replaced_and_logged_once(
    value: Any, joint: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cost = OneValue(value, joint)
    cluster = FakeCluster(3, cost)
    cluster.view.caches["c"] = set(HASHES)
    assert [cluster.route(1_600, HASHES) for _ in range(3)] == ["c", "c", "c"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    requests = [cluster.submit(100 * number) for number in range(1, 6)]
    assert cluster.place().keys() == {request.id for request in requests}

    cost.good = {"a": 3.0, "b": -1.0, "c": 2}
    assert cluster.route(1_600, HASHES) == "b"


@pytest.mark.parametrize("value", [inf, 8])
def test_a_worker_of_infinite_cost_is_avoided(value: float) -> None:
    cost = OneValue(value)
    cost.good = {"b": 7.0}
    assert FakeCluster(3, cost).route(100) == "b"


@pytest.mark.parametrize("value", [nan, -inf, None])
def test_one_wrong_cost_of_several_is_not_chosen(value: Any) -> None:
    cost = OneValue(value)
    cost.good = {"a": 1.0, "c": 1.0}
    cluster = FakeCluster(3, cost)
    cluster.view.caches["c"] = set(HASHES)
    assert cluster.route(1_600, HASHES) == "c"  # by the predicted cost of all workers


class FailingSteps(OneValue):
    """Raises in all that is called beside the cost."""

    def begin_round(self, *_: object) -> None:
        raise ValueError("a bug")

    def on_placed(self, placed: PlacedRequest) -> None:
        raise ValueError("a bug")

    def on_ended(self, placed: PlacedRequest) -> None:
        raise ValueError("a bug")

    def update_settings(self, settings: RouterSettings) -> None:
        raise ValueError("a bug")

    def build_matrix(self, workers: Sequence[WorkerState], now: float) -> CostMatrix:
        raise ValueError("a bug")


def test_no_step_of_a_cost_can_stop_a_round() -> None:
    cluster = FakeCluster(2, FailingSteps(9.0, joint=True))
    cluster.solver.cost.update_settings(RouterSettings())
    requests = [cluster.submit(100) for _ in range(4)]
    placed = cluster.place()
    assert placed.keys() == {request.id for request in requests}
    for each in placed.values():
        cluster.first_token(each)
        cluster.end(each)
    assert not any(worker.active for worker in cluster.worker_states.workers)


class ShortMatrix(CostMatrix):
    """Forgets a worker."""

    def row(self, request: PendingRequest) -> list[float]:
        return super().row(request)[1:]

    def column(self, requests: Sequence[PendingRequest], index: int) -> list[float]:
        return []


def test_a_matrix_with_too_few_costs_is_replaced() -> None:
    class Short(OneValue):
        def build_matrix(self, workers: Sequence[WorkerState], now: float) -> CostMatrix:
            return ShortMatrix(self, workers, now)

    cluster = FakeCluster(3, Short(1.0, joint=True))
    requests = [cluster.submit(100) for _ in range(4)]
    assert cluster.place().keys() == {request.id for request in requests}


@pytest.mark.parametrize("array", [[nan], [inf], [-inf, 1.0], [], ["x"], None, ValueError("bug")])
def test_wrong_costs_over_arrays_are_replaced(array: Any) -> None:
    class Arrays(OneValue):
        has_arrays = True

        def costs_of_all(self, request: PendingRequest, arrays: Any) -> Any:
            if isinstance(array, list) and array:
                return np.resize(np.array(array), len(arrays.workers))
            if isinstance(array, Exception):
                raise array
            return array

    cluster = FakeCluster(LARGE_FLEET + 1, Arrays(1.0, joint=True))
    requests = [cluster.submit(100) for _ in range(3)]
    assert cluster.place().keys() == {request.id for request in requests}


@pytest.mark.parametrize("strategy", SelectionStrategy)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_every_selector_gets_numbers(strategy: SelectionStrategy, value: Any) -> None:
    selector = adapt_selector(DefaultWorkerSelector(strategy))
    cluster = FakeCluster(3, OneValue(value), select=selector)
    assert cluster.route(100) in {"a", "b", "c"}


@pytest.mark.parametrize("costs", [[nan, 2.0, 1.0], [2.0, nan, 1.0], [-inf, 2.0, 1.0]])
def test_the_lowest_number_is_chosen_beside_others(costs: list[float]) -> None:
    assert lowest_indices(costs) == [2]
    assert lowest_indices([nan, nan]) == [0, 1]
    assert lowest_indices([inf, inf], 0.0) == [0, 1]


def test_a_cost_of_an_entry_point_that_cannot_be_product_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        name, value = "broken", "package:Broken"
        product: Any = None

        def load(self) -> Any:
            return self

        def from_settings(self, settings: RouterSettings) -> Any:
            if self.product is None:
                raise ValueError("no table")
            return self.product

    entry_point = Broken()
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry_point])
    with pytest.raises(ConfigError, match="no table"):
        make_cost(RouterSettings(policy="broken"))
    entry_point.product = "no cost"
    with pytest.raises(ConfigError, match="not a Cost"):
        make_cost(RouterSettings(policy="broken"))
