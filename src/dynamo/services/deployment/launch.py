"""Start of a deployment from its settings: the processes, and the service that each runs."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import msgspec
from msgspec.structs import replace

from dynamo.communication.addresses import is_loopback
from dynamo.communication.http import PortInUse
from dynamo.core.clock import SystemClock
from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.core.settings import Settings
from dynamo.core.settings.secret_files import remember_settings
from dynamo.core.values import worker_role
from dynamo.inference.engines.choice import log_choices
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.fork_server import ForkServer, Restore
from dynamo.runtime.processes.parent_pipe import ChildStart, ParentPipe
from dynamo.runtime.processes.ports import reserve_port
from dynamo.runtime.processes.reload import SettingsReloader
from dynamo.runtime.processes.served_models import ModelSources
from dynamo.runtime.processes.standby import with_standbys
from dynamo.runtime.processes.supervisor import Prepare, Supervisor, run_supervisor
from dynamo.services.alerting import DeploymentAlerts
from dynamo.services.deployment.accelerators import assign_cards, keep_cards
from dynamo.services.deployment.added_models import added_model_specs, save_model
from dynamo.services.deployment.memory_needs import check_standby_memory, share_memory
from dynamo.services.deployment.model_groups import (
    ReplicaGroup,
    answering_groups,
    group_specs,
    shared_settings,
    worker_groups,
)
from dynamo.services.observing.prometheus import observing_roles, warn_if_missing
from dynamo.services.observing.trace_export import TraceOptions
from dynamo.telemetry.logs import LogStream

log = logging.getLogger(__name__)

SERVICE_BY_ROLE = {
    "frontend": "dynamo.services.frontend:FrontendService",
    "processor": "dynamo.services.processor:ProcessorService",
    "router": "dynamo.services.router:RouterService",
    "worker": "dynamo.services.worker:WorkerService",
    "observer": "dynamo.services.observing.observer:ObserverService",
    "planner": "dynamo.services.planning.planner:PlannerService",
    "prometheus": "dynamo.services.observing.prometheus:PrometheusService",
}

PRELOADED_MODULES = {
    "": (
        "uvloop",
        "dynamo.communication.discovery.file",
        "dynamo.communication.events.tcp",
        "dynamo.communication.requests.tcp",
        "dynamo.communication.transfer.auto",
    ),
    "native": (
        "dynamo.inference.torch.engine",
        "dynamo.inference.native.numpy_backend",
        "dynamo.inference.native.sampling",
        "dynamo.inference.native.shared_weights",
    ),
}
"""Modules that the fork server imports beside those of the service, for all engines and for one."""
BASE_OPEN_FILES = 96
"""Files and sockets of a frontend without connections, and some connections of clients."""
OPEN_FILES_PER_PROCESS = 4
"""Files and sockets that each process adds to the frontend and to the supervisor."""
DEFAULT_OPEN_FILES = 4096

USUAL_OBSERVER_PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to clients."""

MakeProcessSpecs = Callable[[Settings], Sequence[ChildSpec]]
"""Returns the processes for settings with the port and the deployment's name filled in."""


class SettingsSource(NamedTuple):
    """Where reloads read settings: `read` reads them again; `files` are the files to watch.
    `defaults` are those of models that are added; `config` is the file that lists the models."""

    read: Callable[[], tuple[Settings, MakeProcessSpecs]]
    files: Sequence[str]
    defaults: Settings
    config: str


class ProcessService(Protocol):
    """The service that a process of one role runs."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start serving, until the runtime shuts down."""


def create_service(role: str) -> ProcessService:
    """Return the service of a role. Raises `ConfigError` for an unknown role."""
    target = SERVICE_BY_ROLE.get(role)
    if target is None:
        hint = nearest_name_hint(role, SERVICE_BY_ROLE)
        raise ConfigError(f"unknown role {role!r}", hint=hint)
    module, _, name = target.partition(":")
    service: ProcessService = getattr(import_module(module), name)()
    return service


