"""The Python API of NVIDIA Dynamo 1.x over this runtime, for programs that move here.

    @dynamo_worker()
    async def worker(runtime):
        await runtime.endpoint("hello.backend.generate").serve_endpoint(handler)

Public names, arguments and results are those of NVIDIA Dynamo's Python bindings. Instance ids are
texts here. `docs/how-to/migrate.md` lists what differs and what does not exist.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial, wraps
from typing import Any, TypeVar

from dynamo.communication.requests import RequestHandler, ResponseWriter
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, InvalidRequest, Unsupported
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.streams import ResponseStream, decode_item, send_items
from dynamo.runtime.component import Component, Endpoint, Namespace
from dynamo.runtime.distributed import DistributedRuntime

R = TypeVar("R")
WorkerFunction = Callable[..., Coroutine[Any, Any, R]]
HINT = "runtime.native is this project's own runtime"


def dynamo_worker(
    static: bool = False, *, enable_nats: bool = True
) -> Callable[[WorkerFunction[R]], Callable[..., Coroutine[Any, Any, R | None]]]:
    """Decorate `async def worker(runtime, ...)`, which is then called without the runtime.

    The runtime has the planes of the environment (`DYNAMO_...`). SIGINT and SIGTERM drain the
    served endpoints, then cancel the function. Raises `ConfigError` for `static=True`.
    """
    del enable_nats  # the settings choose the request plane
    if callable(static):
        raise ConfigError("@dynamo_worker needs its parentheses", hint="write @dynamo_worker()")
    if static:
        raise ConfigError(
            "dynamo_worker(static=True): workers without discovery do not exist here",
            hint="leave static out: the default discovery needs no server",
        )

    def decorate(function: WorkerFunction[R]) -> Callable[..., Coroutine[Any, Any, R | None]]:
        @wraps(function)
        async def run(*args: Any, **kwargs: Any) -> R | None:
            async with await DistributedRuntime.create(role="process") as runtime:
                return await _run_until_stopped(
                    runtime, function(CompatRuntime(runtime), *args, **kwargs)
                )

        return run

    return decorate


async def _run_until_stopped(
    runtime: DistributedRuntime, worker: Coroutine[Any, Any, R]
) -> R | None:
    """Return the worker's result, or None after a signal or the stop of the runtime."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(number, runtime.stopping.cancel)

    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        running = tasks.start(worker)
        stopping = tasks.start(runtime.stopping.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await runtime.shutdown()
            await asyncio.wait({running}, timeout=0)
        return running.result() if running.done() else None


def dynamo_endpoint(
    request_model: Any = Any, response_model: Any = Any
) -> Callable[[Callable[..., AsyncGenerator[Any, None]]], Callable[..., Any]]:
    """Decorate an async generator function whose last argument is the request.

    A pydantic `request_model` validates the request, and pydantic answers are sent as dicts.
    """
    del response_model  # answers are whatever the function yields

    def decorate(function: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., Any]:
        @wraps(function)
        async def checked(*args: Any) -> AsyncIterator[Any]:
            *others, request = args
            async with aclosing(function(*others, _validate(request_model, request))) as items:
                async for item in items:
                    yield item.model_dump() if hasattr(item, "model_dump") else item

        return checked

    return decorate


def _validate(model: Any, request: Any) -> Any:
    if not hasattr(model, "model_validate"):
        return request
    is_json = isinstance(request, str | bytes)
    validate = model.model_validate_json if is_json else model.model_validate
    try:
        return validate(request)
    except ValueError as error:
        raise InvalidRequest(f"{model.__name__}: {error}") from None


class CompatContext:
    """The context of a call. A handler whose caller has left is cancelled at its next `yield`."""

    def __init__(self, id: str = "") -> None:  # noqa: A002 - the name of the bindings
        self._id = id
        self._stopped = asyncio.Event()

    def id(self) -> str:
        """Return the request id, or "" before a call has given one."""
        return self._id

    def stop_generating(self) -> None:
        """End the stream of the call after its present item."""
        self._stopped.set()

    kill = stop_generating

    def is_stopped(self) -> bool:
        """Whether `stop_generating` was called, or the caller has left."""
        return self._stopped.is_set()

    is_killed = is_stopped

    async def async_killed_or_stopped(self) -> bool:
        """Wait until the call is stopped. Returns True."""
        return await self._stopped.wait()


class CompatItem:
    """An item of an answer, as `data()`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def data(self) -> Any:
        """Return the value that the handler yielded."""
        return self._value

    def is_error(self) -> bool:
        """Return False: errors are raised by the stream."""
        return False


class CompatClient:
    """The calls of an endpoint. Awaiting a call returns an async iterator of `CompatItem`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def instance_ids(self) -> list[str]:
        """Return the ids of the live instances."""
        return list(self._client.instances)

    async def wait_for_instances(self) -> list[str]:
        """Wait for the first instance. Returns the ids of all."""
        await self._client.wait_for_instances()
        return self.instance_ids()

    async def generate(
        self, request: Any, annotated: bool = True, context: CompatContext | None = None
    ) -> AsyncIterator[Any]:
        """Call the next instance. Without `annotated`, items are plain values."""
        return self._stream(self._client.generate, request, annotated, context)

    round_robin = generate

    async def random(
        self, request: Any, annotated: bool = True, context: CompatContext | None = None
    ) -> AsyncIterator[Any]:
        """Call a random instance."""
        return self._stream(self._client.random, request, annotated, context)

    async def direct(
        self,
        request: Any,
        instance_id: str,
        annotated: bool = True,
        context: CompatContext | None = None,
    ) -> AsyncIterator[Any]:
        """Call one instance."""
        call = partial(self._client.direct, instance_id=instance_id)
        return self._stream(call, request, annotated, context)

    async def _stream(
        self,
        call: Callable[..., ResponseStream],
        request: Any,
        annotated: bool,
        context: CompatContext | None,
    ) -> AsyncIterator[Any]:
        call_context = Context(context.id()) if context is not None and context.id() else None
        async with call(request, context=call_context) as stream:
            async for item in stream:
                yield CompatItem(item) if annotated else item
                if context is not None and context.is_stopped():
                    return


class CompatEndpoint:
    """An endpoint of a component."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def serve_endpoint(
        self,
        handler: Callable[..., AsyncGenerator[Any, None]],
        graceful_shutdown: bool = True,
        metrics_labels: Any = None,
        health_check_payload: Any = None,
    ) -> None:
        """Serve `handler(request)` or `handler(request, context)` until the process stops.

        The last three arguments have no effect: the runtime always drains, labels its metrics and
        probes its processes by itself. Raises `ConfigError` for a handler that is no async
        generator function.
        """
        del graceful_shutdown, metrics_labels, health_check_payload
        await self._endpoint.serve(_generator_handler(handler, self._endpoint.path))
        await self._endpoint.runtime.stopping.wait()

    async def client(self) -> CompatClient:
        """Open a client."""
        return CompatClient(await self._endpoint.client())


def _generator_handler(
    function: Callable[..., AsyncGenerator[Any, None]], path: str
) -> RequestHandler:
    if not inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"the handler of {path} must be an async generator function", hint="use `yield` in it"
        )
    takes_context = len(inspect.signature(function, follow_wrapped=False).parameters) == 2

    async def handle(payload: bytes, out: ResponseWriter) -> None:
        context, request = CompatContext(out.context.request_id), decode_item(payload)
        try:
            answer = function(request, context) if takes_context else function(request)
            await send_items(answer, out)
        finally:
            context.stop_generating()

    return handle


class CompatComponent:
    """A component of a namespace."""

    def __init__(self, component: Component) -> None:
        self._component = component

    def endpoint(self, name: str) -> CompatEndpoint:
        """Return an endpoint of this component."""
        return CompatEndpoint(self._component.endpoint(name))

    async def create_service(self) -> None:
        """Do nothing: a component exists once an endpoint is served."""


class CompatNamespace:
    """A namespace."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def component(self, name: str) -> CompatComponent:
        """Return a component of this namespace."""
        return CompatComponent(self._namespace.component(name))


class CompatRuntime:
    """The runtime that `@dynamo_worker` passes on. `native` is the runtime below."""

    def __init__(self, native: DistributedRuntime) -> None:
        self.native = native

    def namespace(self, name: str) -> CompatNamespace:
        """Return a namespace."""
        return CompatNamespace(self.native.namespace(name))

    def endpoint(self, reference: str) -> CompatEndpoint:
        """Return the endpoint of `namespace.component.endpoint`."""
        return CompatEndpoint(self.native.endpoint(reference))

    def shutdown(self) -> None:
        """Stop this process: served endpoints drain."""
        self.native.stopping.cancel()

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"runtime.{name} of NVIDIA Dynamo does not exist here", hint=HINT)
