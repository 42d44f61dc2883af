"""Checks of settings that must fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

from dynamo.core.adapters import MODULES_KEY, parse_lora_modules
from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.schema_cache import OFFLOAD_TARGETS, CacheSettings
from dynamo.core.settings.schema_cluster import GroupCacheSettings, WorkerGroupSettings, override
from dynamo.core.settings.schema_models import DEFAULT_KEEP_ALIVE_S, ModelSettings
from dynamo.core.settings.schema_monitoring import CUSTOM_METRIC_SOURCES, CustomMetricSettings
from dynamo.core.settings.schema_planner import PlannerSettings

CUSTOM_METRIC_NAME = re.compile(r"(?!dynamo_|process_|python_)[a-z][a-z0-9_]*\Z")


def check_consistency(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a range is empty, worker groups cannot run together, or a tier of KV
    blocks lacks a setting. Groups of a host share no device; blocks of a model have one size."""
    _check_tiers(settings.cache, "cache", origins)
    bounds = settings.server.priority_range
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise ConfigError(
            f"server.priority_range = {list(bounds)} ({origins['server.priority_range']}): wanted "
            "the smallest and the largest priority, such as [0, 10]",
            param="server.priority_range",
        )
    _check_planner(settings.planner, origins)
    if settings.tuner.auto_tune_interval and not settings.planner.enabled:
        raise ConfigError(
            "tuner.auto_tune_interval needs the planner, whose process tunes",
            hint="add --planner; with --planner.policy static it changes no sizes",
            param="tuner.auto_tune_interval",
        )
    _check_custom_metrics(settings.monitoring.custom_metrics)
    _check_adapters(settings.engine.lora_modules)
    _check_keep_alive(settings.model)
    _check_block_sizes(settings)
    owners: dict[tuple[str, int], str] = {}
    for key, group in _worker_groups(settings):
        if group.kv_cache != GroupCacheSettings():
            _check_tiers(override(settings.cache, group.kv_cache), f"{key}.kv_cache", origins)
        for device in dict.fromkeys(group.device_ids):
            owner = owners.setdefault((group.host, device), key)
            if owner != key:
                raise ConfigError(
                    f"device {device} is given to {owner} ({origins[f'{owner}.device_ids']}) and "
                    f"to {key} ({origins[f'{key}.device_ids']})",
                    hint="give each group its own devices; for groups on different hosts set "
                    "`host:`",
                    param=f"{key}.device_ids",
                )


def _check_custom_metrics(metrics: Sequence[CustomMetricSettings]) -> None:
    """Raise `ConfigError` for a metric without a source of its kind, and for one that Prometheus
    would refuse or mix up with another one."""
    names = [metric.name for metric in metrics]
    for metric in metrics:
        kind = CUSTOM_METRIC_SOURCES.get(metric.shows, "")
        hint, buckets = "", metric.buckets
        if not kind:
            text = f"{metric.shows!r} is no source of a metric"
            hint = f"set `source` to one of: {', '.join(CUSTOM_METRIC_SOURCES)}"
        elif metric.type not in {None, kind}:
            text = f"its source {metric.shows} is a {kind}, not a {metric.type}"
        elif not CUSTOM_METRIC_NAME.match(metric.name):
            text = "names have a-z, 0-9 and _; those that begin with dynamo_ are taken"
        elif names.count(metric.name) > 1:
            text = "two metrics have this name"
        elif buckets and (kind == "gauge" or list(buckets) != sorted(filter(isfinite, {*buckets}))):
            text = f"buckets = {list(buckets)}: wanted ascending bounds, of a histogram only"
        else:
            continue
        text = f"{metric.name!r} in monitoring.custom_metrics: {text}"
        raise ConfigError(text, hint=hint, param="monitoring.custom_metrics")


def _check_adapters(modules: Sequence[str]) -> None:
    """Raise `ConfigError` for an adapter without a name or folder, and for two of one name."""
    names = [name for name, _ in parse_lora_modules(modules)]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(f"two LoRA adapters are called {twice!r}", param=MODULES_KEY)


def _check_keep_alive(model: ModelSettings) -> None:
    """Raise `ConfigError` for a `keep_alive` of a model that always runs."""
    if model.keep_alive != DEFAULT_KEEP_ALIVE_S and not model.on_demand:
        raise ConfigError(
            f"keep_alive = {model.keep_alive:g} s is for a model that is loaded when it "
            "is wanted, and this one always runs",
            hint="add load: on_demand (--load on_demand), or leave keep_alive out",
            param="model.keep_alive",
        )


def _check_planner(planner: PlannerSettings, origins: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a range that is empty, and for a size that is none."""
    if 0 < planner.max < planner.min:
        raise ConfigError(
            f"planner.min = {planner.min} ({origins['planner.min']}) is above "
            f"planner.max = {planner.max} ({origins['planner.max']})",
            hint="a range of sizes has the smallest first",
            param="planner.min",
        )
    for size in planner.sizes:
        if not size.rpartition("=")[2].isdecimal():
            raise ConfigError(
                f"{size!r} in planner.sizes ({origins['planner.sizes']}) is not KIND=COUNT",
                hint="e.g. worker=3",
                param="planner.sizes",
            )


def _check_tiers(cache: CacheSettings, section: str, origins: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an unknown tier, and for one without a place."""
    targets = f"{section}.offload_targets"
    for name in cache.offload_targets:
        if name not in OFFLOAD_TARGETS:
            raise ConfigError(
                f"{name!r} in {targets} ({origins[targets]}) is no tier",
                hint="known: cpu, ssd, remote",
                param=targets,
            )
    if cache.ssd_path and "disk" not in cache.tiers:
        raise ConfigError(
            f"cache.ssd_path ({origins['cache.ssd_path']}) is set and cache.ssd_size is not",
            hint="say how much of the disk to use with --kv-disk-size, such as 20GB",
            param="cache.ssd_size",
        )
    if cache.remote_size and "shared" not in cache.tiers:
        raise ConfigError(
            f"cache.remote_size ({origins['cache.remote_size']}) is set and cache.remote_url is "
            "not",
            hint="name the store with --kv-remote-url s3://BUCKET/PREFIX",
            param="cache.remote_url",
        )
    if "shared" in cache.tiers and not cache.remote_url:
        raise ConfigError(
            f"{targets} ({origins[targets]}) has remote, and cache.remote_url is not set",
            hint="name the store with --kv-remote-url s3://BUCKET/PREFIX",
            param="cache.remote_url",
        )


def _check_block_sizes(settings: Settings) -> None:
    groups: dict[str, tuple[str, int]] = {}
    for key, group in _worker_groups(settings):
        if key.startswith("workers.") and not group.replicas:
            continue
        size = group.block_size or settings.engine.block_size
        other, other_size = groups.setdefault(group.model or settings.model.path, (key, size))
        if size != other_size:
            raise ConfigError(
                f"blocks of {key} hold {size} tokens, those of {other} {other_size}, and "
                "workers of one model exchange blocks",
                hint="set engine.block_size once, for all groups",
                param=f"{key}.block_size",
            )


def _worker_groups(settings: Settings) -> Iterator[tuple[str, WorkerGroupSettings]]:
    yield "workers.prefill", settings.workers.prefill
    yield "workers.decode", settings.workers.decode
    for key in ("prefill_workers", "decode_workers"):
        for index, group in enumerate(getattr(settings, key)):
            yield f"{key}[{index}]", group
