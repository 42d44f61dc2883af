"""What /metrics says of the views that a process has; everything is asked at scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, get_args

from dynamo.scheduling.index.cache_view import CacheView, Mode
from dynamo.telemetry import Registry

CHANGES: Final = ("stored", "removed")
KINDS: Final = ("event", "dump", "stale", "repaired", "gone", "undecodable")

Views = Callable[[], Iterable[CacheView]]


def declare_view(registry: Registry, views: Views) -> None:
    """Size, trust and events of `views()` together."""
    _declare_sizes(registry, views)
    _declare_events(registry, views)


def _declare_sizes(registry: Registry, views: Views) -> None:
    def modes() -> Mapping[tuple[str, ...], float]:
        counted = Counter(mode for view in views() for mode in view.modes().values())
        return {(mode,): counted[mode] for mode in get_args(Mode)}

    registry.gauge(
        "dynamo_kv_index_blocks",
        "KV blocks that the index knows, by events.",
        callback=lambda: sum(view.index.blocks for view in views()),
    )
    registry.gauge(
        "dynamo_kv_index_bytes",
        "Upper bound of the memory that the index takes; index.budget_bytes bounds it.",
        callback=lambda: sum(view.index.bytes_used for view in views()),
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
        callback=lambda: sum(view.index.evicted for view in views()),
    )


def _declare_events(registry: Registry, views: Views) -> None:
    def heard(kinds: Iterable[str]) -> Mapping[tuple[str, ...], float]:
        found = list(views())
        return {(kind,): sum(view.heard[kind] for view in found) for kind in kinds}

    registry.counter(
        "dynamo_kv_index_blocks_told_total",
        "KV blocks that events told of, by what became of them.",
        ("change",),
        callback=lambda: heard(CHANGES),
    )
    registry.counter(
        "dynamo_kv_index_events_total",
        "KV events heard, by kind: stale is a gap, dump a whole state, gone a worker that left.",
        ("kind",),
        callback=lambda: heard(KINDS),
    )
    registry.counter(
        "dynamo_kv_index_events_lost_total",
        "Events that could not be repaired.",
        callback=lambda: sum(view.lost() for view in views()),
    )
