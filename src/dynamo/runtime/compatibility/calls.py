"""Contexts, clients and streams with the names of NVIDIA Dynamo's bindings."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self
from weakref import WeakSet

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, InstanceGone, InvalidRequest
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.calls.streams import ResponseStream
from dynamo.runtime.compatibility.errors import RefusedByHandler, handler_error, refuse_name


class CompatContext:
    """The context of a call. A handler sees in it that its caller has stopped the call or left; it
    is closed at its second `yield` after that. `metadata` is passed on with the call."""

    def __init__(
        self,
        id: str | None = None,  # noqa: A002 - the name of the bindings
        metadata: dict[str, str] | None = None,
        *,
        trace: str = "",
    ) -> None:
        self._id = id or str(uuid.uuid4())
        self._trace = trace
        self.metadata = dict(metadata or {})
        self._stopped = self._killed = False
        self._waiters: list[asyncio.Future[bool]] = []
        self._streams: WeakSet[CompatStream] = WeakSet()

    def id(self) -> str:
        """Return the request id."""
        return self._id

    def detached(self, id: str) -> CompatContext:  # noqa: A002
        """Return a context with the same trace and metadata that is stopped apart from this one."""
        return CompatContext(id, self.metadata, trace=self._trace)

    def stop_generating(self) -> None:
        """End the streams of all calls with this context."""
        self._stopped = True
        for stream in tuple(self._streams):
            stream.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)

    def kill(self) -> None:
        """Stop, because nobody reads the answer any more."""
        self._killed = True
        self.stop_generating()

    def is_stopped(self) -> bool:
        """Whether the call was stopped here or by its caller, or its caller has left."""
        return self._stopped

    def is_killed(self) -> bool:
        """Whether nobody reads the answer any more. A handler cannot tell why: its caller has
        stopped the call, or has left."""
        return self._killed

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Return a future that becomes True when the call is stopped."""
        waiter = asyncio.get_running_loop().create_future()
        if self._stopped:
            waiter.set_result(True)
        self._waiters.append(waiter)
        return waiter

    def notify_first_token(self) -> None:
        """Do nothing: the first token is seen without it."""

    @property
    def trace_id(self) -> str | None:
        """The id of the caller's trace."""
        return self._trace_part(1)

    @property
    def span_id(self) -> str | None:
        """The id of the caller's span, under which this call is."""
        return self._trace_part(2)

    parent_span_id = span_id

    def trace_headers(self) -> dict[str, str]:
        """Return the headers that continue the trace."""
        return {"traceparent": self._trace} if self._trace else {}

    def call_context(self) -> Context:
        """Return the context of a call to an endpoint."""
        return Context(self._id, trace=self._trace, metadata=dict(self.metadata))

    def add_stream(self, stream: CompatStream) -> None:
        """Cancel `stream` when this context is stopped."""
        self._streams.add(stream)
        if self._stopped:
            stream.cancel()

    def _trace_part(self, number: int) -> str | None:
        parts = self._trace.split("-")
        return parts[number] if len(parts) > number else None


async def await_handler(
    tasks: BackgroundTasks,
    work: Coroutine[Any, Any, object],
    context: CompatContext,
    reads_context: bool,
) -> None:
    """Wait for a handler's work. If this is cancelled, since the caller has left, a handler that
    reads its context continues as a task of `tasks`; others are cancelled."""
    running = tasks.start(work)
    try:
        await asyncio.wait({running})
    except asyncio.CancelledError:
        context.kill()
        if not reads_context:
            running.cancel()
        raise
    running.result()


