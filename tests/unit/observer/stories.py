"""Stories for tests of the observer."""

from __future__ import annotations

from typing import Any

from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.telemetry.story import AttemptFacts, EndedStory


def make_attempt(**fields: Any) -> AttemptFacts:
    """Return an attempt at w1: placed after 1 ms, first token after 51 ms, end after 151 ms."""
    values: dict[str, Any] = dict.fromkeys(AttemptFacts.__struct_fields__, 0) | {
        "worker": "w1",
        "prefill_worker": "",
        "mode": "kv",
        "view": "exact",
        "candidates": 2,
        "choosing_us": 1_000,
        "placed_us": 1_000,
        "first_us": 51_000,
        "ended_us": 151_000,
        "error": "",
        "reason": "",
        "prompt_tokens": 64,
        "output_tokens": 10,
        "seen_blocks": None,
        "predicted_us": None,
        "harm_weight": None,
        "itl_slo_ms": 0.0,
        "times": WorkerTimes(
            queue_s=0.0, ahead_requests=0, ahead_tokens=0, kv_s=0.0, prefill_s=0.048,
            decode_s=0.1, gap_s=0.01, preemptions=0, recomputed_tokens=0,
        ),
        "costs": (),
        "key": "",
    }  # fmt: skip
    return AttemptFacts(**values | fields)


def make_story(*attempts: AttemptFacts, **fields: Any) -> EndedStory:
    """Return the story of a request that takes 152 ms, with one attempt unless others are given."""
    values: dict[str, Any] = dict.fromkeys(EndedStory.__struct_fields__, 0) | {
        "request_id": "r-1",
        "client_id": "r",
        "trace": "",
        "path": "/v1/chat/completions",
        "model": "m",
        "end": "",
        "wall_s": 1_000.0,
        "read_us": 100,
        "admitting_us": 500,
        "first_us": 51_000,
        "ended_us": 152_000,
        "waited_for": "",
        "choices": 1,
        "prompts": 1,
        "prompt_tokens": 64,
        "output_tokens": 10,
        "attempts": list(attempts or (make_attempt(),)),
        "parent_id": "",
        "trace_flags": None,
        "trace_state": "",
        "options": None,
    }
    return EndedStory(**values | fields)
