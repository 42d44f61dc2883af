"""The calling end: another service's endpoints as methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from dynamo.communication.requests import FlowWindow, Sink
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, NoWorkers, ProtocolError
from dynamo.runtime import Client, DistributedRuntime, ResponseStream
from dynamo.sdk.decorators import EndpointSpec, nearest_name_hint, spec_of
from dynamo.sdk.request_context import derive_context
from dynamo.sdk.serialization import encode, response_decoder

INSTANCE_WAIT_S = 10.0
"""A call waits so long for somebody to serve it: a replica that died is back sooner."""
MAX_ATTEMPTS = 3
STREAM_WINDOW_BYTES = 64 << 10
LOAD_BALANCING_MODE = "least_loaded"


class ServiceHandle:
    """What `depends` becomes in a running service. `clients`: by method, for those who look."""

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
        """Why a call would have to wait now; "" where it would not."""
        for client in self._clients.values():
            if not client.instances:
                return f"nobody serves {client.path}"
        return ""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` when who serves it changed."""
        for client in self._clients.values():
            client.on_change(callback)


async def connect_service(service: type[Any], runtime: DistributedRuntime) -> ServiceHandle:
    """A handle that knows who serves `service` now; it ends with the runtime."""
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
    """Call whichever instance has the least to do. One that is gone did nothing, so another is
    asked. Raises `NoWorkers`, and whatever the instance raised."""
    tries = 0
    while True:
        try:
            instance = client.pick(LOAD_BALANCING_MODE)
        except NoWorkers:
            await client.wait_for_instances(timeout_s=INSTANCE_WAIT_S)
            instance = client.pick(LOAD_BALANCING_MODE)
        try:
            return await client.call(instance, payload, context, sink, window=window)
        except InstanceGone:
            tries += 1
            if tries == MAX_ATTEMPTS:
                raise


class EndpointStub:
    """One endpoint of another service."""

    __slots__ = ("_client", "_decode")

    def __init__(self, endpoint: EndpointSpec, client: Client) -> None:
        self._client = client
        self._decode = response_decoder(endpoint)


class UnaryStub(EndpointStub):
    """`await handle.method(request)`."""

    __slots__ = ()

    async def __call__(self, request: Any = None) -> Any:
        answers: list[bytes] = []

        def sink(payload: bytes) -> bool:
            answers.append(payload)
            return True

        await call_with_retries(self._client, encode(request), derive_context(), sink)
        if len(answers) != 1:
            raise ProtocolError(f"{len(answers)} answers to a call that has one")
        return self._decode(answers[0])


class StreamingStub(EndpointStub):
    """`async for item in handle.method(request)`. At most `WINDOW_BYTES` wait for a slow reader."""

    __slots__ = ()

    def __call__(self, request: Any = None) -> ResponseStream:
        payload, context = encode(request), derive_context()

        async def start(sink: Sink, window: FlowWindow) -> None:
            await call_with_retries(self._client, payload, context, sink, window)

        return ResponseStream(start, STREAM_WINDOW_BYTES, self._decode)
