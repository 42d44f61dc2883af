"""Which workers compute a prompt, as admission predicts its first token."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.router.fake_cluster import ENGINE, instance

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.scheduling.admission.first_tokens import PromptWorkers
from dynamo.scheduling.router.costs.pair import PairCost
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt

NOW = 100.0


class FakeClient:
    def __init__(self, role: str, *names: str) -> None:
        engine = ENGINE | {"roles": [role]}
        self.instances = {name: instance(name, engine=engine) for name in names}

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def count_by(self, count_requests: Callable[[str], int]) -> None:
        pass


class Workers(PromptWorkers):
    """Prompt workers with a ledger whose clock stands."""

    def __init__(self, decode: Any, prefill: Any, policy: Any) -> None:
        clock: Any = SimpleNamespace(now=lambda: NOW)
        clients = [decode] if prefill is None else [decode, prefill]
        self.ledger = Ledger(clock, *clients)
        self.ledger.models_prompts = self.ledger.follows_answers = policy is not None
        super().__init__(self.ledger, prefill, policy)


class FakePolicy:
    def __init__(self, settings: DisaggregationSettings) -> None:
        self.predicts = True
        self.predict_pair_ms = PairCost(settings).predict_ms


def make_prompt_workers(mode: str, *, of_policy: bool = True) -> Workers:
    """Two decode workers, and two prefill workers with a backlog of several seconds."""
    decode: Any = FakeClient("decode", "d1", "d2")
    prefill: Any = FakeClient("prefill", "p1", "p2")
    settings = DisaggregationSettings(mode=mode)
    policy: Any = FakePolicy(settings) if of_policy else None
    workers = Workers(decode, prefill, policy)
    workers.update(settings, limited=True)
    for name in ("p1", "p2"):
        for number in range(3):
            add_prompt(workers, name, number, 40_000)
    return workers


def add_prompt(workers: Workers, name: str, number: int, tokens: int) -> PlacedRequest:
    ledger, key = workers.ledger, f"{name}/{number}"
    return ledger.place(key, ledger.workers[name], Prompt(tokens, ()), new_tokens=tokens)


def predict_ms(workers: Workers, tokens: int = 1_000, sufficient_ms: float = 0.0) -> float:
    answering = [workers.ledger.workers["d1"], workers.ledger.workers["d2"]]
    return workers.predict_ms(answering, tokens, 0, sufficient_ms, NOW)


@pytest.mark.parametrize(
    ("mode", "of_policy", "remote"),
    [
        ("off", True, False),
        ("always", True, True),
        ("always", False, True),
        ("predicted", False, True),  # modes without prices compute all prompts there
        ("predicted", True, False),
        ("thresholds", True, True),
    ],
)
def test_the_first_token_is_predicted_where_the_prompt_is_computed(
    mode: str, of_policy: bool, remote: bool
) -> None:
    workers = make_prompt_workers(mode, of_policy=of_policy)

    assert (predict_ms(workers) > 1_000) == remote


def test_short_prompts_are_predicted_at_the_workers_that_answer() -> None:
    workers = make_prompt_workers("thresholds")

    assert predict_ms(workers, tokens=500) < 100
    assert not workers.remote(500)
    assert len(workers.remote(600)) == 2


def test_answers_hold_a_prompt_back_from_their_worker() -> None:
    workers = make_prompt_workers("predicted")
    for name in ("d1", "d2"):
        for number in range(40):
            placed = add_prompt(workers, name, number, 10)
            workers.ledger.first_token(placed)

    assert predict_ms(workers, tokens=20_000) > 1_000


def test_a_worker_that_may_not_take_the_prompt_predicts_nothing() -> None:
    workers = make_prompt_workers("always")
    settings = DisaggregationSettings(mode="always")

    assert PairCost(settings).predict_ms([workers.ledger.workers["p1"]], 1_000, 0, NOW) == float(
        "inf"
    )


def test_without_prefill_workers_those_that_answer_are_idle_or_not() -> None:
    decode: Any = FakeClient("decode", "d1")
    workers = Workers(decode, None, None)
    workers.update(DisaggregationSettings(), limited=True)

    assert not workers.remote(5_000)
    assert workers.predict_ms([workers.ledger.workers["d1"]], 1_000, 0, 0.0, NOW) < 100
    assert workers.predict_ms([], 1_000, 0, 0.0, NOW) == float("inf")
