"""Metrics of the cache views of a process, computed at scrape time."""

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
    """Declare size, mode and event metrics, each summed over `views()`."""
    _declare_size_metrics(registry, views)
    _declare_event_metrics(registry, views)


def _declare_size_metrics(registry: Registry, views: CacheViewSource) -> None:
    def modes() -> Mapping[tuple[str, ...], float]:
        counted = Counter(mode for view in views() for mode in view.get_modes().values())
        return {(mode,): counted[mode] for mode in get_args(CacheViewMode)}

    registry.gauge(
        "dynamo_kv_index_blocks",
        "KV blocks that the index knows from events.",
        callback=lambda: sum(view.tiers.block_count for view in views()),
    )
    registry.gauge(
        "dynamo_kv_index_bytes",
        "Upper bound of the memory of the index, limited by index.budget_bytes.",
        callback=lambda: sum(view.tiers.bytes_used for view in views()),
    )
    registry.gauge(
        "dynamo_kv_index_predicted_blocks",
        "KV blocks predicted from routed prompts.",
        callback=lambda: sum(view.predicted_blocks for view in views()),
    )
    registry.gauge(
        "dynamo_kv_index_workers",
        "Workers by the mode of their cache view: exact, stale (a gap is being repaired), "
        "approximate (predictions only), no prefix cache.",
        ("mode",),
        callback=modes,
    )
    registry.counter(
        "dynamo_kv_index_forgotten_blocks_total",
        "KV blocks evicted to stay within index.budget_bytes.",
        callback=lambda: sum(view.tiers.evicted_blocks for view in views()),
    )


def _declare_event_metrics(registry: Registry, views: CacheViewSource) -> None:
    def count_events(kinds: Iterable[str]) -> Mapping[tuple[str, ...], float]:
        present = list(views())
        return {(kind,): sum(view.event_counts[kind] for view in present) for kind in kinds}

    registry.counter(
        "dynamo_kv_index_blocks_told_total",
        "KV blocks in received events, by change.",
        ("change",),
        callback=lambda: count_events(BLOCK_CHANGES),
    )
    registry.counter(
        "dynamo_kv_index_events_total",
        "KV events received, by kind: stale marks a gap, dump a full state, gone a removed worker.",
        ("kind",),
        callback=lambda: count_events(EVENT_KINDS),
    )
    registry.counter(
        "dynamo_kv_index_events_lost_total",
        "Events that were lost and could not be repaired.",
        callback=lambda: sum(view.count_lost_events() for view in views()),
    )
