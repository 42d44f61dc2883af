"""The adaptive balancer and the model that predicts a request's load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.core.errors import Overloaded
from dynamo.library.adaptive_balancer import AdaptiveLoadBalancer
from dynamo.scheduling.router.policies.adaptive_balancer import (
    Capacity,
    LoadBalancingError,
    LoadPredictionModel,
)


def worker(name: str, load: float = 0.0, memory: float = 1.0, capacity: int = 10_000) -> Any:
    metrics = {
        "current_load": load,
        "available_memory": memory,
        "capacity_tokens": capacity,
    }
    return SimpleNamespace(id=name, metrics=metrics)


def request(tokens: int = 100, max_tokens: int | None = None) -> Any:
    return SimpleNamespace(token_ids=[1] * tokens, max_tokens=max_tokens)


async def test_the_worker_with_the_most_capacity_left_is_assigned() -> None:
    balancer = AdaptiveLoadBalancer({"any": "thing"})
    assignment = await balancer.balance_load(
        [worker("busy", load=0.9), worker("free", load=0.1), worker("full", memory=0.2)],
        request(1000, max_tokens=200),
    )
    assert assignment.worker_id == "free"
    assert assignment.predicted_load.total == 1200
    assert assignment.expected_completion_time == pytest.approx(1200 * 1.1 / 1000)
    assert list(balancer.load_history["free"]) == [assignment.predicted_load]


def test_capacity_is_base_times_free_load_times_free_memory() -> None:
    balancer = AdaptiveLoadBalancer()
    balancer.assign([worker("a", load=0.5, memory=0.5)], request())
    assert balancer.capacity("a") == Capacity(10_000, 5_000, 2_500, memory_constrained=True)
    balancer.assign([worker("a", load=0.5, memory=0.8)], request())
    assert not balancer.capacity("a").memory_constrained


def test_no_capacity_anywhere_raises_an_overload() -> None:
    with pytest.raises(LoadBalancingError) as refused:
        AdaptiveLoadBalancer().assign([worker("a", load=1.0), worker("b", capacity=50)], request())
    assert isinstance(refused.value, Overloaded)
    assert refused.value.retry_after_s


def test_answer_lengths_are_learnt_by_prompt_length() -> None:
    model = LoadPredictionModel()
    for _ in range(50):
        model.observe(1000, 40)
    assert model.predict_request_load(request(1020)).output_tokens == 40
    assert model.predict_request_load(request(1020, max_tokens=8)).output_tokens == 8
    assert model.predict_request_load(request(5000)).output_tokens == 256


def test_a_faster_worker_has_more_capacity() -> None:
    balancer = AdaptiveLoadBalancer()
    for _ in range(20):
        balancer.on_completed("quick", 100, 100, 1.0)
        balancer.on_completed("slow", 100, 100, 4.0)
    assert balancer.assign([worker("slow", 0.2), worker("quick", 0.4)], request()).worker_id == (
        "quick"
    )
    balancer.remove_worker("quick")
    balancer.remove_worker("slow")
    assert balancer.assign([worker("slow", 0.2), worker("quick", 0.4)], request()).worker_id == (
        "slow"
    )
