"""A graph as processes: who runs where, how often, with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Given, Loaded, Settings
from dynamo.runtime.child import ProcessSpec
from dynamo.sdk import walk
from dynamo.sdk.configuration import configuration_of, service_args
from dynamo.sdk.declare import ready_made, role_of, spec_of
from dynamo.services.components import Frontend, Processor, Router, Worker
from dynamo.services.launch import replica_names
from dynamo.services.options import Load, Options, check_names, section_of, settings_of
from dynamo.services.own import Task

READY = (Frontend, Processor, Router, Worker)
FRONT = ("frontend", "processor", "router")
"""Roles that share one process, unless the router, or the processor alone, is asked for."""
Role = Literal["frontend", "processor", "router", "worker", "service"]


class Part(msgspec.Struct, frozen=True):
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


class Plan(msgspec.Struct, frozen=True):
    """`settings`: those that all parts share (planes, port, deployment, logs). `model`: the graph
    serves models over HTTP, so that the deployment is called after its port."""

    root: str
    parts: tuple[Part, ...]
    settings: Settings
    model: bool

    @property
    def listens(self) -> bool:
        """One of the parts speaks HTTP."""
        return any(part.role == "frontend" for part in self.parts)

    def of_role(self, role: Role) -> list[Part]:
        """The parts of one role."""
        return [part for part in self.parts if part.role == role]


def plan(
    root: type[Any], base: Loaded, load: Load, flags: Options | None = None, *, only: bool = False
) -> Plan:
    """What `root` and all that it reaches come to; with `only`, root alone. `base`: the settings
    without options of services, `load`: with more of them. Raises `ConfigError`."""
    services = walk(root)
    for service in services:
        if role_of(service):
            _check_marker(service)
    options = flags or {}
    for given in (base.services, options):
        check_names(given, services, [one.__name__ for one in READY])
    front = _front(services)
    wanted = [root] if only else services
    if front and not only:
        wanted = [*(one for one in front if one not in wanted), *wanted]
    shared = _namespace(services, base) | settings_of(front, base, options)
    shared |= _apart(root if only else None, front, load(shared))
    settings = load(shared).settings
    if settings.router.replicas:
        front = [one for one in front if role_of(one) != "router"]
    parts = [
        _part(service, base, load, options, shared)
        for service in wanted
        if role_of(service) not in FRONT
    ]
    routers = [one for one in wanted if role_of(one) == "router"]
    if settings.router.replicas and (routers or not only):
        router = routers[0] if routers else Router
        parts.insert(0, Part("router", (router,), settings.router.replicas, settings))
    if only and role_of(root) == "processor":
        parts.insert(0, Part("processor", (root,), spec_of(root).workers, settings))
    elif any(service in front for service in wanted):
        count = settings.server.http_workers
        parts.insert(0, Part("frontend", tuple(front), count, settings))
    return Plan(root.__name__, tuple(parts), settings, bool(front))


def process_specs(made: Plan, settings: Settings, target: str) -> list[ProcessSpec]:
    """The processes, callers first to stop. `settings`: the shared ones with port and deployment
    filled in; `target`: MODULE:Service of the root, by whose module services are found."""
    module, _, _ = target.partition(":")
    return [
        ProcessSpec(
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
            task=_task(part, module),
        )
        for order, part in enumerate(made.parts)
        for name in replica_names(part.name, part.replicas)
    ]


def _front(services: Sequence[type[Any]]) -> list[type[Any]]:
    """What stands in the frontend's process: a graph with anything of a model has one."""
    front = [one for one in services if role_of(one) in FRONT]
    if not any(role_of(one) for one in services):
        return []
    roles = [role_of(one) for one in front]
    missing = [one for one in (Frontend, Processor) if role_of(one) not in roles]
    return sorted([*front, *missing], key=lambda one: FRONT.index(role_of(one)))


def _apart(only: type[Any] | None, front: Sequence[type[Any]], loaded: Loaded) -> dict[str, Given]:
    """A router in processes of its own: asked for by `--only`, by replicas in the settings, or by
    a class of one's own in the graph, which says how many. It routes by what workers hold, unless
    the settings name another mode."""
    router = next((one for one in front if role_of(one) == "router"), None)
    where = f"service {router.__name__}" if router is not None else ""
    found: dict[str, Given] = {}
    replicas = loaded.settings.router.replicas
    if router is not None and loaded.origins["router.replicas"] == "default":
        replicas = spec_of(router).workers if router is not Router or only is router else 0
        if replicas:
            found["router.replicas"] = Given(replicas, where)
    if replicas and loaded.origins["router.mode"] == "default":
        found["router.mode"] = Given("kv", where or "router.replicas")
    return found


def _part(
    service: type[Any], base: Loaded, load: Load, flags: Options, shared: Mapping[str, Given]
) -> Part:
    spec = spec_of(service)
    if role_of(service):
        own = settings_of([service], base, flags)
        loaded = load({**shared, **own})
        workers = loaded.settings.engine.workers
        if loaded.origins["engine.workers"] == "default":
            workers = spec.workers
        return Part("worker", (service,), workers, loaded.settings, resources=spec.resources)
    section = section_of(service, base.services, flags)
    args = service_args(service, section)
    configuration_of(service, section)
    return Part(
        "service",
        (service,),
        args.workers or spec.workers,
        load(shared).settings,
        section,
        spec.resources if args.resources is None else args.resources,
    )


def _check_marker(service: type[Any]) -> None:
    """Raises `ConfigError` where a class made of a ready-made one has methods of its own to run."""
    spec = spec_of(service)
    own = spec.endpoints != spec_of(ready_made(service)).endpoints
    if own or spec.starts or spec.stops or spec.dependencies:
        raise ConfigError(
            f"{spec.name} is a ready-made service with endpoints, hooks or dependencies of its own",
            hint="write a service of your own and link it, or let it depend on Processor",
        )


def _namespace(services: Sequence[type[Any]], base: Loaded) -> dict[str, Given]:
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
    return {"runtime.namespace": Given(name, f"service {declared[name]}")}


def _task(part: Part, module: str) -> dict[str, Any]:
    if part.role != "service":
        return {}
    service = part.services[0]
    where = module if service.__module__ == module else service.__module__
    task = Task(f"{where}:{service.__qualname__}", str(Path.cwd()), part.section)
    return dict(msgspec.to_builtins(task))
