"""The deployment plan of a service graph: processes, replicas and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, Settings, SourcedValue
from dynamo.core.settings.load import MODELS_KEY
from dynamo.core.settings.schema_cluster import WorkersSettings
from dynamo.core.settings.worker_counts import BESIDE_GROUPS
from dynamo.inference.engines.choice import with_engine
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.sdk import walk
from dynamo.sdk.configuration import build_config, parse_service_args
from dynamo.sdk.decorators import builtin_service, role_of, spec_of
from dynamo.services.components import (
    DecodeWorker,
    EmbeddingWorker,
    Frontend,
    Planner,
    PrefillWorker,
    Processor,
    Router,
    Worker,
)
from dynamo.services.deployment.model_groups import (
    check_disaggregation,
    check_models_answered,
    model_id,
    process_prefix,
    replica_names,
    replica_settings,
    role_groups,
    serves_embeddings,
    shared_settings,
    unique_model_names,
)
from dynamo.services.deployment.service_options import (
    LoadSettings,
    ServiceOptions,
    check_service_names,
    ready_made_settings,
    user_service_section,
)
from dynamo.services.deployment.user_service import UserServiceSpec
from dynamo.services.observing.prometheus import ObservingRole, observing_roles

READY_MADE_SERVICES = (
    Frontend,
    Planner,
    Processor,
    Router,
    Worker,
    PrefillWorker,
    DecodeWorker,
    EmbeddingWorker,
)
EMBEDDING_SETTINGS = {"model.path": "minilm", "model.names": (), "engine.kind": "native"}
"""Settings of embedding workers where their own section does not say otherwise."""
FRONTEND_ROLES = ("frontend", "processor", "router")
"""Roles that share one process, except for router processes and a processor with `--only`."""
Role = Literal["planner", "frontend", "processor", "router", "worker", "service", ObservingRole]


class ProcessPlan(msgspec.Struct, frozen=True):
    """A group of equal processes, which run `services`. `section` configures a user's service."""

    role: Role
    services: tuple[type[Any], ...]
    replicas: int
    settings: Settings
    section: dict[str, Any] = {}
    resources: Mapping[str, Any] = {}
    group: str = ""
    model: str = ""

    @property
    def name(self) -> str:
        """The name of the processes, before the replica number."""
        return self.group or str(self.services[0].__name__)


class DeploymentPlan(msgspec.Struct, frozen=True):
    """The processes of a graph. `settings` holds what all share: planes, port, deployment, logs.

    A deployment that `serves_models` is named after its port, otherwise after the `root` service.
    """

    root: str
    processes: tuple[ProcessPlan, ...]
    settings: Settings
    serves_models: bool

    @property
    def serves_http(self) -> bool:
        """Whether the plan has a frontend."""
        return any(process.role == "frontend" for process in self.processes)

    def with_role(self, role: Role) -> list[ProcessPlan]:
        """Return the process groups of one role."""
        return [process for process in self.processes if process.role == role]


def plan_deployment(
    root: type[Any],
    base: LoadedSettings,
    load: LoadSettings,
    flags: ServiceOptions | None = None,
    *,
    only: bool = False,
) -> DeploymentPlan:
    """Plan the processes of `root` and all services that it reaches; with `only`, of root alone.

    `base` holds the settings without options of services; `load` resolves them again with more
    values. Raises `ConfigError`.
    """
    services = walk(root)
    options = flags or {}
    _check_services(services, (base.services, options))
    front = _frontend_services(services)
    selected = [root] if only else services
    if front and not only:
        selected = [*(service for service in front if service not in selected), *selected]
    planners = [service for service in selected if role_of(service) == "planner"]
    own = ready_made_settings([*front, *planners], base, options)
    shared = _namespace_setting(services, base) | own
    shared |= _standalone_router_settings(root if only else None, front, load(shared))
    settings = shared_settings(load(shared).settings)
    if settings.router.replicas:
        front = [service for service in front if role_of(service) != "router"]
    # Services that are no part of the frontend; router and frontend are put before them.
    processes = [
        process
        for service in selected
        if role_of(service) not in (*FRONTEND_ROLES, "planner")
        for process in _plan_processes(service, base, load, options, shared)
    ]
    routers = [service for service in selected if role_of(service) == "router"]
    if settings.router.replicas and (routers or not only):
        router = routers[0] if routers else Router
        processes.insert(0, ProcessPlan("router", (router,), settings.router.replicas, settings))
    if only and role_of(root) == "processor":
        processes.insert(0, ProcessPlan("processor", (root,), spec_of(root).workers, settings))
    elif any(service in front for service in selected):
        count = settings.server.http_workers
        processes.insert(0, ProcessPlan("frontend", tuple(front), count, settings))
    if front and not only:
        _check_workers(settings, processes)
    if planner := _find_planner(planners, settings, alone=only or not front):
        processes.insert(0, ProcessPlan("planner", (planner,), 1, settings))
    observing = observing_roles(settings) if front and not only else ()
    processes += [ProcessPlan(role, (), 1, settings, group=role.capitalize()) for role in observing]
    return DeploymentPlan(root.__name__, tuple(processes), settings, bool(front))


