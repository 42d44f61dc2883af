"""Stories for people and programs, as JSON has them. Times are in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from dynamo.operations.observer.cache_misses import CacheMiss
from dynamo.operations.observer.stages import StageTime, find_stages, slowest_attempts
from dynamo.operations.observer.stories import KeptStory
from dynamo.operations.observer.verdict import RequestVerdict
from dynamo.telemetry.story import AttemptFacts


def show_story(
    entry: KeptStory, verdict: RequestVerdict, missed: CacheMiss | None
) -> Mapping[str, Any]:
    """Return all that is known of a request. `missed`: why the rest of the prompt was not cached.
    `attempts` are those of the choice that ended last."""
    story, attempts = entry.story, slowest_attempts(entry.story)
    return {
        "request_id": story.request_id,
        "client_id": story.client_id,
        "trace_id": story.trace,
        "path": story.path,
        "model": story.model,
        "process": entry.process,
        "at": story.wall_s,
        "seconds": story.ended_us / 1e6,
        "ttft": _seconds(story.first_us),
        "longest_gap": story.gap_us / 1e6,
        "prompt_tokens": story.prompt_tokens,
        "cached_tokens": story.cached_tokens,
        "output_tokens": story.output_tokens,
        "missed": "" if missed is None else f"{missed.name}: {missed.reason}",
        "end": story.end,
        "verdict": verdict.text,
        "causes": verdict.causes,
        "stages": [_show_stage(stage, attempts) for stage in find_stages(story)],
        "attempts": [_show_attempt(each) for each in attempts],
    }


def show_slow(entry: KeptStory, verdict: RequestVerdict) -> Mapping[str, Any]:
    """Return a request that took long as a row of a list."""
    story, attempts = entry.story, slowest_attempts(entry.story)
    return {
        "request_id": story.request_id,
        "client_id": story.client_id,
        "at": story.wall_s,
        "seconds": story.ended_us / 1e6,
        "ttft": _seconds(story.first_us),
        "worker": attempts[-1].worker if attempts else "",
        "end": story.end,
        "verdict": verdict.text,
    }


def _show_stage(stage: StageTime, attempts: Sequence[AttemptFacts]) -> Mapping[str, Any]:
    worker = ""
    if stage.attempt is not None and stage.name not in ("place", "deliver"):
        worker = attempts[stage.attempt].worker
    return {
        "stage": stage.name,
        "at": stage.began_us / 1e6,
        "seconds": stage.us / 1e6,
        "attempt": stage.attempt,
        "worker": worker,
    }


def _show_attempt(facts: AttemptFacts) -> Mapping[str, Any]:
    """Return an attempt. `times` are its worker's (`WorkerTimes`). None: nobody knows."""
    return {
        "worker": facts.worker,
        "prefill_worker": facts.prefill_worker,
        "at": facts.placed_us / 1e6,
        "first_token": _seconds(facts.first_us),
        "seconds": (facts.ended_us - facts.placed_us) / 1e6,
        "error": facts.error or None,
        "reason": facts.reason,
        "resumed_tokens": facts.resumed,
        "cached_tokens": facts.cached_tokens,
        "prompt_tokens": facts.prompt_tokens,
        "predicted_ttft": _seconds(facts.predicted_us),
        "times": {} if facts.times is None else asdict(facts.times),
    }


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1e6
