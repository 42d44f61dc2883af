"""Serving of user services: create, connect and start an instance, and answer its calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.communication.requests import RequestHandler, ResponseWriter
from dynamo.core.clock import Clock
from dynamo.core.errors import (
    DeadlineExceeded,
    DynamoError,
    InstanceGone,
    Unsupported,
    WorkerFailed,
)
from dynamo.core.tasks import run_all
from dynamo.runtime import DistributedRuntime, ServedEndpoint
from dynamo.sdk.configuration import CONFIG_ATTRIBUTE, build_config, config_type
from dynamo.sdk.decorators import EndpointSpec, ServiceSpec, spec_of
from dynamo.sdk.handle import ServiceHandle, connect_service
from dynamo.sdk.request_context import set_current_request
from dynamo.sdk.serialization import encode, request_decoder
from dynamo.sdk.service_model import ServiceModelRecord, service_model_key
from dynamo.telemetry import Registry

DURATION_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 30, 60, 300),
)


class EndpointInterceptor:
    """Wraps the endpoint handlers of a service."""

    def __init__(self, service: str, clock: Clock, registry: Registry) -> None:
        self._service = service
        self._clock = clock
        self._requests = registry.counter(
            "dynamo_service_requests_total", "Calls answered", ("service", "endpoint", "code")
        )
        self._duration_seconds = registry.histogram(
            "dynamo_service_request_duration_seconds",
            "Time from a call to the end of its answer",
            DURATION_BUCKETS_S,
            ("service", "endpoint"),
        )
        self._inflight = registry.gauge(
            "dynamo_service_inflight_requests", "Calls being answered", ("service",)
        ).labels(service)

    def wrap(self, endpoint: str, handler: RequestHandler) -> RequestHandler:
        """Return `handler` with metrics and the deadline of each request."""
        now, inflight = self._clock.now, self._inflight
        seconds = self._duration_seconds.labels(self._service, endpoint)
        succeeded = self._requests.labels(self._service, endpoint, "ok")

        async def wrapped(payload: bytes, out: ResponseWriter) -> None:
            start = now()
            set_current_request(out.context, now)
            inflight.inc()
            try:
                await _with_deadline(out.context.timeout_s, handler, payload, out)
            except BaseException as error:
                self._requests.labels(self._service, endpoint, error_code(error)).inc()
                raise
            else:
                succeeded.inc()
            finally:
                inflight.dec()
                seconds.observe(now() - start)

        return wrapped


def error_code(error: BaseException) -> str:
    """Return the label value of an error in metrics."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return error.code if isinstance(error, DynamoError) else DynamoError.code


async def _with_deadline(
    limit_s: float | None, handler: RequestHandler, payload: bytes, out: ResponseWriter
) -> None:
    try:
        if limit_s is None:
            return await handler(payload, out)
        async with asyncio.timeout(limit_s) as limit:
            return await handler(payload, out)
    except InstanceGone as error:  # the callee is gone, not this instance
        raise WorkerFailed(error.message, hint=error.hint) from error
    except TimeoutError:
        if limit_s is None or not limit.expired():
            raise
        raise DeadlineExceeded(f"not answered within {limit_s:g} s") from None


class ServiceInstance(msgspec.Struct):
    """A served instance. `service` is the user's object."""

    runtime: DistributedRuntime
    service_class: type[Any]
    spec: ServiceSpec
    service: Any
    served_endpoints: list[ServedEndpoint] = []

    async def start(self) -> None:
        """Run the start hooks, then answer calls."""
        await self._run_hooks(self.spec.start_hooks)
        namespace = self.runtime.namespace(self.spec.namespace)
        component = namespace.component(self.spec.component)
        interceptor = EndpointInterceptor(self.spec.name, self.runtime.clock, self.runtime.metrics)
        for endpoint in self.spec.endpoints.values():
            if method := getattr(self.service, endpoint.method, None):
                handler = endpoint_handler(endpoint, method)
            else:
                handler = _unimplemented_handler(self.service, endpoint)
            handler = interceptor.wrap(endpoint.name, handler)
            self.served_endpoints.append(await component.endpoint(endpoint.name).serve(handler))
        if self.spec.model:
            await self._register_model(namespace.name)

    async def stop(self, drain_s: float) -> None:
        """Complete calls in flight for up to `drain_s`, then run the stop hooks."""
        await run_all(*(served.withdraw(drain_s) for served in self.served_endpoints))
        await self._run_hooks(self.spec.stop_hooks)

    async def _run_hooks(self, hooks: tuple[str, ...]) -> None:
        for hook in hooks:
            result = getattr(self.service, hook)()
            if inspect.isawaitable(result):
                await result

    async def _register_model(self, namespace: str) -> None:
        record = ServiceModelRecord.from_service(self.service_class, namespace)
        key = service_model_key(
            self.runtime.settings.runtime.namespace, record.model, self.runtime.instance_id
        )
        await self.runtime.discovery.put(key, msgspec.json.encode(record))


async def start_service(
    service: type[Any],
    runtime: DistributedRuntime,
    section: Mapping[str, Any] | None = None,
    *,
    service_object: Any = None,
) -> ServiceInstance:
    """Create an instance of `service` and serve it until the runtime shuts down.

    `section` is its configuration. A `service_object` replaces the instance, as a fake in tests.
    The process is healthy while all dependencies are served. Raises `ConfigError`.
    """
    spec = spec_of(service)
    if service_object is None:
        instance = object.__new__(service)
        if section or config_type(service) is not None or not hasattr(service, CONFIG_ATTRIBUTE):
            instance.config = build_config(service, section or {})
        for name, other in spec.dependencies.items():
            handle = await connect_service(other, runtime)
            setattr(instance, name, handle)
            _track_dependency_health(runtime, handle, spec_of(other).name)
        instance.__init__()
    else:
        instance = service_object
        spec = replace(spec, start_hooks=(), stop_hooks=(), model="")
    served = ServiceInstance(runtime, service, spec, instance)
    await served.start()
    runtime.add_shutdown_hook(served.stop)
    return served


def _unimplemented_handler(fake: Any, endpoint: EndpointSpec) -> RequestHandler:
    """Return a handler that refuses calls of an endpoint that a fake does not implement."""

    async def refuse(payload: bytes, out: ResponseWriter) -> None:
        del payload, out
        raise Unsupported(f"{type(fake).__name__} has no {endpoint.method!r}")

    return refuse


def endpoint_handler(endpoint: EndpointSpec, method: Any) -> RequestHandler:
    """Return the request plane's handler of an endpoint."""
    decode = request_decoder(endpoint)

    async def answer(payload: bytes, out: ResponseWriter) -> None:
        out.send(encode(await (method() if decode is None else method(decode(payload)))))

    async def stream(payload: bytes, out: ResponseWriter) -> None:
        send, wait_for_window = out.send, out.wait_for_window
        answers = method() if decode is None else method(decode(payload))
        async with aclosing(answers) as items:
            async for item in items:
                await wait_for_window()
                if not send(encode(item)):
                    return

    return stream if endpoint.streams else answer


def _track_dependency_health(runtime: DistributedRuntime, handle: ServiceHandle, name: str) -> None:
    def update() -> None:
        if reason := handle.unavailable_reason:
            runtime.health.set_unhealthy(name, reason)
        else:
            runtime.health.set_healthy(name)

    handle.on_change(update)
    update()
