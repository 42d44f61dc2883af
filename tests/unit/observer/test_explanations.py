"""Explanations of decisions, out of the stories of requests."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.unit.observer.stories import make_attempt, make_story

from dynamo.cli.explain import format_decision
from dynamo.operations.observer.explanations import explain_attempt, routing_record
from dynamo.telemetry.story import Candidate

TABLE = (
    Candidate("w1", 3, 12.5, {"queue": 2.5, "prefill": 10.0}),
    Candidate("w2", 0, 40.0, {"queue": 0.0, "prefill": 40.0}),
)


def explain(**fields: Any) -> Any:
    story = make_story(request_id="abc", model="tiny", wall_s=5.0)
    return explain_attempt(story, "frontend-1", make_attempt(**fields))


def test_a_decision_is_explained_with_every_term_and_its_outcome() -> None:
    explanation = explain(
        costs=TABLE, overlap_blocks=3, prompt_blocks=4, best_overlap_blocks=3, cached_tokens=32
    )
    outcome = explanation["outcome"]
    assert (outcome["cached_tokens"], outcome["ttft_s"]) == (32, 0.05)
    assert tuple(explanation["costs"]) == TABLE
    assert explanation["router"] == "frontend-1"
    assert explanation["why"] == (
        "w1 of 2 workers, cost 12.5, the next best w2 40, it holds 3 of the prompt's 4 blocks"
    )


def test_a_decision_without_a_cost_table_says_so() -> None:
    assert "without cache or cost data" in explain()["why"]


def test_blocks_in_memory_tiers_are_explained() -> None:
    table = (
        Candidate("w1", 3, 9.0, {"queue": 2.0, "load": 7.0}, tier_blocks={"host": 2}),
        TABLE[1],
    )
    explanation = explain(costs=table, overlap_blocks=3, prompt_blocks=4)
    assert explanation["why"].endswith(
        "it holds 3 of the prompt's 4 blocks, of these 2 in tier host"
    )
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
    explanation = explain(worker="w1/0", prefill_worker="p1/1", costs=rows)
    assert "its prompt computed by p1/1, cost 7, the next best p1/0 5" in explanation["why"]
    shown = format_decision(msgspec.json.decode(msgspec.json.encode(explanation)))
    first, second = (line.split() for line in shown.splitlines()[-2:])
    assert first[:3] == ["p1/0", ">", "w1/0"]
    assert second[:4] == ["->", "p1/1", ">", "w1/0"]


def test_requests_of_clients_and_of_draining_workers_are_no_failures() -> None:
    failed = [
        routing_record(make_story(), make_attempt(error=error)).failed
        for error in ("", "cancelled", "worker_leaving", "worker_failed")
    ]
    assert failed == [False, False, False, True]
