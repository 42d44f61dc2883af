"""Groups of equal worker processes of each model: workers with both roles, prefill workers, decode
workers. The processes are named after their model if there are several."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from dynamo.core.adapters import MODULES_KEY, parse_lora_modules
from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.settings.load import model_entry
from dynamo.core.settings.schema_cluster import WorkerGroupSettings, WorkersSettings, override
from dynamo.core.settings.schema_engine import AUTO
from dynamo.core.settings.server_url import lacks_tokenizer, server_url
from dynamo.inference.engines.choice import with_engine
from dynamo.inference.engines.packages import CARD_ENGINES, package_kind
from dynamo.models.location import computes_embeddings, locate_model
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.process_names import check_replicas

log = logging.getLogger(__name__)


class ModelWorkers(Protocol):
    """Equal workers of one model."""

    @property
    def name(self) -> str:
        """The name of the processes."""

    @property
    def model(self) -> str:
        """The id of the model, "" if only its server knows it."""

    @property
    def settings(self) -> Settings:
        """The settings of the workers."""


class ReplicaGroup(NamedTuple):
    """`replicas` equal processes, which run the service of `role` with `settings`. `model` is the
    id of the model that workers serve, "" if only their server knows it."""

    role: str
    name: str
    replicas: int
    settings: Settings
    model: str = ""


def model_names(settings: Settings) -> Sequence[str]:
    """Return the names of the model of these workers, the id first; none if only their server knows
    it. Raises `ModelUnavailable` for a path without a model."""
    if settings.model.names:
        return settings.model.names
    if lacks_tokenizer(settings):
        return (settings.engine.url_model,) if settings.engine.url_model else ()
    return (locate_model(settings.model.path).name,)


def model_id(settings: Settings) -> str:
    """Return the first of `model_names`, "" if there is none or no model at the path."""
    with suppress(ModelUnavailable):  # the start says so
        return next(iter(model_names(settings)), "")
    return ""


def check_on_demand(settings: Settings, model: str) -> None:
    """Raise `ConfigError` for a model on demand that requests cannot name before it is loaded."""
    if settings.model.on_demand and not model and lacks_tokenizer(settings):
        raise ConfigError(
            "only the server knows the model's name, and a request has to name what it wants",
            hint="name it with --model-name, or leave out load: on_demand",
            param="model.load",
        )


def serves_embeddings(settings: Settings) -> bool:
    """Whether a model that is on demand computes vectors. False for others, whose cards say it."""
    if not settings.model.on_demand or lacks_tokenizer(settings):
        return False
    with suppress(ModelUnavailable):  # the start says so
        return computes_embeddings(settings.model.path)
    return False


def worker_groups(settings: Settings) -> Sequence[ReplicaGroup]:
    """Return the groups of workers that the settings name. Raises `ConfigError` and
    `ModelUnavailable` if one of several models has no name of its own."""
    if not settings.models:
        check_adapter_names(settings, (model_id(settings), *settings.model.names))
        return _groups_of_model(settings)
    workers = settings.worker_count
    groups: list[ReplicaGroup] = []
    for model, names in zip(settings.each_model, unique_model_names(settings), strict=True):
        groups += model_worker_groups(model, names[0], workers)
    return groups


def model_worker_groups(
    settings: Settings, model: str, total_workers: int
) -> Sequence[ReplicaGroup]:
    """Return the groups of one of several models, whose workers share the host's memory with
    `total_workers`."""
    return [
        group._replace(
            name=f"{process_prefix(model)}-{group.name}",
            settings=replace(
                group.settings,
                engine=replace(group.settings.engine, workers=total_workers),
                workers=WorkersSettings(),
                prefill_workers=(),
                decode_workers=(),
            ),
            model=model,
        )
        for group in _groups_of_model(settings)
    ]


def process_prefix(model: str) -> str:
    """Return the beginning of the names of a model's processes."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", model).strip("-")


def shared_settings(settings: Settings) -> Settings:
    """Return the settings of processes that serve all models, such as frontends."""
    if not settings.models:
        return settings
    updates = any(model.engine.lora_updates for model in settings.each_model)
    engine = replace(settings.engine, workers=settings.worker_count, lora_updates=updates)
    return replace(settings, engine=engine, models=())


def _groups_of_model(settings: Settings) -> Sequence[ReplicaGroup]:
    answering, model = _answering_workers(settings), model_id(settings)
    groups = [
        *role_groups(settings, "prefill"),
        *role_groups(settings, "decode"),
        ReplicaGroup("worker", "worker", answering, settings, model),
    ]
    return [group for group in groups if group.replicas]