def _check_services(services: Sequence[type[Any]], sources: Sequence[ServiceOptions]) -> None:
    for service in services:
        if role_of(service):
            _check_ready_made(service)
    ready_made = [service.__name__ for service in READY_MADE_SERVICES]
    for source in sources:
        check_service_names(source, services, ready_made)


def _find_planner(
    planners: Sequence[type[Any]], settings: Settings, *, alone: bool
) -> type[Any] | None:
    """Return the planner of the graph, or the one that the settings add to a whole graph."""
    return next(iter(planners), Planner if settings.planner.enabled and not alone else None)


def _check_workers(settings: Settings, processes: Sequence[ProcessPlan]) -> None:
    workers = [part for part in processes if _generates_text(part)]
    check_models_answered(workers)
    check_disaggregation(settings, [part.settings.engine.role for part in workers])


def _generates_text(process: ProcessPlan) -> bool:
    return process.role == "worker" and all(part.generates_text for part in process.services)


def process_specs(plan: DeploymentPlan, settings: Settings) -> list[ChildSpec]:
    """Return the child processes of a plan; callers stop before the services they call.

    `settings` are the shared ones with port and deployment filled in. The workers share the memory
    of the host, so each knows how many all parts of the graph have.
    """
    workers = sum(part.replicas for part in plan.with_role("worker"))
    return [
        ChildSpec(
            role=process.role,
            name=name,
            settings=replica_settings(
                process.role,
                replace(
                    _with_worker_count(process, workers),
                    server=settings.server,
                    runtime=settings.runtime,
                    logging=settings.logging,
                ),
                index,
                process.replicas,
            ),
            stop_order=order,
            needs_preparation=process.role == "worker",
            task=_user_service_task(process),
            model=process.model,
            embeds=serves_embeddings(process.settings),
        )
        for order, process in enumerate(plan.processes)
        for index, name in enumerate(replica_names(process.name, process.replicas))
    ]


def _with_worker_count(process: ProcessPlan, workers: int) -> Settings:
    settings = process.settings
    if process.role != "worker":
        return settings
    return replace(
        settings,
        engine=replace(settings.engine, workers=workers),
        workers=WorkersSettings(),
        prefill_workers=(),
        decode_workers=(),
    )


def _frontend_services(services: Sequence[type[Any]]) -> list[type[Any]]:
    """Return the services of the frontend process; none without any ready-made service."""
    if not any(role_of(service) for service in services):
        return []
    front = [service for service in services if role_of(service) in FRONTEND_ROLES]
    roles = [role_of(service) for service in front]
    front += [service for service in (Frontend, Processor) if role_of(service) not in roles]
    return sorted(front, key=lambda service: FRONTEND_ROLES.index(role_of(service)))


def _standalone_router_settings(
    only_service: type[Any] | None, front: Sequence[type[Any]], loaded: LoadedSettings
) -> dict[str, SourcedValue]:
    """Return the settings of router processes.

    `--only`, `router.replicas` or a subclass of Router in the graph ask for them; the subclass also
    says how many. Their mode is kv, unless the settings name another one.
    """
    router = next((service for service in front if role_of(service) == "router"), None)
    origin = f"service {router.__name__}" if router is not None else ""
    settings: dict[str, SourcedValue] = {}
    replicas = loaded.settings.router.replicas
    if router is not None and loaded.origins["router.replicas"] == "default":
        replicas = spec_of(router).workers if router is not Router or only_service is router else 0
        if replicas:
            settings["router.replicas"] = SourcedValue(replicas, origin)
    if replicas and loaded.origins["router.mode"] == "default":
        settings["router.mode"] = SourcedValue("kv", origin or "router.replicas")
    return settings


