"""A graph as processes: who runs where, how often, with which settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, Settings, SourcedValue
from dynamo.runtime.processes.child import ChildSpec
from dynamo.runtime.processes.supervisor import Prepare
from dynamo.sdk import walk
from dynamo.sdk.configuration import build_config, parse_service_args
from dynamo.sdk.decorators import builtin_service, role_of, spec_of
from dynamo.services.components import Frontend, Processor, Router, Worker
from dynamo.services.deployment.launch import (
    SettingsSource,
    replica_names,
    serve,
    serve_without_http,
)
from dynamo.services.deployment.service_options import (
    LoadSettings,
    ServiceOptions,
    check_service_names,
    ready_made_settings,
    user_service_section,
)
from dynamo.services.deployment.user_service import UserServiceSpec
from dynamo.telemetry.logs import LogStream

READY_MADE_SERVICES = (Frontend, Processor, Router, Worker)
FRONTEND_ROLES = ("frontend", "processor", "router")
"""Roles that share one process, unless the router, or the processor alone, is asked for."""
Role = Literal["frontend", "processor", "router", "worker", "service"]


class ProcessPlan(msgspec.Struct, frozen=True):
    """One kind of process. `services`: what runs in it; `section`: a user's service's own
    configuration."""

    role: Role
    services: tuple[type[Any], ...]
    replicas: int
    settings: Settings
    section: dict[str, Any] = {}
    resources: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        """What its processes are called."""
        return str(self.services[0].__name__)


class DeploymentPlan(msgspec.Struct, frozen=True):
    """`settings`: those that all parts share (planes, port, deployment, logs). `model`: the graph
    serves models over HTTP, so that the deployment is called after its port."""

    root: str
    processes: tuple[ProcessPlan, ...]
    settings: Settings
    serves_models: bool

    @property
    def serves_http(self) -> bool:
        """One of the parts speaks HTTP."""
        return any(part.role == "frontend" for part in self.processes)

    def with_role(self, role: Role) -> list[ProcessPlan]:
        """The parts of one role."""
        return [part for part in self.processes if part.role == role]


def plan_deployment(
    root: type[Any],
    base: LoadedSettings,
    load: LoadSettings,
    flags: ServiceOptions | None = None,
    *,
    only: bool = False,
) -> DeploymentPlan:
    """What `root` and all that it reaches come to; with `only`, root alone. `base`: the settings
    without options of services, `load`: with more of them. Raises `ConfigError`."""
    services = walk(root)
    for service in services:
        if role_of(service):
            _check_ready_made(service)
    options = flags or {}
    for given in (base.services, options):
        check_service_names(given, services, [one.__name__ for one in READY_MADE_SERVICES])
    front = _frontend_services(services)
    wanted = [root] if only else services
    if front and not only:
        wanted = [*(one for one in front if one not in wanted), *wanted]
    shared = _namespace_setting(services, base) | ready_made_settings(front, base, options)
    shared |= _standalone_router_settings(root if only else None, front, load(shared))
    settings = load(shared).settings
    if settings.router.replicas:
        front = [one for one in front if role_of(one) != "router"]
    parts = [
        _plan_process(service, base, load, options, shared)
        for service in wanted
        if role_of(service) not in FRONTEND_ROLES
    ]
    routers = [one for one in wanted if role_of(one) == "router"]
    if settings.router.replicas and (routers or not only):
        router = routers[0] if routers else Router
        parts.insert(0, ProcessPlan("router", (router,), settings.router.replicas, settings))
    if only and role_of(root) == "processor":
        parts.insert(0, ProcessPlan("processor", (root,), spec_of(root).workers, settings))
    elif any(service in front for service in wanted):
        count = settings.server.http_workers
        parts.insert(0, ProcessPlan("frontend", tuple(front), count, settings))
    return DeploymentPlan(root.__name__, tuple(parts), settings, bool(front))


def process_specs(made: DeploymentPlan, settings: Settings, target: str) -> list[ChildSpec]:
    """The processes, callers first to stop. `settings`: the shared ones with port and deployment
    filled in; `target`: MODULE:Service of the root, by whose module services are found."""
    module, _, _ = target.partition(":")
    return [
        ChildSpec(
            role=part.role,
            name=name,
            settings=replace(
                part.settings,
                server=settings.server,
                runtime=settings.runtime,
                logging=settings.logging,
            ),
            stop_order=order,
            needs_preparation=part.role == "worker",
            task=_user_service_task(part, module),
        )
        for order, part in enumerate(made.processes)
        for name in replica_names(part.name, part.replicas)
    ]


def _frontend_services(services: Sequence[type[Any]]) -> list[type[Any]]:
    """What stands in the frontend's process: a graph with anything of a model has one."""
    front = [one for one in services if role_of(one) in FRONTEND_ROLES]
    if not any(role_of(one) for one in services):
        return []
    roles = [role_of(one) for one in front]
    missing = [one for one in (Frontend, Processor) if role_of(one) not in roles]
    return sorted([*front, *missing], key=lambda one: FRONTEND_ROLES.index(role_of(one)))


