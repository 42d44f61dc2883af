"""What a worker's /metrics says of its engine; everything is asked at scrape."""

from __future__ import annotations

from dynamo.core.reply import Engine
from dynamo.inference.engine import BatchedEngine
from dynamo.telemetry.metrics import Registry


def declare_worker_metrics(registry: Registry, engine: Engine) -> None:
    """Gauges of the present load; for our own engines totals, too."""
    gauge, load = registry.gauge, engine.report_load
    gauge(
        "dynamo_worker_running_requests",
        "Requests in the batch.",
        callback=lambda: load().running,
    )
    gauge(
        "dynamo_worker_waiting_requests",
        "Requests that wait for a place in the batch.",
        callback=lambda: load().waiting,
    )
    gauge(
        "dynamo_worker_prefill_tokens",
        "Prompt tokens still to be computed.",
        callback=lambda: load().prefill_tokens,
    )
    gauge(
        "dynamo_worker_active_blocks",
        "KV blocks that requests use.",
        callback=lambda: load().active_blocks,
    )
    gauge("dynamo_worker_blocks", "KV blocks in all.", callback=lambda: load().total_blocks)
    registry.counter("dynamo_worker_steps_total", "Steps computed.", callback=lambda: load().steps)
    if isinstance(engine, BatchedEngine):
        declare_engine_totals(registry, engine)


def declare_engine_totals(registry: Registry, engine: BatchedEngine) -> None:
    """Totals since the engine's start."""
    counter, counters = registry.counter, engine.counters
    counter(
        "dynamo_worker_requests_total",
        "Requests taken.",
        callback=lambda: counters.requests,
    )
    counter(
        "dynamo_worker_prompt_tokens_total",
        "Prompt tokens of the requests taken.",
        callback=lambda: counters.prompt_tokens,
    )
    counter(
        "dynamo_worker_cached_tokens_total",
        "Prompt tokens that the prefix cache held at admission.",
        callback=lambda: counters.cached_tokens,
    )
    counter(
        "dynamo_worker_generated_tokens_total",
        "Tokens generated.",
        callback=lambda: counters.generated_tokens,
    )
    counter(
        "dynamo_worker_preemptions_total",
        "Requests put back for want of blocks.",
        callback=lambda: engine.scheduler.preemptions,
    )
    counter(
        "dynamo_worker_evicted_blocks_total",
        "Cached blocks given up for others.",
        callback=lambda: engine.scheduler.pool.evictions,
    )
    registry.gauge(
        "dynamo_worker_cached_blocks",
        "KV blocks held under a hash, in use or not.",
        callback=lambda: engine.scheduler.pool.cached,
    )