def _plan_processes(
    service: type[Any],
    base: LoadedSettings,
    load: LoadSettings,
    flags: ServiceOptions,
    shared: Mapping[str, SourcedValue],
) -> Sequence[ProcessPlan]:
    spec = spec_of(service)
    if role_of(service):
        own = ready_made_settings([service], base, flags)
        if not service.generates_text:
            origin = f"service {service.__name__}"
            defaults = {
                name: SourcedValue(value, origin) for name, value in EMBEDDING_SETTINGS.items()
            }
            own = defaults | own
        if "model.path" in own:  # such a class serves no model of the list
            own[MODELS_KEY] = SourcedValue([], own["model.path"].origin)
        return _plan_workers(service, load({**shared, **own}))
    section = user_service_section(service, base.services, flags)
    args = parse_service_args(service, section)
    build_config(service, section)
    process = ProcessPlan(
        "service",
        (service,),
        args.workers or spec.workers,
        load(shared).settings,
        section,
        spec.resources if args.resources is None else args.resources,
    )
    return (process,)


def _plan_workers(service: type[Any], loaded: LoadedSettings) -> Sequence[ProcessPlan]:
    """Plan the workers of a class: those of the settings' groups with its role, else one group. Of
    several models, each has its own."""
    settings = loaded.settings
    if not (settings.models and service.generates_text):
        origin = loaded.origins["engine.workers"]
        return _plan_model_workers(service, replace(settings, models=()), origin)
    plans: list[ProcessPlan] = []
    for index, names in enumerate(unique_model_names(settings)):
        origin = loaded.origins[f"{MODELS_KEY}[{index}].engine.workers"]
        model = settings.each_model[index]
        for part in _plan_model_workers(service, model, origin, from_entry=True):
            name = f"{process_prefix(names[0])}-{part.name}"
            plans.append(replace(part, group=name, model=names[0]))
    return plans


def _plan_model_workers(
    service: type[Any], settings: Settings, count_origin: str, *, from_entry: bool = False
) -> Sequence[ProcessPlan]:
    """Plan the workers of a class for a model. All groups `from_entry` of `models` are workers of a
    class without a single role."""
    spec = spec_of(service)
    role = service.engine_role
    groups = list(role_groups(settings, role))
    if role == "both" and settings.prefill_workers + settings.decode_workers and from_entry:
        groups = [*role_groups(settings, "prefill"), *role_groups(settings, "decode")]
    if groups:
        return [
            ProcessPlan(
                "worker",
                (service,),
                group.replicas,
                with_engine(group.settings),
                resources=spec.resources,
                group=group.name,
                model=group.model,
            )
            for group in groups
        ]
    settings = with_engine(settings)
    workers = settings.engine.workers
    if count_origin == "default" or count_origin.startswith(BESIDE_GROUPS):
        workers = spec.workers
    if role != "both":
        settings = replace(settings, engine=replace(settings.engine, role=role))
    return (
        ProcessPlan(
            "worker",
            (service,),
            workers,
            settings,
            resources=spec.resources,
            model=model_id(settings),
        ),
    )


def _check_ready_made(service: type[Any]) -> None:
    """Raise `ConfigError` if a subclass of a ready-made service adds methods that would run."""
    spec = spec_of(service)
    adds_endpoints = spec.endpoints != spec_of(builtin_service(service)).endpoints
    if adds_endpoints or spec.start_hooks or spec.stop_hooks or spec.dependencies:
        raise ConfigError(
            f"{spec.name} is a ready-made service with endpoints, hooks or dependencies of its own",
            hint="write a separate service, and link it or let it depend on Processor",
        )


def _namespace_setting(
    services: Sequence[type[Any]], base: LoadedSettings
) -> dict[str, SourcedValue]:
    """Return the namespace that ready-made services declare, unless the settings name one."""
    declared = {
        spec_of(service).namespace: service.__name__
        for service in services
        if role_of(service) and spec_of(service).namespace
    }
    if len(declared) > 1:
        names = " and ".join(declared.values())
        raise ConfigError(f"a model is served in one namespace; the namespaces of {names} differ")
    if not declared or base.origins["runtime.namespace"] != "default":
        return {}
    (name,) = declared
    return {"runtime.namespace": SourcedValue(name, f"service {declared[name]}")}


def _user_service_task(process: ProcessPlan) -> dict[str, Any]:
    if process.role != "service":
        return {}
    service = process.services[0]
    target = f"{service.__module__}:{service.__qualname__}"
    task = UserServiceSpec(target, str(Path.cwd()), process.section)
    return dict(msgspec.to_builtins(task))


def with_deployment_name(plan: DeploymentPlan) -> Settings:
    """Return the shared settings; a graph without models gets its root's name as deployment."""
    settings = plan.settings
    if settings.runtime.deployment or plan.serves_models:
        return settings
    return replace(settings, runtime=replace(settings.runtime, deployment=plan.root))
