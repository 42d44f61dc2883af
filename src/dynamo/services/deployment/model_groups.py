"""Groups of equal worker processes: workers with both roles, prefill workers, decode workers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_cluster import WorkerGroupSettings, override
from dynamo.core.settings.schema_engine import AUTO
from dynamo.core.settings.server_url import server_url
from dynamo.inference.engines.choice import with_engine
from dynamo.inference.engines.packages import CARD_ENGINES, package_kind

log = logging.getLogger(__name__)


class ReplicaGroup(NamedTuple):
    """`replicas` equal processes, which run the service of `role` with `settings`."""

    role: str
    name: str
    replicas: int
    settings: Settings


def worker_groups(settings: Settings) -> Sequence[ReplicaGroup]:
    """Return the groups of workers that the settings name."""
    groups = [
        *role_groups(settings, "prefill"),
        *role_groups(settings, "decode"),
        ReplicaGroup("worker", "worker", _answering_workers(settings), settings),
    ]
    return [group for group in groups if group.replicas]


def with_engines(settings: Settings) -> Settings:
    """Return the settings with the engine of the workers' model, if they leave it open. Blocks.

    Raises as `chosen_engine`, and `ConfigError` for groups whose models need different engines.
    """
    if settings.engine.kind != AUTO:
        return settings
    chosen = {
        group.settings.model.path: with_engine(group.settings) for group in worker_groups(settings)
    }
    kinds = {path: group.engine.kind for path, group in chosen.items()}
    if len(set(kinds.values())) > 1:
        names = ", ".join(f"{path or 'the default model'}: {kind}" for path, kind in kinds.items())
        raise ConfigError(
            f"the groups' models need different engines ({names})",
            hint="name the engine (out=ENGINE), or start one deployment for each model",
            param="engine.kind",
        )
    kind = next(iter(kinds.values()), AUTO)
    return replace(settings, engine=replace(settings.engine, kind=kind))


def _answering_workers(settings: Settings) -> int:
    """Return the number of workers without a single role: with URLs, one for each."""
    engine = settings.engine
    return len(engine.urls) if engine.urls and engine.workers else engine.workers


def answering_groups(settings: Settings) -> Sequence[ReplicaGroup]:
    """Return the groups of workers. Raises `ConfigError` if none of them computes answers, or none
    computes prompts as the settings want."""
    groups = worker_groups(settings)
    roles = [group.settings.engine.role for group in groups]
    if roles and set(roles) == {"prefill"}:
        raise ConfigError(
            "prefill workers without a worker that computes answers",
            hint="add --decode-workers N; `dynamo run in=none` starts prefill workers alone",
        )
    check_disaggregation(settings, roles)
    return groups


def check_disaggregation(settings: Settings, roles: Collection[str]) -> None:
    """Check that workers with these roles suit `router.disaggregation.mode`.

    Raises `ConfigError` for `always` if every worker computes its own prompts. Decode or prefill
    workers alone are a warning, since workers of other hosts may join them."""
    if set(roles) == {"prefill"}:
        log.warning("prefill workers alone answer nothing: requests fail until another one joins")
    if settings.router.disaggregation.effective_mode != "always":
        return
    if set(roles) == {"both"}:
        raise ConfigError(
            "--disagg always, but no worker is a prefill worker",
            hint="add --prefill-workers N and --decode-workers N, or serve a graph with "
            "PrefillWorker and DecodeWorker; workers with both roles compute prompts for each "
            "other with --flexible-workers N and without --disagg always",
            param="router.disaggregation.mode",
        )
    if roles and "prefill" not in roles:
        log.warning(
            "no prefill worker is started here: decode workers compute prompts until one joins",
            extra={"fields": {"router.disaggregation.mode": "always"}},
        )


def role_groups(settings: Settings, role: str) -> Iterator[ReplicaGroup]:
    """Yield the groups of workers with only that role. A group of a list is not empty."""
    groups_by_role: Mapping[str, Sequence[WorkerGroupSettings]] = {
        "prefill": (settings.workers.prefill, *settings.prefill_workers),
        "decode": (settings.workers.decode, *settings.decode_workers),
    }
    groups = groups_by_role.get(role, ())
    for index, group in enumerate(groups):
        if replicas := group.replicas or min(index, 1):
            name = group.name or f"{role}-worker"
            yield ReplicaGroup("worker", name, replicas, _group_settings(settings, role, group))


def _group_settings(settings: Settings, role: str, group: WorkerGroupSettings) -> Settings:
    """Return the settings of a group's workers: those of the group, else those of all."""
    engine = settings.engine
    engine = replace(
        engine,
        role=role,
        device_ids=group.device_ids or engine.device_ids,
        tensor_parallel_size=group.tensor_parallel_size or engine.tensor_parallel_size,
        max_num_seqs=group.max_batch_size or engine.max_num_seqs,
        block_size=group.block_size or engine.block_size,
    )
    model = replace(settings.model, path=group.model or settings.model.path)
    return replace(
        settings,
        engine=engine,
        model=model,
        nixl=override(settings.nixl, group.nixl),
        cache=override(settings.cache, group.kv_cache),
    )


def replica_settings(role: str, settings: Settings, index: int, replicas: int) -> Settings:
    """Return the settings of one of equal processes: each worker gets its share of the devices,
    or one of the URLs.

    Raises `ConfigError` if the devices cannot be divided, or are too few for one worker.
    """
    engine = settings.engine
    if role == "worker" and engine.urls:
        if engine.url_kv_events and len(engine.url_kv_events) != len(engine.urls):
            raise ConfigError(
                f"{len(engine.url_kv_events)} addresses of KV events for {len(engine.urls)} URLs",
                hint="give one for each server, or none",
                param="engine.url_kv_events",
            )
        index %= len(engine.urls)
        kv_events = engine.url_kv_events[index : index + 1]
        engine = replace(engine, urls=(server_url(engine.urls[index]),), url_kv_events=kv_events)
        return replace(settings, engine=engine)
    share, rest = divmod(len(engine.device_ids), replicas)
    needed = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    if role != "worker" or not engine.device_ids or package_kind(engine.kind) in CARD_ENGINES:
        return settings  # `assign_cards` divides the cards of all groups
    if rest or share < needed:
        raise ConfigError(
            f"{replicas} workers cannot share the devices {list(engine.device_ids)}: each needs "
            f"{needed}",
            hint="give device_ids as many numbers as all workers of the group need together",
            param="engine.device_ids",
        )
    devices = engine.device_ids[index * share : (index + 1) * share]
    return replace(settings, engine=replace(engine, device_ids=devices))
