"""Routing decisions in a readable form, out of the stories of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.core.errors import WorkerDraining
from dynamo.scheduling.index.cache_view import NO_PREFIX_CACHE
from dynamo.scheduling.router.collector.report import RoutingRecord
from dynamo.telemetry.story import AttemptFacts, EndedStory

MIN_SHOWN_WAIT_US = 1_000
NOT_FAILURES = ("", "cancelled", WorkerDraining.code)
"""Error codes that do not count as failures. A draining worker's request continues elsewhere."""
FALLBACK_BLOCK_TOKENS = 16
"""Block size for prompts whose blocks the policy did not look at."""


SHOWN_FACTS = (
    "choice", "worker", "mode", "view", "candidates", "prompt_blocks", "overlap_blocks",
    "best_overlap_blocks", "harm_weight", "itl_slo_ms",
)  # fmt: skip
"""Facts of an attempt that an explanation has as they are. `harm_weight` is the price of a pause
for answers, if it is steered by the target `itl_slo_ms`."""


def explain_attempt(story: EndedStory, router: str, facts: AttemptFacts) -> Mapping[str, Any]:
    """Return a decision of the process `router` in a readable form, as JSON has it.

    `at` is its Unix time, `prefill` the worker that computes the prompt, if another one. `costs`
    are the candidates with every term of their cost, best first; empty where not kept. `why` is a
    sentence. In `outcome`, `ttft_s` counts from the router and is None without a token, `error` is
    "" after success or a client that read enough, and `load` counts the requests before this one.
    """
    predicted = facts.predicted_us
    outcome = {
        "ttft_s": _ttft_s(facts),
        "duration_s": (facts.ended_us - facts.placed_us) / 1e6,
        "cached_tokens": facts.cached_tokens,
        "prompt_tokens": facts.prompt_tokens,
        "output_tokens": facts.output_tokens,
        "error": facts.error,
        "load": facts.load,
    }
    shown = {
        "request_id": story.request_id,
        "model": story.model,
        "at": story.wall_s + facts.placed_us / 1e6,
        "router": router,
        **{name: getattr(facts, name) for name in SHOWN_FACTS},
        "prefill": facts.prefill_worker,
        "waited_ms": facts.waited_us / 1e3,
        "predicted_ttft_ms": None if predicted is None else predicted / 1e3,
        "costs": facts.cost_table(),
        "outcome": outcome,
    }
    shown["why"] = describe_decision(facts)
    return shown


def routing_record(story: EndedStory, facts: AttemptFacts) -> RoutingRecord:
    """Return an attempt as a record for the collector."""
    blocks, tokens = facts.prompt_blocks, facts.prompt_tokens
    cached = facts.cached_tokens / tokens if tokens else 0.0
    seen, predicted = facts.seen_blocks, facts.predicted_us
    return RoutingRecord(
        story.wall_s + facts.ended_us / 1e6,
        story.request_id,
        facts.worker,
        cache_hit_ratio=facts.overlap_blocks / blocks if blocks else cached,
        decision_latency=facts.waited_us / 1e6,
        worker_load=facts.load,
        queue_length=facts.queue_length,
        prompt_blocks=blocks or tokens // FALLBACK_BLOCK_TOKENS,
        reachable_ratio=facts.best_overlap_blocks / blocks if blocks else None,
        seen_ratio=seen / blocks if blocks and seen is not None else None,
        achieved_ratio=cached,
        view=facts.view,
        ttft_s=_ttft_s(facts),
        predicted_ttft_s=None if predicted is None else predicted / 1e6,
        output_tokens=facts.output_tokens,
        failed=facts.error not in NOT_FAILURES,
    )


def _ttft_s(facts: AttemptFacts) -> float | None:
    return None if facts.first_us is None else (facts.first_us - facts.placed_us) / 1e6


def describe_decision(facts: AttemptFacts) -> str:
    """Return a decision as a sentence."""
    worker, prefill, table = facts.worker, facts.prefill_worker, facts.cost_table()
    candidates = f"of {facts.candidates} worker" + ("s" if facts.candidates != 1 else "")
    if not table and not facts.prompt_blocks:
        pair = f", and {prefill} for its prompt" if prefill else ""
        return f"{facts.mode} chose {worker} {candidates}{pair}, without cache or cost data"
    parts = [f"{worker} {candidates}"]
    if prefill:
        parts.append(f"its prompt computed by {prefill}")
    # A row of a pair's table is the worker that computes the prompt.
    chosen = next((row for row in table if row.worker == (prefill or worker)), None)
    if chosen is not None:
        parts.append(f"cost {chosen.cost:.4g}")
        others = [row for row in table if row is not chosen]
        if others:
            parts.append(f"the next best {others[0].worker} {others[0].cost:.4g}")
    if facts.view == NO_PREFIX_CACHE:
        parts.append("it has no prefix cache")
    elif facts.prompt_blocks:
        held, total = facts.overlap_blocks, facts.prompt_blocks
        parts.append(f"it holds {held} of the prompt's {total} blocks")
        if chosen is not None and chosen.tier_blocks:
            tiers = (f"{count} in tier {tier}" for tier, count in chosen.tier_blocks.items())
            parts.append(f"of these {' and '.join(tiers)}")
        if facts.best_overlap_blocks > held:
            parts.append(f"another holds {facts.best_overlap_blocks}")
    if facts.waited_us >= MIN_SHOWN_WAIT_US:
        parts.append(f"after {facts.waited_us / 1e3:.0f} ms in the router")
    if facts.view and facts.view not in {"exact", NO_PREFIX_CACHE}:
        parts.append(f"its cache is known only as {facts.view}")
    return ", ".join(parts)
