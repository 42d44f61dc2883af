"""Metrics of a worker's engine. All values are read when /metrics is requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

from dynamo.core.errors import TransferFailure
from dynamo.core.reply import Engine, EngineRank
from dynamo.inference.kv_source import ArrivalCounters
from dynamo.telemetry.metrics import Registry

if TYPE_CHECKING:
    from dynamo.inference.engine import BatchedEngine

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
FAILURES: Sequence[str] = get_args(TransferFailure)


def declare_worker_metrics(registry: Registry, engine: Engine) -> None:
    """Declare gauges of the present load and, if the engine counts them, its totals."""

    def gauge(name: str, text: str, *, of: str) -> None:
        registry.gauge(name, text, callback=lambda: getattr(engine.report_load(), of))

    gauge("dynamo_worker_running_requests", "Requests in the batch.", of="running")
    gauge(
        "dynamo_worker_waiting_requests",
        "Requests that wait for a slot in the batch.",
        of="waiting",
    )
    gauge(
        "dynamo_worker_prefill_tokens", "Prompt tokens still to be computed.", of="prefill_tokens"
    )
    gauge("dynamo_worker_active_blocks", "KV blocks that requests use.", of="active_blocks")
    gauge("dynamo_worker_blocks", "KV blocks in total.", of="total_blocks")
    gauge(
        "dynamo_worker_cached_blocks",
        "KV blocks in the prefix cache, in use or not.",
        of="cached_blocks",
    )
    registry.counter(
        "dynamo_worker_steps_total", "Steps computed.", callback=lambda: engine.report_load().steps
    )
    if engine.totals() is not None:
        _declare_engine_totals(registry, engine)
    declare_kv_view_metrics(registry, engine.ranks)
    _declare_step_metrics(registry, engine.ranks)


def _declare_engine_totals(registry: Registry, engine: Engine) -> None:
    """Declare the totals since the engine's start."""

    def counter(name: str, text: str, *, of: str) -> None:
        registry.counter(name, text, callback=lambda: getattr(engine.totals(), of))

    counter("dynamo_worker_requests_total", "Requests that the engine has accepted.", of="requests")
    counter(
        "dynamo_worker_prompt_tokens_total",
        "Prompt tokens of the accepted requests.",
        of="prompt_tokens",
    )
    counter(
        "dynamo_worker_cached_tokens_total",
        "Prompt tokens found in the prefix cache at admission.",
        of="cached_tokens",
    )
    counter("dynamo_worker_generated_tokens_total", "Tokens generated.", of="generated_tokens")
    counter(
        "dynamo_worker_preemptions_total",
        "Requests preempted because too few blocks were free.",
        of="preemptions",
    )
    counter(
        "dynamo_worker_evicted_blocks_total",
        "Cached blocks evicted to make room for others.",
        of="evicted_blocks",
    )


def _declare_step_metrics(registry: Registry, ranks: Sequence[EngineRank]) -> None:
    batch = registry.histogram("dynamo_worker_batch_requests", "Requests of a step.", BATCH_BUCKETS)
    duration = registry.histogram("dynamo_worker_step_seconds", "Time of a step.", STEP_BUCKETS_S)

    def on_step(requests: int, seconds: float) -> None:
        batch.observe(requests)
        duration.observe(seconds)

    for rank in ranks:
        rank.on_step = on_step


def declare_kv_view_metrics(registry: Registry, ranks: Sequence[EngineRank]) -> None:
    """Declare a counter of what became of KV events that are read from a foreign engine."""

    def counts() -> Counter[tuple[str, ...]]:
        total: Counter[tuple[str, ...]] = Counter()
        for rank in ranks:
            total.update(rank.kv_counts)
        return total

    registry.counter(
        "dynamo_worker_kv_view_total",
        "KV events of a foreign engine: its messages and the repairs of the view, blocks that are "
        "not used or held several times, and checks of predictions by cached tokens.",
        ("subject", "kind"),
        callback=counts,
    )


def declare_disaggregation_metrics(
    registry: Registry, engines: Sequence[BatchedEngine], block_bytes: int
) -> None:
    """Declare the metrics of prompts that other workers compute for these `engines`, and of those
    that the engines compute for others. A block has `block_bytes` of memory."""
    counters = [engine.arrivals.counters for engine in engines]
    registry.gauge(
        "dynamo_worker_arriving_requests",
        "Requests that wait for KV blocks from another worker.",
        callback=lambda: sum(len(engine.scheduler.arriving) for engine in engines),
    )
    registry.gauge(
        "dynamo_worker_held_requests",
        "Prompts computed for other workers that still pull their blocks.",
        callback=lambda: sum(call.holds for engine in engines for call in engine.prefill_calls),
    )
    declare_remote_prompt_metrics(registry, lambda: counters)
    registry.counter(
        "dynamo_worker_moved_requests_total",
        "Running requests whose blocks came here from the draining worker that they left.",
        callback=lambda: sum(counter.moved for counter in counters),
    )
    registry.counter(
        "dynamo_worker_kv_bytes_total",
        "Bytes of KV of remote prompts: moved from another worker, or saved by the own cache.",
        ("way",),
        callback=lambda: {
            ("moved",): block_bytes * sum(counter.blocks_arrived for counter in counters),
            ("saved",): block_bytes * sum(counter.blocks_saved for counter in counters),
        },
    )


def declare_remote_prompt_metrics(
    registry: Registry, read_counters: Callable[[], Sequence[ArrivalCounters]]
) -> None:
    """Declare the metrics of prompts that other workers compute for this one."""
    registry.counter(
        "dynamo_worker_remote_prompts_total",
        "Prompts that another worker was asked to compute.",
        callback=lambda: sum(counters.prompts for counters in read_counters()),
    )
    registry.counter(
        "dynamo_worker_kv_wait_seconds_total",
        "Seconds that requests waited for KV blocks from another worker.",
        callback=lambda: sum(counters.wait_s for counters in read_counters()),
    )
    registry.counter(
        "dynamo_worker_prefill_fallbacks_total",
        "Remote prompts whose rest was computed here because the other worker failed.",
        ("reason",),
        callback=lambda: {
            (reason,): float(sum(counters.fallbacks[reason] for counters in read_counters()))
            for reason in dict.fromkeys(
                (*FAILURES, *(name for each in read_counters() for name in each.fallbacks))
            )
        },
    )