def become_child(role: str, preload: Callable[[], None] | None = None) -> None:
    """Return in each process of this role that the supervisor orders from standard input. Each
    finds imported what the role needs, and what decodes settings. With `preload`, which is called
    once, orders come when a snapshot of this process is restored."""
    from dynamo.runtime.processes.fork_server import become_worker, connect_restored

    def prepare(engine: str) -> None:
        with suppress(Exception):  # the process meets the error again and reports it
            for module in PRELOADED_MODULES.get(engine, ()):
                import_module(module)

    with suppress(Exception):
        create_service(role)
        start = msgspec.json.encode(ChildStart(Settings(), role, supervisor=0))
        msgspec.json.decode(start, type=ChildStart)
        remember_settings(Settings())
    prepare("")
    if preload is not None:
        preload()
    become_worker(prepare, None if preload is None else connect_restored())


def run_child(role: str) -> int:
    """Run the process that the supervisor names on standard input, and return its exit code. The
    process ends with the supervisor."""
    from dynamo.runtime.processes.process import run_process, tune_malloc

    if role != "worker":
        tune_malloc()
    service = create_service(role)
    parent = ParentPipe.from_stdin()
    start = parent.start_message
    shown = worker_role(start.settings.engine.role) if role == "worker" else role
    return run_process(service.attach, start.settings, shown, start.name, parent=parent)


def deployment_specs(settings: Settings) -> list[ChildSpec]:
    """Return the processes in stop order: frontends, routers, workers, those that watch. Raises
    `ConfigError` if no worker computes answers, or none computes prompts as the settings want."""
    shared = shared_settings(settings)
    groups = [
        ReplicaGroup("planner", "planner", int(settings.planner.enabled), shared),
        ReplicaGroup("frontend", "frontend", settings.server.http_workers, shared),
        ReplicaGroup("router", "router", settings.router.replicas, shared),
        *answering_groups(settings),
        *(ReplicaGroup(role, role, 1, shared) for role in observing_roles(settings)),
    ]
    return group_specs(groups)


def worker_specs(settings: Settings) -> list[ChildSpec]:
    """Return the workers only, for frontends that run elsewhere."""
    return group_specs(worker_groups(settings))


def serve(
    settings: Settings,
    on_ready: Callable[[str], None],
    *,
    prepare: Prepare | None = None,
    logs: LogStream | None = None,
    specs: MakeProcessSpecs | None = None,
    source: SettingsSource | None = None,
    http: bool = True,
    restore: Restore | None = None,
) -> int:
    """Run a deployment until it is stopped, and return the exit code.

    `on_ready(url)` is called when all processes serve. Workers start after `prepare`. `specs`
    returns the processes (default: `deployment_specs`). `source` makes settings reloadable.
    Without `http`, no port is reserved and the URL is "". Workers are forked from what `restore`
    restores. Raises `PortInUse` with the owner's name,
    `ConfigError`, the error of `prepare`, and the error that keeps a process from starting.
    """
    host, port, url = settings.server.http_host, settings.server.http_port, ""
    with ExitStack() as reserved:
        if http:
            port = reserved.enter_context(reserve_port(host, port)).getsockname()[1]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            _warn_of_settings(settings)
        deployment = deployment_of(with_port_and_deployment(settings, port))
        settings = with_port_and_deployment(settings, port, deployment.id)
        processes = assign_cards(with_standbys((specs or deployment_specs)(settings)))
        if any(spec.role == "observer" for spec in processes):
            observer = reserved.enter_context(reserve_observer_port(settings))
            processes = with_observer_port(processes, observer.getsockname()[1])
        settings, processes = share_memory(settings, processes)
        _check_environment(settings, processes)
        log_choices()
        supervisor = Supervisor(
            processes,
            deployment,
            settings,
            address=url,
            out=logs,
            prepare=prepare,
            reload=source and make_reload(source, port, deployment.id, processes),
            models=source and make_model_sources(source, port, deployment.id),
            alerts=DeploymentAlerts(settings, deployment.id, SystemClock()),
            fork_server=ForkServer(restore=restore),
        )
        code = run_supervisor(supervisor, lambda: on_ready(url))
    if supervisor.failure is not None:
        raise supervisor.failure.to_error()  # so that the reason is the last line of the output
    return code


