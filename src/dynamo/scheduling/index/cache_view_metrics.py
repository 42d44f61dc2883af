"""What /metrics says of the views that a process has; everything is asked at scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, get_args

from dynamo.scheduling.index.cache_view import CacheView, CacheViewMode
from dynamo.telemetry import Registry

BLOCK_CHANGES: Final = ("stored", "removed")
EVENT_KINDS: Final = ("event", "dump", "stale", "repaired", "gone", "undecodable")

CacheViewSource = Callable[[], Iterable[CacheView]]


def declare_cache_view_metrics(registry: Registry, views: CacheViewSource) -> None:
    """Size, trust and events of `views()` together."""
    _declare_size_metrics(registry, views)
    _declare_event_metrics(registry, views)


def _declare_size_metrics(registry: Registry, views: CacheViewSource) -> None:
    def modes() -> Mapping[tuple[str, ...], float]:
        counted = Counter(mode for view in views() for mode in view.get_modes().values())
        return {(mode,): counted[mode] for mode in get_args(CacheViewMode)}

    registry.gauge(
        "dynamo_kv_index_blocks",
        "KV blocks that the index knows, by events.",
        callback=lambda: sum(view.device_index.block_count for view in views()),
    )
    registry.gauge(
        "dynamo_kv_index_bytes",
        "Upper bound of the memory that the index takes; index.budget_bytes bounds it.",
        callback=lambda: sum(view.device_index.bytes_used for view in views()),
    )
    registry.gauge(
        "dynamo_kv_index_predicted_blocks",
        "KV blocks that are predicted, because prompts were routed there.",
        callback=lambda: sum(view.predicted_blocks for view in views()),
    )
    registry.gauge(
        "dynamo_kv_index_workers",
        "Workers by how their cache is known: exact, stale (a gap is being repaired), approximate, "
        "no prefix cache.",
        ("mode",),
        callback=modes,
    )
    registry.counter(
        "dynamo_kv_index_forgotten_blocks_total",
        "KV blocks forgotten for want of memory (index.budget_bytes).",
        callback=lambda: sum(view.device_index.evicted_blocks for view in views()),
    )


def _declare_event_metrics(registry: Registry, views: CacheViewSource) -> None:
    def heard(kinds: Iterable[str]) -> Mapping[tuple[str, ...], float]:
        found = list(views())
        return {(kind,): sum(view.event_counts[kind] for view in found) for kind in kinds}

    registry.counter(
        "dynamo_kv_index_blocks_told_total",
        "KV blocks that events told of, by what became of them.",
        ("change",),
        callback=lambda: heard(BLOCK_CHANGES),
    )
    registry.counter(
        "dynamo_kv_index_events_total",
        "KV events heard, by kind: stale is a gap, dump a whole state, gone a worker that left.",
        ("kind",),
        callback=lambda: heard(EVENT_KINDS),
    )
    registry.counter(
        "dynamo_kv_index_events_lost_total",
        "Events that could not be repaired.",
        callback=lambda: sum(view.count_lost_events() for view in views()),
    )
