"""Settings that are accepted and checked, and have no effect yet: those without a field.

Configuration files written for Dynamo contain them. The loader treats them as all other settings:
aliases, units, bounds, notes and help. Their values are in `LoadedSettings.values` only. A setting
that gains an effect moves to its section. Fields with `unused=True` have no effect either; a choice
in a field's `not_yet` has none or is refused (`declare.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from dynamo.core.settings.declare import SettingMeta, SettingSpec, SettingsSection
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.schema_cluster import WorkerGroupSettings


def _row(key: str, default: Any, text: str, *, kind: Any = None, **meta: Any) -> SettingSpec:
    return SettingSpec(key, kind or type(default), default, SettingMeta(text, unused=True, **meta))


def _under(section: str, rows: tuple[SettingSpec, ...]) -> Iterator[SettingSpec]:
    for row in rows:
        yield replace(row, key=f"{section}.{row.key}")


_RESOURCES = (
    _row("cpu", 0.0, "processor cores; `500m` = 0.5", unit="cores", ge=0),
    _row("memory", 0, "memory; 0: no limit", unit="bytes", ge=0),
    _row("gpu", 0, "accelerators", ge=0, aliases=(".nvidia.com/gpu",)),
)
_CACHE_POLICY = _row("cache_policy", "lru", "which block is evicted first", choices=("lru",))
_WORKER_GROUP = (
    *_under("resources", _RESOURCES),
    *_under("kv_cache", (_CACHE_POLICY,)),
)

NO_EFFECT: Mapping[type[SettingsSection], tuple[SettingSpec, ...]] = {
    Settings: (
        _row("frontend.router_endpoint", "", "URL of a separate router; empty: in the frontend"),
        *_under("frontend.resources", _RESOURCES),
        *_under("router.resources", _RESOURCES),
        *_under("cache", (_CACHE_POLICY,)),
        *_under("workers.prefill", _WORKER_GROUP),
        *_under("workers.decode", _WORKER_GROUP),
        _row("messaging.nats.cluster_name", "", "name of the NATS cluster"),
        _row("monitoring.grafana.enabled", False, "run a Grafana"),
        _row("monitoring.grafana.port", 3000, "its port", ge=1, le=65535),
    ),
    WorkerGroupSettings: _WORKER_GROUP,
}
"""The rows of each schema. A key is relative to its schema."""

REMEDIES = {
    "monitoring.grafana.enabled": "no Grafana is started; `deploy/deploy.sh` starts one with our "
    "dashboards, and docs/how-to/watch.md says how yours shows them",
}
"""What users do instead, by key. A start tells it."""

NO_EFFECT_SECTIONS = {
    "nixl": "Transfer of KV blocks between workers.",
    "resources": "Requests of one replica to its host.",
    "kv_cache": "The KV cache of one group of workers.",
}
"""Descriptions of the sections all of whose settings are in `NO_EFFECT`."""
