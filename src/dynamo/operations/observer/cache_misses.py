"""Why the prompt of a request was not in the cache of its worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.operations.observer.stages import slowest_attempts
from dynamo.telemetry.story import AttemptFacts, EndedStory

GIVEN_UP_S = 0.1
"""A wait for KV blocks after which the prompt was computed all the same."""
Marks = Mapping[tuple[str, int], deque[tuple[int, str, float]]]


class CacheMiss(NamedTuple):
    """Why a prompt was not in the cache of its worker. `share`: the part of it that was there
    before, or elsewhere."""

    name: str
    reason: str
    share: float = 0.0


def explain_misses(story: EndedStory, marks: Marks) -> CacheMiss | None:
    """Return why the prompt was not in the cache of its worker; None where it was."""
    attempts = slowest_attempts(story)
    if not attempts:
        return None
    first = attempts[0]
    if not first.prompt_tokens or first.cached_tokens * 2 >= first.prompt_tokens:
        return None
    blocks, held = first.prompt_blocks, first.overlap_blocks
    uncached = 1 - first.cached_tokens / first.prompt_tokens
    cached_blocks = blocks * first.cached_tokens // first.prompt_tokens
    times = first.times or WorkerTimes()
    waited_s = (times.kv_s or 0.0) - (times.peer_queue_s or 0.0) - (times.peer_prefill_s or 0.0)
    if times.kv_from and waited_s >= GIVEN_UP_S:
        source, name = f"its tier {times.kv_from}", "slow tier"
        if times.kv_from == "peer":
            source, name = first.prefill_worker or "another worker", "slow transfer"
        return CacheMiss(name, f"{source} had not sent the blocks after {waited_s:.2g} s", uncached)
    gone_blocks = held - cached_blocks
    seen_blocks = first.seen_blocks or 0
    if gone_blocks > blocks // 4:
        name, text = _explain_gone(first)
        return CacheMiss(name, text, max(held, seen_blocks) / blocks - cached_blocks / blocks)
    if first.best_overlap_blocks - held > blocks // 4:
        text = f"another worker held {first.best_overlap_blocks} of {blocks} blocks"
        return CacheMiss("at another worker", text, (first.best_overlap_blocks - held) / blocks)
    if seen_blocks - cached_blocks > blocks // 4:
        text = f"{seen_blocks} of {blocks} blocks were seen before and are evicted"
        return CacheMiss("eviction", text, (seen_blocks - cached_blocks) / blocks)
    known_marks = marks.get((story.model, story.prompt_mark), ())
    earlier = [entry for entry in known_marks if entry[2] < story.wall_s]
    if earlier and all(entry[0] != story.salt_mark for entry in earlier):
        text = "the same prompt was seen with another salt, key or adapter"
        return CacheMiss("wrong salt", text, uncached)
    same = [entry for entry in earlier if entry[0] == story.salt_mark]
    if same and not blocks:  # the router did not look at blocks
        if all(entry[1] != first.worker for entry in same):
            text = f"{same[-1][1]} has computed a prompt that begins like it"
            return CacheMiss("at another worker", text, uncached)
        return CacheMiss("eviction", "a prompt that begins like it is evicted there", uncached)
    return CacheMiss("new prompt", "it was never seen before")


def _explain_gone(attempt: AttemptFacts) -> tuple[str, str]:
    """Return why blocks were not there that the router had expected."""
    held, blocks = attempt.overlap_blocks, attempt.prompt_blocks
    chosen = next((row for row in attempt.cost_table() if row.worker == attempt.worker), None)
    tiers = {} if chosen is None else chosen.tier_blocks
    if sum(tiers.values()) > blocks // 4:
        return (
            "slow tier",
            f"{held} of {blocks} blocks did not come from its tier {', '.join(tiers)}",
        )
    if attempt.view == "exact" and attempt.load:
        return "eviction", f"{held} of {blocks} blocks were there, and others took their place"
    known = f", known as {attempt.view}" if attempt.view not in ("", "exact") else ""
    text = f"the index expected {held} of {blocks} blocks there{known}, and they were gone"
    return "stale index", text
