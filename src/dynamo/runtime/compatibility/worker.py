"""The decorators of NVIDIA Dynamo's bindings: `@dynamo_worker()` and `@dynamo_endpoint(...)`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import wraps
from typing import Any, TypeVar

from dynamo.core.errors import ConfigError, InvalidRequest
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.compatibility.calls import CompatClient, CompatContext
from dynamo.runtime.compatibility.errors import static_error
from dynamo.runtime.compatibility.objects import CompatEndpoint, CompatRuntime
from dynamo.runtime.distributed import DistributedRuntime

R = TypeVar("R")
WorkerFunction = Callable[..., Coroutine[Any, Any, R]]
CLEANUP_S = 5.0
"""The time that a worker function has to end when its endpoints have drained."""


def dynamo_worker(
    enable_nats: bool | None = None, *, static: bool = False
) -> Callable[[WorkerFunction[R]], Callable[..., Coroutine[Any, Any, R | None]]]:
    """Decorate `async def worker(runtime, ...)`, which is then called without the runtime.

    The runtime has the planes of the environment (`DYN_...`, `DYNAMO_...`). SIGINT and SIGTERM
    drain the served endpoints, then cancel the function. `enable_nats` has no effect. Raises
    `ConfigError` for `static=True`.
    """
    if callable(enable_nats):
        raise ConfigError("@dynamo_worker needs its parentheses", hint="write @dynamo_worker()")
    if static:
        raise static_error()

    def decorate(function: WorkerFunction[R]) -> Callable[..., Coroutine[Any, Any, R | None]]:
        @wraps(function)
        async def run(*args: Any, **kwargs: Any) -> R | None:
            runtime = CompatRuntime.create(DistributedRuntime, asyncio.get_running_loop())
            runtime.stop_on(signal.SIGINT, signal.SIGTERM)
            try:
                return await _run_until_stopped(runtime, function(runtime, *args, **kwargs))
            finally:
                runtime.shutdown()
                await runtime.closed.wait()

        return run

    return decorate


async def _run_until_stopped(runtime: CompatRuntime, worker: Coroutine[Any, Any, R]) -> R | None:
    """Return the worker's result, or None if it was cancelled. Raises `ConfigError`."""
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        running = tasks.start(worker)
        stopping = tasks.start(runtime.native.stopping.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await runtime.ready()  # raises why it could not open
        if not running.done() and runtime.drains:
            await runtime.closed.wait()
            await asyncio.wait({running}, timeout=CLEANUP_S)
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
        async def checked(*args: Any, **named: Any) -> AsyncIterator[Any]:
            *others, request = args
            checked_request = _validate(request_model, request)
            async with aclosing(function(*others, checked_request, **named)) as items:
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


class UnaryClient:
    """Calls an endpoint that answers with one item."""

    def __init__(self, client: CompatClient) -> None:
        self._client = client

    async def complete(self, request: Any, *, context: CompatContext | None = None) -> Any:
        """Return the only item. Raises `RuntimeError` for no item and for several."""
        stream = await self._client.round_robin(request, annotated=False, context=context)
        items = [item async for item in stream]
        if len(items) != 1:
            raise RuntimeError(f"a unary endpoint answered with {len(items)} items")
        return items[0]


async def serve_unary_endpoint(
    endpoint: CompatEndpoint, handler: Callable[..., Awaitable[Any]]
) -> None:
    """Serve `handler(request, context=...)`, a coroutine function."""

    async def generate(request: Any, context: CompatContext) -> AsyncGenerator[Any, None]:
        yield await handler(request, context=context)

    await endpoint.serve_endpoint(generate)
