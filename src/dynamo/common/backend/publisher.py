"""Where KV events of a user's engine come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ZmqSource:
    """The engine publishes events at a ZMQ address."""

    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass(frozen=True)
class PushSource:
    """The engine gets a publisher by `on_ready`, and calls it."""

    on_ready: Callable[[Any], None]
    dp_rank: int = 0


@dataclass
class ComponentSnapshot:
    """The state of an engine's KV cache."""

    kv_used_blocks: int
    kv_total_blocks: int
    gpu_cache_usage: float
    dp_rank: int
    kv_cache_hit_rate: float | None = None


KvEventSource = ZmqSource | PushSource
