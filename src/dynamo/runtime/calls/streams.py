"""Streams of msgpack items: `async for` or `await` for callers, a request handler for servers."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Sequence,
)
from contextlib import aclosing
from typing import Any, Never, Self

import msgspec

from dynamo.communication.requests import FlowWindow, RequestHandler, ResponseWriter, Sink
from dynamo.core.errors import ConfigError, ProtocolError
from dynamo.core.tasks import BackgroundTasks

WINDOW_BYTES = 256 << 10

encode_item = msgspec.msgpack.Encoder().encode
decode_item = msgspec.msgpack.Decoder().decode

StartCall = Callable[[Sink, FlowWindow], Coroutine[Any, Any, None]]
ItemFunction = Callable[[Any], AsyncGenerator[Any, None] | Awaitable[Any]]


class ReceiveQueue:
    """Payloads that arrived and were not consumed yet."""

    def __init__(self) -> None:
        self.items: deque[bytes] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.open = True
        self.error: BaseException | None = None

    def push(self, payload: bytes) -> bool:
        """Add a payload; the sink of the call. Returns False when the consumer has left."""
        self.items.append(payload)
        self._wake()
        return self.open

    def on_call_ended(self, task: asyncio.Task[None]) -> None:
        """Record the end of the call and its error."""
        self.open = False
        self.error = None if task.cancelled() else task.exception()
        self._wake()

    async def wait_for_item(self) -> None:
        """Wait for the next payload or the end."""
        self.waiter = asyncio.get_running_loop().create_future()
        await self.waiter

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class ResponseStream(AsyncIterator[Any]):
    """The answer of a call: `async with stream: async for item in stream`. `await stream` is the
    unary form and returns the only item, or None without an item. The call starts when the first
    item is requested. Leaving the `async with`, `aclose`, or dropping the object cancels the call.
    At most `window_bytes` are in flight."""

    def __init__(
        self,
        start: StartCall,
        window_bytes: int = WINDOW_BYTES,
        decode: Callable[[bytes], Any] = decode_item,
    ) -> None:
        self._start_call = start
        self._decode = decode
        self._window = FlowWindow(window_bytes)
        self._received = ReceiveQueue()
        self._tasks = BackgroundTasks(on_failure=lambda _: None)
        self._call: asyncio.Task[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        queue = self._received
        if self._call is None:
            self.begin()
        while not queue.items:
            if not queue.open:
                if queue.error is not None:
                    raise queue.error
                raise StopAsyncIteration
            await queue.wait_for_item()
        payload = queue.items.popleft()
        self._window.release(len(payload))
        return self._decode(payload)

    def begin(self) -> None:
        """Start the call before its first item is requested."""
        queue = self._received
        if self._call is None and queue.open:
            self._call = self._tasks.start(self._start_call(queue.push, self._window), "stream")
            self._call.add_done_callback(queue.on_call_ended)

    def cancel(self) -> None:
        """Cancel the call and drop the items that were not requested yet: the stream ends."""
        self._received.open = False
        self._received.items.clear()
        if self._call is not None:
            self._call.cancel()

    async def aclose(self) -> None:
        """Cancel the call if it is still running."""
        self._received.open = False
        await self._tasks.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._single_item().__await__()

    def __del__(self) -> None:
        if self._call is not None and not self._call.done():
            loop = self._call.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._call.cancel)

    async def _single_item(self) -> Any:
        async with aclosing(self):
            only = None
            async for item in self:
                if only is not None:
                    hint = "use `async for` instead of `await`"
                    raise ProtocolError("this endpoint streams several items", hint=hint)
                only = item
            return only


def item_handler(function: ItemFunction) -> RequestHandler:
    """Wrap `function(request)` as a handler of the request plane. An async generator function
    streams its items, a coroutine function answers with one item. Requests and items are msgpack
    values."""

    async def handle(payload: bytes, out: ResponseWriter) -> None:
        answer = function(decode_item(payload))
        if inspect.isasyncgen(answer):
            await send_items(answer, out)
        elif inspect.isawaitable(answer):
            out.send(encode_item(await answer))

    return handle


async def send_items(answer: AsyncGenerator[Any, Never], out: ResponseWriter) -> None:
    """Send the items of a generator until its end or that of the call, then close it."""
    async with aclosing(answer) as items:
        async for item in items:
            await out.wait_for_window()
            if not out.send(encode_item(item)):
                return


def check_handler(
    function: Callable[..., Any], path: str, parameters: Sequence[str], other: str
) -> None:
    """Raise `ConfigError` unless `function` takes these parameters. `other` ends the hint.

    A function without a readable signature is accepted.
    """
    if not callable(function):
        raise ConfigError(f"the handler of {path} is {function!r}, which cannot be called")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError:
        takes = ", ".join(parameters)
        raise ConfigError(
            f"the handler of {path} must take ({takes}): {function!r} does not",
            hint=f"write `async def handler({takes})`; {other}",
        ) from None
    except ValueError:
        return
    if "writer" in parameters and inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"the handler of {path} is an async generator, which sends nothing by the writer",
            hint="call writer.send(item) in it, or use serve_items",
        )
