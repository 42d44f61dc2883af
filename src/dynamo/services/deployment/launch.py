"""A whole deployment from its settings: which processes, and what each of them runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import itemgetter
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.child import ChildSpec
from dynamo.runtime.processes.parent_pipe import ParentPipe
from dynamo.runtime.processes.ports import reserve_port
from dynamo.runtime.processes.process_group import check_replicas
from dynamo.runtime.processes.reload import SettingsReloader
from dynamo.runtime.processes.supervisor import Prepare, Supervisor, run_supervisor
from dynamo.telemetry.logs import LogStream

SERVICE_BY_ROLE = {
    "frontend": "dynamo.services.frontend:FrontendService",
    "processor": "dynamo.services.processor:ProcessorService",
    "router": "dynamo.services.router:RouterService",
    "worker": "dynamo.services.worker:WorkerService",
}


MakeProcessSpecs = Callable[[Settings], Sequence[ChildSpec]]
"""The processes, given the settings with the port and the deployment's name filled in."""


class SettingsSource(NamedTuple):
    """Where the settings come from: `read` reads them again; `file`: that they name, "" = none."""

    read: Callable[[], tuple[Settings, MakeProcessSpecs]]
    file: str = ""


class ProcessService(Protocol):
    """What a process of some role runs."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Set everything up; it serves until the runtime shuts down."""


def create_service(role: str) -> ProcessService:
    """The service of a role. Raises `ConfigError`."""
    target = SERVICE_BY_ROLE.get(role)
    if target is None:
        near = difflib.get_close_matches(role, SERVICE_BY_ROLE, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SERVICE_BY_ROLE)}"
        raise ConfigError(f"no role is called {role!r}", hint=hint)
    module, _, name = target.partition(":")
    service: ProcessService = getattr(import_module(module), name)()
    return service


def run_child(role: str, settings: Settings | None = None, name: str = "") -> int:
    """Run one process of a deployment; returns its exit code. Without settings it takes them, and
    its name, from the supervisor on standard input, and dies with it."""
    from dynamo.runtime.processes.malloc import tune_malloc
    from dynamo.runtime.processes.process import run_process

    if role != "worker":
        tune_malloc()
    service = create_service(role)
    if settings is not None:
        return run_process(service.attach, settings, role, name)
    parent = ParentPipe.from_stdin()
    start = parent.start_message
    return run_process(service.attach, start.settings, role, start.name, parent=parent)


def deployment_specs(settings: Settings) -> list[ChildSpec]:
    """Frontends, which stop first, routers of their own, workers."""
    counts = {
        "frontend": settings.server.http_workers,
        "router": settings.router.replicas,
        "worker": settings.engine.workers,
    }
    return [
        ChildSpec(
            role=role,
            name=name,
            settings=settings,
            stop_order=order,
            needs_preparation=role == "worker",
        )
        for order, (role, count) in enumerate(filter(itemgetter(1), counts.items()))
        for name in replica_names(role, count)
    ]


def serve(
    settings: Settings,
    on_ready: Callable[[str], None],
    *,
    prepare: Prepare | None = None,
    logs: LogStream | None = None,
    specs: MakeProcessSpecs | None = None,
    source: SettingsSource | None = None,
) -> int:
    """Run a deployment until it is stopped; returns the exit code. `on_ready(url)` when all of it
    serves; workers wait for `prepare`; `specs`: which processes, else `deployment_specs`; `source`:
    for changes while it serves. Raises `PortInUse`, which names the owner, `ConfigError`,
    what `prepare` raises, and what keeps a process from ever starting."""
    host = settings.server.http_host
    with reserve_port(host, settings.server.http_port) as held:
        port = held.getsockname()[1]
        deployment = deployment_of(with_port_and_deployment(settings, port))
        settings = with_port_and_deployment(settings, port, deployment.id)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        supervisor = Supervisor(
            (specs or deployment_specs)(settings),
            deployment,
            settings,
            address=url,
            out=logs,
            prepare=prepare,
            reload=source and make_reload(source, port, deployment.id),
        )
        code = run_supervisor(supervisor, lambda: on_ready(url))
    if supervisor.failure is not None:
        raise supervisor.failure.to_error()  # the last line says why, not one amid the logs
    return code


def serve_without_http(
    settings: Settings,
    specs: MakeProcessSpecs,
    on_ready: Callable[[str], None],
    *,
    prepare: Prepare | None = None,
    logs: LogStream | None = None,
    source: SettingsSource | None = None,
) -> int:
    """Like `serve`, for processes of which none speaks HTTP: no port is held, the URL is ""."""
    deployment = deployment_of(settings)
    port = settings.server.http_port
    settings = with_port_and_deployment(settings, port, deployment.id)
    supervisor = Supervisor(
        specs(settings),
        deployment,
        settings,
        out=logs,
        prepare=prepare,
        reload=source and make_reload(source, port, deployment.id),
    )
    code = run_supervisor(supervisor, lambda: on_ready(""))
    if supervisor.failure is not None:
        raise supervisor.failure.to_error()
    return code


def worker_specs(settings: Settings) -> list[ChildSpec]:
    """Workers alone, for frontends that run elsewhere."""
    return [spec for spec in deployment_specs(settings) if spec.role == "worker"]


def with_port_and_deployment(settings: Settings, port: int, deployment: str = "") -> Settings:
    """With the port that is listened on and the deployment's name (else as it was)."""
    name = deployment or settings.runtime.deployment
    server = replace(settings.server, http_port=port)
    return replace(settings, server=server, runtime=replace(settings.runtime, deployment=name))


def make_reload(source: SettingsSource, port: int, deployment: str) -> SettingsReloader:
    """How a deployment's settings are read again."""

    def read() -> Sequence[ChildSpec]:
        settings, specs = source.read()
        return specs(with_port_and_deployment(settings, port, deployment))

    return SettingsReloader(read, source.file)


def replica_names(role: str, count: int) -> list[str]:
    """What the processes of one role are called. Raises `ConfigError` for more than a host runs."""
    check_replicas(role, count)
    return [role] if count == 1 else [f"{role}-{at + 1}" for at in range(count)]