def unique_model_names(settings: Settings) -> Sequence[Sequence[str]]:
    """Return the names of each of several models. Raises `ConfigError`."""
    owners: dict[str, int] = {}
    all_names = [model_names(model) for model in settings.each_model]
    for number, names in enumerate(all_names):
        if not names:
            raise ConfigError(
                f"models[{number}] is a server's model without a name",
                hint="name it with `names:`",
                param="models",
            )
        for name in (process_prefix(names[0]), *names):
            other = owners.setdefault(name, number)
            if other != number:
                raise ConfigError(
                    f"models[{other}] and models[{number}] are both called {name!r}",
                    hint="give one of them another name with `names:`",
                    param="models",
                )
    for model in settings.each_model:
        check_adapter_names(model, owners)
    return all_names


def check_adapter_names(settings: Settings, model_names: Collection[str]) -> None:
    """Raise `ConfigError` for a LoRA adapter that is called like a model or an alias."""
    for name, _ in parse_lora_modules(settings.engine.lora_modules):
        if name in model_names:
            raise ConfigError(
                f"the LoRA adapter {name!r} is called like a model",
                hint="give it another name: requests name adapters and models alike",
                param=MODULES_KEY,
            )


def with_engines(settings: Settings) -> Settings:
    """Return the settings with the engine of the workers' model, if they leave it open. Blocks.

    Raises as `chosen_engine`, and `ConfigError` for groups whose models need different engines.
    """
    if settings.models:
        unique_model_names(settings)
        models = map(with_engines, settings.each_model)
        return replace(settings, models=tuple(map(model_entry, models)))
    if settings.engine.kind != AUTO:
        return settings
    chosen = {
        group.settings.model.path: with_engine(group.settings)
        for group in _groups_of_model(settings)
    }
    kinds = {path: group.engine.kind for path, group in chosen.items()}
    if len(set(kinds.values())) > 1:
        names = ", ".join(f"{path or 'the default model'}: {kind}" for path, kind in kinds.items())
        raise ConfigError(
            f"the groups' models need different engines ({names})",
            hint="name the engine (out=ENGINE), or write an entry of models for each model",
            param="engine.kind",
        )
    kind = next(iter(kinds.values()), AUTO)
    return replace(settings, engine=replace(settings.engine, kind=kind))


def _answering_workers(settings: Settings) -> int:
    """Return the number of workers without a single role: with URLs, one for each."""
    engine = settings.engine
    return len(engine.urls) if engine.urls and engine.workers else engine.workers


def answering_groups(settings: Settings) -> Sequence[ReplicaGroup]:
    """Return the groups of workers. Raises `ConfigError` if no worker computes answers of a model,
    or none computes prompts as the settings want."""
    groups = worker_groups(settings)
    roles = [group.settings.engine.role for group in groups]
    if roles and set(roles) == {"prefill"}:
        raise ConfigError(
            "prefill workers without a worker that computes answers",
            hint="add --decode-workers N; `dynamo run in=none` starts prefill workers alone",
        )
    check_models_answered(groups)
    check_disaggregation(settings, roles)
    return groups


def check_models_answered(groups: Sequence[ModelWorkers]) -> None:
    """Raise `ConfigError` if a model has prefill workers alone, beside workers of other models."""
    models: defaultdict[tuple[str, str], list[ModelWorkers]] = defaultdict(list)
    for group in groups:
        models[group.model, group.settings.model.path].append(group)
    for (model, path), own in models.items():
        others = [group for group in groups if group not in own]
        if others and {group.settings.engine.role for group in own} == {"prefill"}:
            served = ", ".join(
                f"{each.name}: {each.model or each.settings.model.path}" for each in others
            )
            raise ConfigError(
                f"{', '.join(each.name for each in own)} compute prompts of {model or path}, and "
                f"no worker computes its answers ({served})",
                hint=f"add decode workers of {model or path}",
            )


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
            own = _group_settings(settings, role, group)
            yield ReplicaGroup("worker", name, replicas, own, model_id(own))


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


def group_specs(groups: Sequence[ReplicaGroup]) -> list[ChildSpec]:
    """Return the processes of groups, which stop in this order. Raises `ConfigError` for a model on
    demand without a name."""
    for group in groups:
        check_on_demand(group.settings, group.model)
    return [
        ChildSpec(
            role=group.role,
            name=name,
            settings=replica_settings(group.role, group.settings, index, group.replicas),
            stop_order=order,
            needs_preparation=group.role == "worker",
            model=group.model,
            embeds=serves_embeddings(group.settings),
        )
        for order, group in enumerate(group for group in groups if group.replicas)
        for index, name in enumerate(replica_names(group.name, group.replicas))
    ]


def replica_names(role: str, count: int) -> list[str]:
    """Return the process names of a role. Raises `ConfigError` for too many processes."""
    check_replicas(role, count)
    return [role] if count == 1 else [f"{role}-{number}" for number in range(1, count + 1)]