def _standalone_router_settings(
    only: type[Any] | None, front: Sequence[type[Any]], loaded: LoadedSettings
) -> dict[str, SourcedValue]:
    """A router in processes of its own: asked for by `--only`, by replicas in the settings, or by
    a class of one's own in the graph, which says how many. It routes by what workers hold, unless
    the settings name another mode."""
    router = next((one for one in front if role_of(one) == "router"), None)
    where = f"service {router.__name__}" if router is not None else ""
    found: dict[str, SourcedValue] = {}
    replicas = loaded.settings.router.replicas
    if router is not None and loaded.origins["router.replicas"] == "default":
        replicas = spec_of(router).workers if router is not Router or only is router else 0
        if replicas:
            found["router.replicas"] = SourcedValue(replicas, where)
    if replicas and loaded.origins["router.mode"] == "default":
        found["router.mode"] = SourcedValue("kv", where or "router.replicas")
    return found


def _plan_process(
    service: type[Any],
    base: LoadedSettings,
    load: LoadSettings,
    flags: ServiceOptions,
    shared: Mapping[str, SourcedValue],
) -> ProcessPlan:
    spec = spec_of(service)
    if role_of(service):
        own = ready_made_settings([service], base, flags)
        loaded = load({**shared, **own})
        workers = loaded.settings.engine.workers
        if loaded.origins["engine.workers"] == "default":
            workers = spec.workers
        return ProcessPlan("worker", (service,), workers, loaded.settings, resources=spec.resources)
    section = user_service_section(service, base.services, flags)
    args = parse_service_args(service, section)
    build_config(service, section)
    return ProcessPlan(
        "service",
        (service,),
        args.workers or spec.workers,
        load(shared).settings,
        section,
        spec.resources if args.resources is None else args.resources,
    )


def _check_ready_made(service: type[Any]) -> None:
    """Raises `ConfigError` where a class made of a ready-made one has methods of its own to run."""
    spec = spec_of(service)
    own = spec.endpoints != spec_of(builtin_service(service)).endpoints
    if own or spec.start_hooks or spec.stop_hooks or spec.dependencies:
        raise ConfigError(
            f"{spec.name} is a ready-made service with endpoints, hooks or dependencies of its own",
            hint="write a service of your own and link it, or let it depend on Processor",
        )


def _namespace_setting(
    services: Sequence[type[Any]], base: LoadedSettings
) -> dict[str, SourcedValue]:
    """The namespace that ready-made services declare, unless the settings give one."""
    declared = {
        spec_of(one).namespace: one.__name__
        for one in services
        if role_of(one) and spec_of(one).namespace
    }
    if len(declared) > 1:
        raise ConfigError(
            f"a model is served in one namespace; {' and '.join(declared.values())} differ"
        )
    if not declared or base.origins["runtime.namespace"] != "default":
        return {}
    (name,) = declared
    return {"runtime.namespace": SourcedValue(name, f"service {declared[name]}")}


def _user_service_task(part: ProcessPlan, module: str) -> dict[str, Any]:
    if part.role != "service":
        return {}
    service = part.services[0]
    where = module if service.__module__ == module else service.__module__
    task = UserServiceSpec(f"{where}:{service.__qualname__}", str(Path.cwd()), part.section)
    return dict(msgspec.to_builtins(task))


def with_deployment_name(made: DeploymentPlan) -> Settings:
    """The shared settings with the deployment's name: its port's where the graph serves models,
    else the root's."""
    settings = made.settings
    if settings.runtime.deployment or made.serves_models:
        return settings
    return replace(settings, runtime=replace(settings.runtime, deployment=made.root))


def serve_graph(
    made: DeploymentPlan,
    source: SettingsSource,
    on_ready: Callable[[str], None],
    *,
    prepare: Prepare | None = None,
    logs: LogStream | None = None,
) -> int:
    """Run it until it is stopped; returns the exit code. `source`: which processes there are, also
    for changes while it serves; `on_ready(url)` when all of it serves; the URL is "" where nothing
    speaks HTTP. Raises like `launch.serve`."""
    settings = with_deployment_name(made)
    _, specs = source.read()
    if made.serves_http:
        return serve(settings, on_ready, prepare=prepare, logs=logs, specs=specs, source=source)
    return serve_without_http(settings, specs, on_ready, prepare=prepare, logs=logs, source=source)
