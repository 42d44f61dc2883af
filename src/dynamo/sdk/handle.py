"""Calls of other services: a handle has their endpoints as methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from dynamo.communication.requests import FlowWindow, Sink
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, NoWorkers, ProtocolError, nearest_name_hint
from dynamo.runtime import Client, DistributedRuntime, ResponseStream
from dynamo.sdk.decorators import EndpointSpec, spec_of
from dynamo.sdk.request_context import derive_context
from dynamo.sdk.serialization import encode, response_decoder

INSTANCE_WAIT_S = 10.0
"""A call waits this long for an instance. A replica that died restarts sooner."""
MAX_ATTEMPTS = 3
STREAM_WINDOW_BYTES = 64 << 10
"""At most this many bytes of a stream are buffered for a slow reader."""
LOAD_BALANCING_MODE = "least_loaded"


class ServiceHandle:
    """Replaces `depends(...)` in a running service. `clients` are keyed by method name."""

    def __init__(self, service: type[Any], clients: dict[str, Client]) -> None:
        self._service = service
        self._clients = clients
        for method, endpoint in spec_of(service).endpoints.items():
            call = StreamingStub if endpoint.streams else UnaryStub
            setattr(self, method, call(endpoint, clients[method]))

    def __getattr__(self, name: str) -> NoReturn:
        spec = spec_of(self._service)
        raise AttributeError(
            f"{spec.name} has no endpoint {name!r}; {nearest_name_hint(name, spec.endpoints)}",
            name=name,
            obj=self,
        )

    @property
    def unavailable_reason(self) -> str:
        """The reason why a call would have to wait now, or ""."""
        for client in self._clients.values():
            if not client.instances:
                return f"no instance serves {client.path}"
        return ""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the set of instances changes."""
        for client in self._clients.values():
            client.on_change(callback)


async def connect_service(service: type[Any], runtime: DistributedRuntime) -> ServiceHandle:
    """Return a handle that follows the instances of `service` until the runtime shuts down."""
    spec = spec_of(service)
    component = runtime.namespace(spec.namespace).component(spec.component)
    clients = {
        method: await component.endpoint(endpoint.name).client()
        for method, endpoint in spec.endpoints.items()
    }
    return ServiceHandle(service, clients)


async def call_with_retries(
    client: Client, payload: bytes, context: Context, sink: Sink, window: FlowWindow | None = None
) -> None:
    """Call the least loaded instance. Raises `NoWorkers` and the errors of the instance.

    A call to an instance that is gone had no effect, so it is repeated with another instance.
    """
    attempts = 0
    while True:
        try:
            instance = client.pick(LOAD_BALANCING_MODE)
        except NoWorkers:
            await client.wait_for_instances(timeout_s=INSTANCE_WAIT_S)
            instance = client.pick(LOAD_BALANCING_MODE)
        try:
            return await client.call(instance, payload, context, sink, window=window)
        except InstanceGone:
            attempts += 1
            if attempts == MAX_ATTEMPTS:
                raise


class EndpointStub:
    """An endpoint of another service."""

    def __init__(self, endpoint: EndpointSpec, client: Client) -> None:
        self._client = client
        self._decode = response_decoder(endpoint)


class UnaryStub(EndpointStub):
    """Implements `await handle.method(request)`."""

    async def __call__(self, request: Any = None) -> Any:
        answers: list[bytes] = []

        def sink(payload: bytes) -> bool:
            answers.append(payload)
            return True

        await call_with_retries(self._client, encode(request), derive_context(), sink)
        if len(answers) != 1:
            raise ProtocolError(f"{len(answers)} answers instead of one")
        return self._decode(answers[0])


class StreamingStub(EndpointStub):
    """Implements `async for item in handle.method(request)`."""

    def __call__(self, request: Any = None) -> ResponseStream:
        payload, context = encode(request), derive_context()

        async def start(sink: Sink, window: FlowWindow) -> None:
            await call_with_retries(self._client, payload, context, sink, window)

        return ResponseStream(start, STREAM_WINDOW_BYTES, self._decode)
