"""Merging the routing records of several processes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo.core.errors import ProtocolError
from dynamo.library.routing_collector import RoutingMetricsCollector
from dynamo.scheduling.router.collector.collector import Alert
from dynamo.scheduling.router.collector.report import RoutingRecord
from dynamo.scheduling.router.explain.decision_log import Explanation
from dynamo.scheduling.router.policy import Candidate, Outcome
from dynamo.services.routing_queries import RoutingQueries, build_report, merge_explanations

OUTCOME = Outcome(0.05, 0.5, 32, 64, 10)
COSTS = (Candidate("w1", 3, 12.5, {"queue": 12.5}),)


def explanation(router: str, at: float, worker: str = "w1", choice: int = 0) -> Explanation:
    """Return an explanation with costs from routers and with the outcome from frontends."""
    is_router = router.startswith("router")
    return Explanation(
        request_id="r",
        choice=choice,
        model="tiny",
        at=at,
        router=router,
        worker=worker,
        mode="predicted",
        view="exact",
        candidates=2,
        waited_ms=0.0,
        prompt_blocks=4,
        overlap_blocks=3,
        best_overlap_blocks=3,
        predicted_ttft_ms=1.0,
        costs=COSTS if is_router else (),
        outcome=None if is_router else OUTCOME,
        why="decided" if is_router else "queried",
    )


def test_a_routers_costs_and_a_frontends_outcome_are_one_explanation() -> None:
    (merged,) = merge_explanations([explanation("frontend-1", 1.01), explanation("router-1", 1.0)])
    assert (merged.router, merged.costs, merged.outcome, merged.why) == (
        "router-1",
        COSTS,
        OUTCOME,
        "decided",
    )


def test_attempts_and_choices_are_separate_and_in_order() -> None:
    merged = merge_explanations(
        [
            explanation("frontend-1", 3.0, "w2"),
            explanation("frontend-1", 1.0),
            explanation("frontend-1", 2.0),
            explanation("frontend-1", 2.5, choice=1),
        ]
    )
    assert [(entry.at, entry.worker, entry.choice) for entry in merged] == [
        (1.0, "w1", 0),
        (2.0, "w1", 0),
        (2.5, "w1", 1),
        (3.0, "w2", 0),
    ]


async def test_a_query_of_another_version_is_refused_without_a_traceback() -> None:
    nothing: Any = None
    payload = msgspec.msgpack.encode({"type": "samples", "since": 0.0})
    with pytest.raises(ProtocolError, match="is not a query"):
        await RoutingQueries(nothing, nothing)._handle_query(payload, nothing)


def test_a_report_covers_the_records_of_all_processes() -> None:
    def record(at: float, worker: str) -> RoutingRecord:
        return RoutingRecord(
            timestamp=at,
            request_id="r",
            selected_worker=worker,
            cache_hit_ratio=0.5,
            decision_latency=0.0,
            worker_load=0.0,
            queue_length=0,
        )

    collector = RoutingMetricsCollector(wall=lambda: 10.0)
    collector._alerts["failures"] = Alert("failures", "many", 1.0, 0.1, 5.0)
    report = build_report([record(3.0, "b"), record(1.0, "a")], collector, (0.0, 10.0))
    assert report.raw_data_summary["by_worker"] == {"a": 1, "b": 1}
    assert report.raw_data_summary["first"] == 1.0
    assert [alert.name for alert in report.alerts] == ["failures"]
