"""The runtime of a process: opens the planes, names components, closes everything in order."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.communication.events import Events, open_events
from dynamo.communication.options import DEFAULT_OPTIONS
from dynamo.communication.requests import Requests, open_requests
from dynamo.core.adapters import AdapterOrder
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError, DynamoError, Unsupported
from dynamo.core.redaction import remember_environment
from dynamo.core.settings import Settings
from dynamo.core.settings.secret_files import remember_settings
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.runtime.background import Background, InlineBackground, Runtime, ThreadBackground
from dynamo.runtime.calls.client import Client
from dynamo.runtime.cancellation import CancellationToken
from dynamo.runtime.component import (
    ComponentRegistry,
    Endpoint,
    Namespace,
    ServedEndpoint,
    parse_reference,
)
from dynamo.runtime.deployment import ProcessState, deployment_of, new_instance_id
from dynamo.runtime.discovery import BackgroundDiscovery, RepublishingDiscovery
from dynamo.runtime.environment import environment_settings
from dynamo.runtime.health import ProcessHealth
from dynamo.runtime.lifecycle import Lifecycle, LifecycleState
from dynamo.runtime.planes import Planes, planes_of
from dynamo.telemetry import Registry

if TYPE_CHECKING:
    from dynamo.communication.transfer import TransferPlane
    from dynamo.runtime.shared_memory import SharedMemoryClient

log = logging.getLogger(__name__)

PLANE_NAMES = ("discovery", "requests", "events")

ShutdownHook = Callable[[float], Coroutine[Any, Any, None]]


class DistributedRuntime:
    """The planes, clients and endpoints of a process, from `create` to `shutdown`. `stopping` is
    cancelled when the process has to stop. `public_address` is the HTTP URL for users; the
    component that listens there sets it, as a worker sets `engine`. `supervisor` names the
    supervisor and this kind of process, or is empty; the supervisor reserves the HTTP port, which
    is then shared with SO_REUSEPORT. `task` is that of the process's `ChildSpec`. `on_serving`
    starts the supervisor's checks of the event loop; a component may call it before the process is
    ready. `shared_memory` is what processes of a supervisor share. `stand_by` is set in a standby
    process; a component calls it before it serves, and it returns when the process is to serve.
    `on_leaving(drain_s)` runs before the shutdown of a process whose clients can go to others.
    `ready` says why no requests should come; None: as the health says. `publish_state` tells the
    state of the process to `dynamo ps`, to discovery and to the supervisor. `shutdown` closes the
    `clients`."""

    discovery: Discovery
    requests: Requests
    events: Events
    runtime: Runtime
    planes: Planes

    def __new__(cls, *args: Any, **names: Any) -> Any:
        """Return the runtime of NVIDIA Dynamo's API for its arguments, which begin with a loop."""
        if not args or not isinstance(args[0], asyncio.AbstractEventLoop):
            return super().__new__(cls)
        objects = import_module("dynamo.runtime.compatibility.objects")
        return objects.CompatRuntime.create(cls, *args, **names)

    def __init__(
        self,
        settings: Settings,
        role: str,
        name: str,
        clock: Clock | None = None,
        stopping: CancellationToken | None = None,
    ) -> None:
        if not isinstance(settings, Settings):
            raise ConfigError(
                "DistributedRuntime is not made by its constructor",
                hint="use await DistributedRuntime.create()",
            )
        remember_settings(settings)
        remember_environment(os.environ)
        self.settings = settings
        self.role = role
        self.instance_id = new_instance_id(name or role)
        self.name = name or self.instance_id
        self.clock = clock or SystemClock()
        self.rng = Random()
        self.tasks = BackgroundTasks()
        self.metrics = Registry()
        self.loop_pauses: deque[tuple[float, float]] = deque(maxlen=64)
        self.health = ProcessHealth()
        self.lifecycle = Lifecycle(self.name)
        self.stopping = stopping or CancellationToken()
        self.failure: DynamoError | None = None
        self.public_address = self.engine = self.model = ""
        self.supervisor = ""
        self.task: Mapping[str, Any] = {}
        self.shared_memory: SharedMemoryClient | None = None
        self.on_serving: Callable[[], None] = lambda: None
        self.on_leaving: ShutdownHook | None = None
        self.ready: Callable[[], str] | None = None
        self.publish_state: Callable[[ProcessState], Awaitable[None]] = _publish_nothing
        self.report: Callable[..., None] = lambda **_: None
        self.execute_order: Callable[[AdapterOrder], Awaitable[None]] = _refuse_order
        self.stand_by: Callable[[], Awaitable[None]] | None = None
        self._role_listeners: list[Callable[[str], Awaitable[None]]] = []
        self._served_endpoints: list[ServedEndpoint] = []
        self.clients: dict[Client, None] = {}
        self._shutdown_hooks: list[ShutdownHook] = []
        self._settings_listeners: list[Callable[[Settings], None]] = []
        self._exit_stack = AsyncExitStack()
        self._plane_options = DEFAULT_OPTIONS
        self._closed = False

    @classmethod
    async def create(
        cls,
        settings: Settings | None = None,
        *,
        role: str = "process",
        name: str = "",
        clock: Clock | None = None,
        stopping: CancellationToken | None = None,
    ) -> Self:
        """Create a runtime and open the planes of `settings`, by default those of the environment
        and of the file that `DYNAMO_CONFIG_PATH` names. Raises `ConfigError`."""
        from_environment = settings is None
        if settings is None:
            settings = await asyncio.to_thread(environment_settings)
        runtime = cls(settings, role, name, clock, stopping)
        await runtime.open()
        if from_environment:
            log.info("runtime opened its planes", extra={"fields": runtime.planes.redacted_urls()})
        return runtime

    async def set_role(self, role: str) -> None:
        """Change the role of this process in its record, which `dynamo ps` shows."""
        self.role = role
        for listener in self._role_listeners:
            await listener(role)

    def on_role_change(self, listener: Callable[[str], Awaitable[None]]) -> None:
        """Call `listener` with each later role."""
        self._role_listeners.append(listener)

    def namespace(self, name: str | None = None) -> Namespace:
        """A namespace, by default the one of the settings."""
        return Namespace(self, name or self.settings.runtime.namespace)

    def endpoint(self, reference: str) -> Endpoint:
        """The endpoint of a reference such as `dynamo.Processor.chat/completions`."""
        namespace, component, endpoint = parse_reference(reference)
        return self.namespace(namespace).component(component).endpoint(endpoint)

    @property
    def component_registry(self) -> ComponentRegistry:
        """The components that discovery lists."""
        return ComponentRegistry(self.discovery)

    @property
    def served_endpoints(self) -> tuple[ServedEndpoint, ...]:
        """The endpoints that this process serves now."""
        return tuple(self._served_endpoints)

    async def shutdown(self, drain_s: float | None = None) -> None:
        """Withdraw the endpoints, wait for calls in flight, and close everything. `drain_s` limits
        the wait, by default to `runtime.drain_s`. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        drain = self.settings.runtime.drain_s if drain_s is None else drain_s
        self.stopping.cancel()
        self.lifecycle.transition_to(LifecycleState.STOPPING)
        try:
            await run_all(
                *(served.withdraw(drain) for served in self.served_endpoints),
                *(hook(drain) for hook in self._shutdown_hooks),
            )
        finally:
            for client in tuple(self.clients):
                await client.close()
            await self._exit_stack.aclose()
            self.lifecycle.transition_to(LifecycleState.DEREGISTERED)

    def fail(self, error: DynamoError) -> None:
        """Stop this process with `error`, the first if there are several. A supervisor restarts
        the process."""
        if self.failure is None:
            self.failure = error
        self.stopping.cancel()

    def on_settings_change(self, listener: Callable[[Settings], None]) -> Callable[[], None]:
        """Call `listener` with the settings after each reload. Returns a function that
        unsubscribes."""
        self._settings_listeners.append(listener)
        return lambda: self._settings_listeners.remove(listener)

    def update_settings(self, settings: Settings) -> None:
        """Apply reloaded settings and call the listeners."""
        if settings == self.settings:
            return
        remember_settings(settings)
        self.settings = settings
        for listener in tuple(self._settings_listeners):
            listener(settings)

    def add_served_endpoint(self, served: ServedEndpoint) -> None:
        """Withdraw `served` at shutdown. Raises `ConfigError` if its endpoint is served already."""
        path = served.endpoint.path
        if any(other.endpoint.path == path for other in self._served_endpoints):
            raise ConfigError(f"{path} is already served by this process")
        self._served_endpoints.append(served)

    def remove_served_endpoint(self, served: ServedEndpoint) -> None:
        """Forget a withdrawn endpoint."""
        if served in self._served_endpoints:
            self._served_endpoints.remove(served)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def add_shutdown_hook(self, hook: ShutdownHook) -> None:
        """Run `hook(drain_s)` while the endpoints drain, before the planes close."""
        self._shutdown_hooks.append(hook)

    async def open(self) -> None:
        """Open the planes; `create` does this. Raises `ConfigError`."""
        self.planes = planes = planes_of(self.settings)
        async with AsyncExitStack() as opened:
            background = await self._open_discovery(opened, planes)
            self.runtime = Runtime(
                self.instance_id, asyncio.get_running_loop(), background, self.stopping
            )
            options = self._plane_options = replace(
                planes.messaging_options, shared_clients={}, folder_secret=self.discovery.secret
            )
            self.requests = await open_requests(planes.requests, options)
            opened.push_async_callback(self.requests.close)
            self.events = await open_events(planes.events, self.discovery, options)
            opened.push_async_callback(self.events.close)
            opened.push_async_callback(self.tasks.close)
            self._exit_stack = opened.pop_all()
        self.metrics.gauge(
            "dynamo_plane_up_ratio",
            "1 while the plane's server is reachable or the plane needs none, otherwise 0",
            ("plane",),
            callback=lambda: {
                (name,): float(name not in self.unreachable_planes()) for name in PLANE_NAMES
            },
            merge="min",
        )
        self.lifecycle.transition_to(LifecycleState.REGISTERED)
        self.lifecycle.transition_to(LifecycleState.RUNNING)
        self.health.on_change(lambda: self.lifecycle.follow_health(self.health.healthy))

    async def open_transfer(self) -> TransferPlane:
        """Open the transfer plane of one memory region. `shutdown` closes it. Raises
        `ConfigError`."""
        from dynamo.communication.transfer import TransferMetrics, open_transfer

        metrics = TransferMetrics(self.metrics)
        plane = await open_transfer(self.planes.transfer, self._plane_options, self.clock, metrics)
        self._exit_stack.push_async_callback(plane.close)
        return plane

    def plane_status(self) -> Mapping[str, Any]:
        """The URLs of the planes for /health, and under `away` the connection errors by plane."""
        urls = self.planes.redacted_urls()
        unreachable = self.unreachable_planes()
        return {**urls, "away": unreachable} if unreachable else urls

    def unreachable_planes(self) -> Mapping[str, str]:
        """The connection errors by plane. Serving continues without the planes' servers."""
        errors = {
            "discovery": self.discovery.connection_error,
            "requests": self.requests.connection_error,
            "events": self.events.connection_error,
        }
        return {name: error for name, error in errors.items() if error}

    async def _open_discovery(self, opened: AsyncExitStack, planes: Planes) -> Background:
        """Open discovery on a background thread; a memory plane has no I/O and uses this loop."""
        if planes.discovery.startswith("memory:"):
            self.discovery = await _open_republishing(planes)
            opened.push_async_callback(self.discovery.close)
            return InlineBackground()
        background = ThreadBackground()
        opened.push_async_callback(background.close)
        if planes.discovery.startswith("file:"):
            await self.clock.offload(deployment_of(self.settings).create_folder)
        discovery = await background.run(_open_republishing(planes))
        self.discovery = BackgroundDiscovery(discovery, background)
        opened.push_async_callback(self.discovery.close)
        return background


async def _publish_nothing(state: ProcessState) -> None:
    """Publish no state: the process has no record."""
    del state


async def _open_republishing(planes: Planes) -> RepublishingDiscovery:
    return RepublishingDiscovery(await open_discovery(planes.discovery, planes.discovery_options))


async def _refuse_order(order: AdapterOrder) -> None:
    raise Unsupported(f"this process sends no orders to workers, such as for {order.name!r}")