async def pass_on(answer: Any, send: Callable[[Any], Awaitable[bool]]) -> bool:
    """Send the items of a handler's answer. Returns whether all were sent.

    A handler continues after an item that is not wanted, to see that its context is stopped, and is
    closed at its next item. Raises `ConfigError` for an answer that is no async iterator.
    """
    if not isinstance(answer, AsyncIterator):
        raise ConfigError(
            f"the handler returned {answer!r}, which is no async iterator",
            hint="write an async generator function: use `yield` in it",
        )
    wanted = True
    try:
        async with AsyncExitStack() as stack:
            if isinstance(answer, AsyncGenerator):
                stack.push_async_callback(answer.aclose)
            async for item in answer:
                if not wanted:
                    return False
                wanted = await send(item)
    except Exception as error:
        raise handler_error(error) from error
    return wanted


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

    def __repr__(self) -> str:
        return f"Annotated(data={self._value!r})"


class CompatStream(AsyncIterator[Any]):
    """The answer of a call that has begun. Dropping the object cancels the call."""

    def __init__(
        self, stream: ResponseStream, annotated: bool, context: CompatContext | None
    ) -> None:
        self._stream = stream
        self._annotated = annotated
        stream.begin()
        if context is not None:
            context.add_stream(self)

    def cancel(self) -> None:
        """End the stream before its next item, and cancel the call."""
        self._stream.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await anext(self._stream)
        except InvalidRequest as error:
            raise RefusedByHandler(error.message, hint=error.hint) from error
        return CompatItem(item) if self._annotated else item

    async def aclose(self) -> None:
        """Cancel the call if it is still running."""
        await self._stream.aclose()


def instance_number(instance_id: str) -> int:
    """Return the number that stands for an instance: the random part of its id."""
    return int(instance_id.rpartition("-")[2], 16)


class CompatClient:
    """The calls of an endpoint. Awaiting a call begins it and returns an async iterator.
    `generate` chooses instances by `mode`: "round_robin" or "random"."""

    def __init__(self, client: Client, mode: str = "round_robin") -> None:
        self._client = client
        self._mode = mode

    def __getattr__(self, name: str) -> Any:
        refuse_name("client", name)

    def instance_ids(self) -> list[int]:
        """Return the numbers of the live instances."""
        return [instance_number(name) for name in self._client.instances]

    def instances(self) -> list[Instance]:
        """Return the records of the live instances."""
        return list(self._client.instances.values())

    async def wait_for_instances(self) -> list[int]:
        """Wait for the first instance. Returns the numbers of all."""
        await self._client.wait_for_instances()
        return self.instance_ids()

    async def generate(
        self, request: Any, annotated: bool | None = True, context: CompatContext | None = None
    ) -> CompatStream:
        """Call an instance. Without `annotated`, items are plain values."""
        call = partial(self._client.generate, mode=self._mode)
        return self._stream(call, request, annotated, context)

    async def round_robin(
        self, request: Any, annotated: bool | None = True, context: CompatContext | None = None
    ) -> CompatStream:
        """Call the next instance."""
        return self._stream(self._client.round_robin, request, annotated, context)

    async def random(
        self, request: Any, annotated: bool | None = True, context: CompatContext | None = None
    ) -> CompatStream:
        """Call a random instance."""
        return self._stream(self._client.random, request, annotated, context)

    async def direct(
        self,
        request: Any,
        instance_id: int,
        annotated: bool | None = True,
        context: CompatContext | None = None,
    ) -> CompatStream:
        """Call one instance. Raises `InstanceGone` for a number that is not live."""
        for name in self._client.instances:
            if instance_number(name) == int(instance_id):
                call = partial(self._client.direct, instance_id=name)
                return self._stream(call, request, annotated, context)
        raise InstanceGone(f"instance {instance_id} of {self._client.path} is not live")

    def _stream(
        self,
        call: Callable[..., ResponseStream],
        request: Any,
        annotated: bool | None,
        context: CompatContext | None,
    ) -> CompatStream:
        if not self._client.instances:
            raise self._client.no_workers_error()
        call_context = context and context.call_context()
        stream = call(request, context=call_context)
        return CompatStream(stream, annotated is not False, context)
