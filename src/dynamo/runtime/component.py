"""Namespaces, components and endpoints: naming, serving and clients."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from msgspec.structs import replace

from dynamo.communication.discovery import Discovery
from dynamo.communication.events import Events
from dynamo.communication.requests import RequestHandler, Requests
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import (
    Instance,
    InstanceFilter,
    InstanceView,
    decode_instance,
    encode_instance,
    instance_key,
    instances_prefix,
)
from dynamo.runtime.calls.streams import ItemFunction, check_handler, item_handler
from dynamo.runtime.cancellation import CancellationToken
from dynamo.runtime.health import ProcessHealth
from dynamo.runtime.lifecycle import Lifecycle, LifecycleState

WITHDRAW_GRACE_S = 0.25
"""Callers learn of a withdrawal with a delay; calls within this time are still answered."""

_NAME_PATTERN = re.compile(r"[^./\s]+\Z")
_ENDPOINT_PATTERN = re.compile(r"\S+\Z")


class EndpointHost(Protocol):
    """The part of a process that namespaces, components and endpoints use. `DistributedRuntime`
    implements it."""

    discovery: Discovery
    requests: Requests
    events: Events
    clock: Clock
    rng: Random
    health: ProcessHealth
    clients: dict[Client, None]
    instance_id: str
    stopping: CancellationToken

    def add_served_endpoint(self, served: ServedEndpoint) -> None:
        """Note that the process serves an endpoint. Raises `ConfigError` if it does already."""

    def remove_served_endpoint(self, served: ServedEndpoint) -> None:
        """Note that the process does not serve the endpoint any more."""


def parse_reference(text: str) -> tuple[str, str, str]:
    """Split a reference such as `dynamo.Processor.chat/completions` into namespace, component and
    endpoint, which may hold slashes and dots. Raises `ConfigError`."""
    namespace, _, rest = text.partition(".")
    component, _, endpoint = rest.partition(".")
    if not (
        _NAME_PATTERN.match(namespace)
        and _NAME_PATTERN.match(component)
        and _ENDPOINT_PATTERN.match(endpoint)
    ):
        hint = "write namespace.component.endpoint, e.g. dynamo.Processor.chat/completions"
        raise ConfigError(f"{text!r} is not an endpoint reference", hint=hint)
    return namespace, component, endpoint


def _check_name(kind: str, name: str) -> str:
    if not (_ENDPOINT_PATTERN if kind == "endpoint" else _NAME_PATTERN).match(name):
        hint = "use at least one character and no dots, slashes or blanks"
        raise ConfigError(f"{name!r} is not a valid name of a {kind}", hint=hint)
    return name


class Namespace:
    """Isolates the components of a tenant or environment from others."""

    def __init__(self, runtime: EndpointHost, name: str) -> None:
        self.runtime = runtime
        self.name = _check_name("namespace", name)

    def component(self, name: str) -> Component:
        """A component of this namespace."""
        return Component(self, name)


class Component:
    """An independently deployable unit with endpoints."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.namespace = namespace
        self.name = _check_name("component", name)

    def endpoint(self, name: str) -> Endpoint:
        """An endpoint of this component."""
        return Endpoint(self, name)


class Endpoint:
    """A callable and discoverable part of a component."""

    def __init__(self, component: Component, name: str) -> None:
        self.component = component
        self.name = _check_name("endpoint", name)
        self.runtime = component.namespace.runtime

    @property
    def path(self) -> str:
        """`namespace.component.endpoint`."""
        return f"{self.component.namespace.name}.{self.component.name}.{self.name}"

    async def serve(
        self, handler: RequestHandler, *, capabilities: Mapping[str, Any] | None = None
    ) -> ServedEndpoint:
        """Answer calls, then announce this instance until `withdraw` or the end of the runtime.

        `handler` is a coroutine function of the payload and a `ResponseWriter`. Raises
        `ConfigError` for another handler, and if this process serves the endpoint already.
        """
        check_handler(handler, self.path, ("payload", "writer"), "serve_items takes generators")
        served = ServedEndpoint(self, dict(capabilities or {}))
        self.runtime.add_served_endpoint(served)
        try:
            await served.start(handler)
        except BaseException:
            self.runtime.remove_served_endpoint(served)
            raise
        return served

    async def serve_items(
        self, function: ItemFunction, *, capabilities: Mapping[str, Any] | None = None
    ) -> ServedEndpoint:
        """Like `serve`, with an async generator or coroutine function over msgpack values."""
        check_handler(function, self.path, ("request",), "serve takes payload and writer")
        return await self.serve(item_handler(function), capabilities=capabilities)

    async def client(self, where: InstanceFilter | None = None, *, verify: bool = False) -> Client:
        """Open a client that knows the present instances, filtered by `where`. The client ends with
        `close` or with the runtime. With `verify`, an instance counts once it was reached."""
        runtime = self.runtime
        prefix = instances_prefix(self.component.namespace.name, self.component.name, self.name)
        view = InstanceView(
            runtime.discovery, runtime.requests, prefix, runtime.clock, where, verify=verify
        )
        await view.start()
        client = Client(
            self.path,
            view,
            runtime.requests,
            runtime.rng,
            lambda closed: runtime.clients.pop(closed, None),
        )
        runtime.clients[client] = None
        return client


