"""The serving end: one instance of a service, made, connected, started, served."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.communication.requests import Handler, Outgoing
from dynamo.core.errors import Unsupported
from dynamo.core.tasks import run_all
from dynamo.runtime import DistributedRuntime, Served
from dynamo.sdk.answering import Answers
from dynamo.sdk.configuration import ATTRIBUTE, config_type, configuration_of
from dynamo.sdk.declare import EndpointSpec, ServiceSpec, spec_of
from dynamo.sdk.handle import Handle, connect
from dynamo.sdk.messages import encode, request_decoder
from dynamo.sdk.offers import Offer, offer_key


class Attached:
    """One instance in a process. `service`: the user's object."""

    def __init__(
        self, runtime: DistributedRuntime, declared: type[Any], spec: ServiceSpec, service: Any
    ) -> None:
        self.service = service
        self._declared = declared
        self._runtime = runtime
        self._spec = spec
        self._served: list[Served] = []

    async def start(self) -> None:
        """Run its start hooks, then answer calls."""
        await self._run(self._spec.starts)
        namespace = self._runtime.namespace(self._spec.namespace)
        component = namespace.component(self._spec.component)
        answers = Answers(self._spec.name, self._runtime.clock, self._runtime.metrics)
        for endpoint in self._spec.endpoints.values():
            method = getattr(self.service, endpoint.method, None)
            handler = handler_of(endpoint, method) if method else _absent(self.service, endpoint)
            handler = answers.of(endpoint.name, handler)
            self._served.append(await component.endpoint(endpoint.name).serve(handler))
        if self._spec.model:
            await self._offer(namespace.name)

    async def stop(self, drain_s: float) -> None:
        """Answer what is in flight within `drain_s`, then run the stop hooks."""
        await run_all(*(served.withdraw(drain_s) for served in self._served))
        await self._run(self._spec.stops)

    async def _run(self, hooks: tuple[str, ...]) -> None:
        for hook in hooks:
            result = getattr(self.service, hook)()
            if inspect.isawaitable(result):
                await result

    async def _offer(self, namespace: str) -> None:
        offer = Offer.of(self._declared, namespace)
        key = offer_key(
            self._runtime.settings.runtime.namespace, offer.model, self._runtime.instance_id
        )
        await self._runtime.discovery.put(key, msgspec.json.encode(offer))


async def attach(
    service: type[Any],
    runtime: DistributedRuntime,
    section: Mapping[str, Any] | None = None,
    *,
    made: Any = None,
) -> Attached:
    """Make an instance of `service` (or take `made` in its place) and serve it until the runtime
    shuts down. `section`: its configuration. It is well while everything that it depends on is
    served. Raises `ConfigError`."""
    spec = spec_of(service)
    instance = object.__new__(service) if made is None else made
    if made is None:
        if section or config_type(service) is not None or not hasattr(service, ATTRIBUTE):
            instance.config = configuration_of(service, section or {})
        for name, other in spec.dependencies.items():
            handle = await connect(other, runtime)
            setattr(instance, name, handle)
            _follow(runtime, handle, spec_of(other).name)
        instance.__init__()
    if made is not None:
        spec = replace(spec, starts=(), stops=(), model="")
    attached = Attached(runtime, service, spec, instance)
    await attached.start()
    runtime.at_shutdown(attached.stop)
    return attached


def _absent(stand_in: Any, endpoint: EndpointSpec) -> Handler:
    """What a stand-in answers where it has no such method."""

    async def refuse(payload: bytes, out: Outgoing) -> None:
        del payload, out
        raise Unsupported(f"{type(stand_in).__name__} has no {endpoint.method!r}")

    return refuse


def handler_of(endpoint: EndpointSpec, method: Any) -> Handler:
    """The request plane's handler of one endpoint."""
    decode = request_decoder(endpoint)

    async def answer(payload: bytes, out: Outgoing) -> None:
        out.send(encode(await (method() if decode is None else method(decode(payload)))))

    async def stream(payload: bytes, out: Outgoing) -> None:
        send, credit = out.send, out.credit
        answers = method() if decode is None else method(decode(payload))
        async with aclosing(answers) as items:
            async for item in items:
                await credit()
                if not send(encode(item)):
                    return

    return stream if endpoint.streams else answer


def _follow(runtime: DistributedRuntime, handle: Handle, name: str) -> None:
    def look() -> None:
        if reason := handle.missing:
            runtime.health.unwell(name, reason)
        else:
            runtime.health.well_again(name)

    handle.on_change(look)
    look()
