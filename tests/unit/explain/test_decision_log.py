"""The last decisions, kept to be asked for."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.core.clock import SystemClock
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.explain.decision_log import DecisionLog, Explanation
from dynamo.scheduling.router.placement_handle import Placement
from dynamo.scheduling.router.policy import Candidate, Decision, Outcome


def request(name: str, choice: int = 0) -> GenerateRequest:
    return GenerateRequest(name, "tiny", b"", SamplingParams(), StopConditions(), choice=choice)


def decision(worker: str = "w1", **more: Any) -> Decision:
    instance = Instance(worker, "tcp://", "dynamo", "worker", "generate")
    return Decision(instance, "kv", 2, **more)


OUTCOME = Outcome(0.05, 0.5, 32, 64, 10)
TABLE = (
    Candidate("w1", 3, 12.5, {"queue": 2.5, "prefill": 10.0}),
    Candidate("w2", 0, 40.0, {"queue": 0.0, "prefill": 40.0}),
)


def test_a_decision_is_found_with_every_term_and_its_outcome() -> None:
    kept = DecisionLog(SystemClock(), "frontend-1")
    made = decision(
        cost_table=TABLE,
        overlap_blocks=3,
        prompt_blocks=4,
        best_overlap_blocks=3,
        placement=Placement(),
    )
    entry = kept.add(request("abc"), made)
    assert kept.find("abc")[0].outcome is None
    entry.set_outcome(OUTCOME)
    (found,) = kept.find("abc")
    assert found.outcome == OUTCOME
    assert found.costs == TABLE
    assert found.router == "frontend-1"
    assert found.why == (
        "w1 of 2 workers, cost 12.5, the next best w2 40, it holds 3 of the prompt's 4 blocks"
    )
    again = msgspec.json.decode(msgspec.json.encode(found), type=Explanation)
    assert again == found


def test_choices_and_attempts_of_a_request_stand_together() -> None:
    kept = DecisionLog(SystemClock())
    for choice in range(2):
        kept.add(request("abc", choice), decision())
    kept.add(request("abc", 1), decision("w2"))
    assert [(one.choice, one.worker) for one in kept.find("abc")] == [
        (0, "w1"),
        (1, "w1"),
        (1, "w2"),
    ]


def test_a_clients_own_id_finds_its_last_request() -> None:
    kept = DecisionLog(SystemClock())
    for name in ("mine-1", "mine-2.0", "mine-2.1", "mine-two-3", "mine"):
        kept.add(request(name), decision())
    assert [one.request_id for one in kept.find("mine")] == ["mine"]
    kept = DecisionLog(SystemClock())
    for name in ("mine-1", "mine-2.0", "mine-2.1", "mine-two-3"):
        kept.add(request(name), decision())
    assert [one.request_id for one in kept.find("mine")] == ["mine-2.0", "mine-2.1"]
    assert kept.find("min") == []


def test_only_so_many_are_kept() -> None:
    kept = DecisionLog(SystemClock(), max_entries=3)
    for number in range(10):
        kept.add(request(str(number)), decision())
    assert kept.find("6") == []
    assert [one.request_id for one in kept.latest(2)] == ["9", "8"]


def test_a_pick_without_a_table_says_so() -> None:
    kept = DecisionLog(SystemClock())
    kept.add(request("a"), decision())
    assert "without cache or cost data" in kept.find("a")[0].why