class ServedEndpoint:
    """An endpoint that this process serves."""

    def __init__(self, endpoint: Endpoint, capabilities: dict[str, Any]) -> None:
        self.endpoint = endpoint
        self.capabilities = capabilities
        self.lifecycle = Lifecycle(endpoint.path)
        self.instance: Instance | None = None
        self.before_withdrawal: Callable[[float | None], Awaitable[None]] | None = None
        """Awaited with the drain time before the instance leaves discovery."""
        self._withdrawn = asyncio.Event()
        self._handler: RequestHandler

    async def start(self, handler: RequestHandler) -> None:
        """Serve and register the instance. The state then follows the health of the process."""
        self._handler = handler
        await self._register()
        self.endpoint.runtime.health.on_change(self._on_health_change)
        self._on_health_change()

    async def resume(self) -> None:
        """Serve and register the instance again after `withdraw`. Raises `ConfigError` if the
        process serves the endpoint otherwise meanwhile."""
        self.endpoint.runtime.add_served_endpoint(self)
        self.lifecycle = Lifecycle(self.endpoint.path)
        self._withdrawn.clear()
        await self._register()
        self._on_health_change()

    async def _register(self) -> None:
        runtime = self.endpoint.runtime
        component = self.endpoint.component
        await runtime.requests.serve(self.endpoint.path, self._handler)
        self.instance = Instance(
            id=runtime.instance_id,
            address=runtime.requests.address,
            namespace=component.namespace.name,
            component=component.name,
            endpoint=self.endpoint.name,
            capabilities=self.capabilities,
            lease_id=runtime.instance_id,
        )
        await runtime.discovery.put(instance_key(self.instance), encode_instance(self.instance))
        self.lifecycle.transition_to(LifecycleState.REGISTERED)
        self.lifecycle.transition_to(LifecycleState.RUNNING)

    async def announce(self, capabilities: Mapping[str, Any]) -> None:
        """Change some capabilities in the record of this instance."""
        self.capabilities = {**self.capabilities, **capabilities}
        if self.instance is None or self.lifecycle.stopping:
            return
        self.instance = replace(self.instance, capabilities=self.capabilities)
        discovery = self.endpoint.runtime.discovery
        await discovery.put(instance_key(self.instance), encode_instance(self.instance))

    async def withdraw(self, drain_s: float | None = 0.0) -> None:
        """Leave discovery, then refuse new calls after a grace time and cancel calls in flight
        after `drain_s` (None: never). A second call waits for the first. If `drain_s` is not 0,
        `before_withdrawal` comes first and replaces the grace time."""
        if self.instance is None:
            return
        if self.lifecycle.stopping:
            await self._withdrawn.wait()
            return
        self.lifecycle.transition_to(LifecycleState.STOPPING)
        runtime = self.endpoint.runtime
        drains = drain_s is None or drain_s > 0
        if drains and self.before_withdrawal is not None:
            await self.before_withdrawal(drain_s)
        await runtime.discovery.delete(instance_key(self.instance))
        if drains and self.before_withdrawal is None:
            await runtime.clock.sleep(WITHDRAW_GRACE_S)
        await runtime.requests.withdraw(self.endpoint.path, drain_s)
        self.lifecycle.transition_to(LifecycleState.DEREGISTERED)
        runtime.remove_served_endpoint(self)
        self._withdrawn.set()

    def _on_health_change(self) -> None:
        self.lifecycle.follow_health(self.endpoint.runtime.health.healthy)


class ComponentRegistry:
    """Reads the registered instances with strong consistency."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    async def components(self, namespace: str) -> Mapping[str, Sequence[Instance]]:
        """Instances by component. A process is an instance of each endpoint that it serves."""
        by_component: defaultdict[str, list[Instance]] = defaultdict(list)
        for instance in await self.instances(namespace):
            by_component[instance.component].append(instance)
        return dict(by_component)

    async def instances(
        self, namespace: str, component: str = "", endpoint: str = ""
    ) -> Sequence[Instance]:
        """Instances of a namespace, a component or an endpoint. Bad records are skipped."""
        records = await self._discovery.get(instances_prefix(namespace, component, endpoint))
        decoded = (decode_instance(key, value) for key, value in sorted(records.items()))
        return [instance for instance in decoded if instance is not None]
