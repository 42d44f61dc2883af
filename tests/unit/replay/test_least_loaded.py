"""The candidates of large simulated fleets hold the worker of lowest cost, or one nearly as good."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from tests.simulation.conftest import BLOCK, chats, cluster

from dynamo.core.settings.schema_router import RouterSettings
from dynamo.operations.replay.fast import choosers
from dynamo.operations.replay.fast.least_loaded import LeastLoadedCandidates
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.costs.interface import CostMatrix
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.placement.solver import LARGE_FLEET
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt

WORKERS = LARGE_FLEET + 8


class Compared(LeastLoadedCandidates):
    """Note by which share the best candidate costs more than the best of all workers."""

    excesses: list[float]

    def matrix_for(self, request: PendingRequest) -> CostMatrix:
        matrix = super().matrix_for(request)
        whole = self.cost.build_matrix(self._states.workers, self._now)
        self.excesses.append(min(matrix.row(request)) / min(whole.row(request)) - 1.0)
        return matrix


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Compared]]:
    Compared.excesses = []
    monkeypatch.setattr(choosers, "LeastLoadedCandidates", Compared)
    return Compared


@pytest.mark.parametrize("per_s", [80.0, 320.0])
def test_candidates_hold_the_best_worker(compared: type[Compared], per_s: float) -> None:
    workers = cluster(WORKERS, num_blocks=400)
    plan = ReplayPlan("synthetic", workers, RouterSettings(mode="kv"), BLOCK)
    result, _ = FastReplay(plan).run(chats(400, seed=1, per_s=per_s, answer=200))
    assert result.completed == result.requests
    excesses = compared.excesses
    assert sum(excess > 0.01 for excess in excesses) < 0.05 * len(excesses)
    assert sum(excesses) < 0.01 * len(excesses)


def test_a_busy_fleet_has_a_free_worker_in_time() -> None:
    ledger = Ledger()
    ledger.follow_answers()
    ledger.workers.update_instances({name: make_instance(name) for name in ("a", "b")})
    candidates = LeastLoadedCandidates(ledger.workers, PredictedCost(), 0.05, Random(0))
    assert candidates.any_nearly_free()
    for worker, free_s in zip(ledger.workers.workers, (3.0, 2.0), strict=True):
        ledger.place(worker.name, worker, Prompt(9_000, ()), new_tokens=9_000, now=0.0)
        worker.prefill_free_s = free_s
        ledger.workers.changed.add(worker)
    candidates.begin(1.0)
    assert not candidates.any_nearly_free()
    assert candidates.next_nearly_free_s() == pytest.approx(1.95)
    candidates.begin(1.96)
    assert candidates.any_nearly_free()
    assert not candidates.any_nearly_free(frozenset("b"))


def make_instance(name: str) -> Instance:
    return Instance(
        id=name, address="memory://", namespace="n", component="c", endpoint="e", capabilities={}
    )