def _check_environment(settings: Settings, processes: Sequence[ChildSpec]) -> None:
    check_open_files(sum(not spec.on_demand for spec in processes))
    check_standby_memory(processes)
    if settings.observer.enabled:
        TraceOptions.from_environ(os.environ)


def reserve_observer_port(settings: Settings) -> socket.socket:
    """Reserve the port of the observer and of those that replace it, so that open pages and
    bookmarks stay valid. Port 0 is one by the deployment's name, or any if that is in use. Raises
    `PortInUse`, `ConfigError`."""
    host, port = settings.observer.host, settings.observer.port
    name = f"{os.getuid()} {deployment_of(settings).id}"
    usual = USUAL_OBSERVER_PORTS[crc32(name.encode()) % len(USUAL_OBSERVER_PORTS)]
    try:
        return reserve_port(host, port or usual)
    except PortInUse as error:
        if not port:
            return reserve_port(host, 0)
        error.hint = error.hint.replace("--http-port", "--observer.port")
        raise


def with_observer_port(processes: Sequence[ChildSpec], port: int) -> list[ChildSpec]:
    """Return the processes with the reserved port as task of the observer."""
    return [
        replace(spec, task={"port": port}) if spec.role == "observer" else spec
        for spec in processes
    ]


def _warn_of_settings(settings: Settings) -> None:
    server = settings.server
    warn_if_missing(settings.monitoring.prometheus)
    if not (is_loopback(server.http_host) or server.api_keys):
        log.warning(
            "every client that reaches the HTTP port may use it: set server.api_keys",
            extra={"fields": {"http_host": server.http_host}},
        )


def check_open_files(processes: int) -> None:
    """Raise `ConfigError` if the limit of open files is too low for a deployment to serve."""
    needed = BASE_OPEN_FILES + OPEN_FILES_PER_PROCESS * processes
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"a process may open {hard} files and sockets, and {processes} processes need {needed}",
            hint="raise the hard limit: LimitNOFILE in a systemd unit, or as root "
            f"`ulimit -Hn {max(needed, DEFAULT_OPEN_FILES)}`",
        )


def with_port_and_deployment(settings: Settings, port: int, deployment: str = "") -> Settings:
    """Return the settings with the HTTP port and, unless empty, the deployment's name."""
    name = deployment or settings.runtime.deployment
    server = replace(settings.server, http_port=port)
    return replace(settings, server=server, runtime=replace(settings.runtime, deployment=name))


def make_model_sources(source: SettingsSource, port: int, deployment: str) -> ModelSources:
    """Return what makes the processes of models that commands add, and saves them."""
    settings = with_port_and_deployment(source.defaults, port, deployment)

    async def make_specs(
        entry: Mapping[str, Any], other_workers: int, spare_bytes: int
    ) -> Sequence[ChildSpec]:
        make = partial(added_model_specs, settings, entry, other_workers, spare_bytes)
        return await asyncio.to_thread(make)

    async def save(entry: Mapping[str, Any] | None, name: str) -> str:
        return await asyncio.to_thread(save_model, source.config, entry, name)

    return ModelSources(make_specs, save)


def make_reload(
    source: SettingsSource, port: int, deployment: str, started: Sequence[ChildSpec] = ()
) -> SettingsReloader:
    """Return the reloader of a deployment's settings. `started`: the processes of its start."""
    observer_ports = [spec.task["port"] for spec in started if spec.role == "observer"]

    def read() -> Sequence[ChildSpec]:
        settings, specs = source.read()
        processes = with_standbys(specs(with_port_and_deployment(settings, port, deployment)))
        for observer_port in observer_ports:
            processes = with_observer_port(processes, observer_port)
        return share_memory(settings, keep_cards(processes, started))[1]

    return SettingsReloader(read, source.files)
