"""The thresholds by which a prompt goes to a prefill worker."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.scheduling.router import DisaggregationRouter, QueueStatus


def request(tokens: int, cached: int = 0) -> SimpleNamespace:
    return SimpleNamespace(input_ids=[0] * tokens, prefix_hit_length=cached)


@pytest.mark.parametrize(
    ("tokens", "cached", "pending", "expected"),
    [(513, 0, 9, True), (512, 0, 0, False), (600, 88, 0, False), (5_000, 0, 10, False)],
)
def test_uncached_tokens_and_pending_prompts_decide(
    tokens: int, cached: int, pending: int, expected: bool
) -> None:
    router = DisaggregationRouter()
    assert router.should_disaggregate(request(tokens, cached), QueueStatus(pending)) is expected


def test_thresholds_and_the_source_of_hits_can_be_set(caplog: pytest.LogCaptureFixture) -> None:
    config = DisaggregationSettings(prefill_length_threshold=10, queue_size_threshold=1)
    router = DisaggregationRouter(config, hit_length=lambda _: 5)
    with caplog.at_level(logging.INFO):
        assert not router.should_disaggregate(request(15), QueueStatus())
        assert router.should_disaggregate(request(16), QueueStatus())

    assert caplog.records[-1].fields == {  # type: ignore[attr-defined]
        "disaggregate": True,
        "effective_prefill_length": 11,
        "queue_pending": 0,
        "prefix_hit_length": 5,
    }
