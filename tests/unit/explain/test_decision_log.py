"""The log of the last decisions."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.cli.explain import format_decision
from dynamo.core.clock import SystemClock
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.explain.decision_log import DecisionLog, Explanation
from dynamo.scheduling.router.policy import Candidate, Decision, Outcome
from dynamo.scheduling.workers.prompt import Prompt


def request(name: str, choice: int = 0) -> GenerateRequest:
    return GenerateRequest(name, "tiny", b"", SamplingParams(), StopConditions(), choice=choice)


def decision(worker: str = "w1", **fields: Any) -> Decision:
    instance = Instance(worker, "tcp://", "dynamo", "worker", "generate")
    return Decision(instance, "kv", 2, **fields)


OUTCOME = Outcome(0.05, 0.5, 32, 64, 10)
TABLE = (
    Candidate("w1", 3, 12.5, {"queue": 2.5, "prefill": 10.0}),
    Candidate("w2", 0, 40.0, {"queue": 0.0, "prefill": 40.0}),
)


def test_a_decision_is_found_with_every_term_and_its_outcome() -> None:
    log = DecisionLog(SystemClock(), "frontend-1")
    decided = decision(
        cost_table=lambda: TABLE,
        overlap_blocks=3,
        prompt_blocks=4,
        best_overlap_blocks=3,
        prompt=Prompt(0, ()),
    )
    entry = log.add(request("abc"), decided)
    assert log.find("abc")[0].outcome is None
    entry.set_outcome(OUTCOME)
    (explanation,) = log.find("abc")
    assert explanation.outcome == OUTCOME
    assert explanation.costs == TABLE
    assert explanation.router == "frontend-1"
    assert explanation.why == (
        "w1 of 2 workers, cost 12.5, the next best w2 40, it holds 3 of the prompt's 4 blocks"
    )
    again = msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation)
    assert again == explanation


def test_choices_and_attempts_of_a_request_are_found_together() -> None:
    log = DecisionLog(SystemClock())
    for choice in range(2):
        log.add(request("abc", choice), decision())
    log.add(request("abc", 1), decision("w2"))
    assert [(entry.choice, entry.worker) for entry in log.find("abc")] == [
        (0, "w1"),
        (1, "w1"),
        (1, "w2"),
    ]


def test_a_clients_own_id_finds_its_last_request() -> None:
    log = DecisionLog(SystemClock())
    for name in ("mine-1", "mine-2.0", "mine-2.1", "mine-two-3", "mine"):
        log.add(request(name), decision())
    assert [entry.request_id for entry in log.find("mine")] == ["mine"]
    log = DecisionLog(SystemClock())
    for name in ("mine-1", "mine-2.0", "mine-2.1", "mine-two-3"):
        log.add(request(name), decision())
    assert [entry.request_id for entry in log.find("mine")] == ["mine-2.0", "mine-2.1"]
    assert log.find("min") == []


def test_the_log_is_bounded() -> None:
    log = DecisionLog(SystemClock(), max_entries=3)
    for number in range(10):
        log.add(request(str(number)), decision())
    assert log.find("6") == []
    assert [entry.request_id for entry in log.latest(2)] == ["9", "8"]


def test_a_decision_without_a_cost_table_says_so() -> None:
    log = DecisionLog(SystemClock())
    log.add(request("a"), decision())
    assert "without cache or cost data" in log.find("a")[0].why


def test_blocks_in_memory_tiers_are_explained() -> None:
    table = (
        Candidate("w1", 3, 9.0, {"queue": 2.0, "load": 7.0}, tier_blocks={"host": 2}),
        TABLE[1],
    )
    log = DecisionLog(SystemClock())
    log.add(request("abc"), decision(cost_table=lambda: table, overlap_blocks=3, prompt_blocks=4))
    (explanation,) = log.find("abc")
    assert explanation.why.endswith("it holds 3 of the prompt's 4 blocks, of these 2 in tier host")
    shown = format_decision(msgspec.json.decode(msgspec.json.encode(explanation)))
    header, first, second = (line.split() for line in shown.splitlines()[-3:])
    assert header[-2:] == ["QUEUE", "LOAD"]
    assert first == ["->", "w1", "1", "+", "2", "host", "9.00", "2.00", "7.00"]
    assert second == ["w2", "0", "40.00", "0.00", "0.00"]


def test_the_rank_that_computes_the_prompt_is_marked_with_its_cost() -> None:
    rows = [
        Candidate(f"p1/{rank}", 0, cost, {"queue": cost}, decode_worker="w1/0")
        for rank, cost in ((0, 5.0), (1, 7.0))
    ]
    log = DecisionLog(SystemClock())
    prefill = Instance("p1", "tcp://", "dynamo", "worker", "prefill")
    decided = decision(rank=0, prefill=prefill, prefill_rank=1, cost_table=lambda: rows)
    log.add(request("abc"), decided)
    (explanation,) = log.find("abc")
    assert explanation.prefill == "p1/1"
    assert "its prompt computed by p1/1, cost 7, the next best p1/0 5" in explanation.why
    shown = format_decision(msgspec.json.decode(msgspec.json.encode(explanation)))
    first, second = (line.split() for line in shown.splitlines()[-2:])
    assert first[:3] == ["p1/0", ">", "w1/0"]
    assert second[:4] == ["->", "p1/1", ">", "w1/0"]
