"""The times of a request at vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.inference.vllm.requests import read_times


def test_the_times_are_those_of_vllms_statistics() -> None:
    stats = SimpleNamespace(
        queued_ts=10.0, scheduled_ts=10.5, first_token_ts=12.0, last_token_ts=15.0
    )
    times = WorkerTimes(
        queue_s=0.5,
        prefill_s=1.5,
        decode_s=3.0,
        ahead_requests=3,
        ahead_tokens=50,
        ahead_longest=40,
    )
    assert read_times(stats, (3, 50, 40)) == times
    stats.num_preemptions = 2
    assert read_times(stats, (3, 50, 40)) == replace(times, preemptions=2)


@pytest.mark.parametrize("scheduled", [0.0, None, 13.0])
def test_times_that_vllm_does_not_tell_are_unknown(scheduled: float | None) -> None:
    stats = SimpleNamespace(
        queued_ts=10.0, scheduled_ts=scheduled, first_token_ts=12.0, last_token_ts=15.0
    )
    assert read_times(stats, (0, 0, 0)) is None
    assert read_times(None, (0, 0, 0)) is None
