"""The endpoints that this process serves, and their calls in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo.communication.requests.plane import RequestHandler
from dynamo.communication.requests.server_streams import ServerStream
from dynamo.core.errors import DynamoError, InstanceGone, InternalError, NotFound, WorkerFailed
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.telemetry.logs import request_id

log = logging.getLogger(__name__)


class Endpoints:
    """Table of served endpoints. `on_empty` is called when the last one is withdrawn."""

    def __init__(self) -> None:
        self.on_empty: list[Callable[[], None]] = []
        self._calls_by_endpoint: dict[str, _EndpointCalls] = {}
        self._withdrawn: set[str] = set()

    def serve(self, name: str, handler: RequestHandler) -> None:
        """Serve calls for `name`. Raises `ValueError` if it is served already."""
        if name in self._calls_by_endpoint:
            raise ValueError(f"endpoint {name!r} is served already")
        self._withdrawn.discard(name)
        self._calls_by_endpoint[name] = _EndpointCalls(name, handler)

    def start(self, name: str, payload: bytes, stream: ServerStream) -> None:
        """Run the handler of one call as a task. An unknown name fails the call."""
        calls = self._calls_by_endpoint.get(name)
        if calls is not None:
            calls.start(payload, stream)
        elif name in self._withdrawn:
            stream.end(InstanceGone(f"endpoint {name!r} was withdrawn from this instance"))
        else:
            stream.end(NotFound(f"this instance has no endpoint {name!r}"))

    def count_calls(self) -> int:
        """Return how many calls are in flight."""
        return sum(len(calls.open_streams) for calls in self._calls_by_endpoint.values())

    async def withdraw(self, name: str, drain_s: float | None) -> None:
        """Refuse new calls for `name`, drain those in flight as `Requests.withdraw` says."""
        calls = self._remove(name)
        if calls is None:
            return
        if not self._calls_by_endpoint:
            for callback in self.on_empty:
                callback()
        await calls.drain(drain_s)

    def _remove(self, name: str) -> _EndpointCalls | None:
        calls = self._calls_by_endpoint.pop(name, None)
        if calls is not None:
            self._withdrawn.add(name)
        return calls

    async def close(self) -> None:
        """Refuse new calls and cancel those in flight."""
        removed = [self._remove(name) for name in list(self._calls_by_endpoint)]
        await run_all(*(calls.drain(0.0) for calls in removed if calls is not None))


class _EndpointCalls:
    def __init__(self, name: str, handler: RequestHandler) -> None:
        self._name = name
        self._handler = handler
        self._tasks = BackgroundTasks()
        self.open_streams: dict[ServerStream, None] = {}

    def start(self, payload: bytes, stream: ServerStream) -> None:
        self.open_streams[stream] = None
        stream.endpoint_streams = self.open_streams
        stream.task = self._tasks.start(self._run(payload, stream))

    async def drain(self, drain_s: float | None) -> None:
        """Wait up to `drain_s` (None: no limit) for calls in flight, then cancel them."""
        if drain_s != 0.0:
            try:
                async with asyncio.timeout(drain_s):
                    await self._tasks.join()
            except TimeoutError:
                log.warning(
                    "calls cancelled after the drain timeout",
                    extra={"fields": {"endpoint": self._name, "calls": len(self.open_streams)}},
                )
        for stream in list(self.open_streams):
            stream.end(WorkerFailed("the instance stopped before it had answered"))
        await self._tasks.close()

    async def _run(self, payload: bytes, stream: ServerStream) -> None:
        request_id.set(stream.context.request_id)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("call", extra={"fields": {"endpoint": self._name}})
        try:
            await self._handler(payload, stream)
        except DynamoError as error:
            stream.end(error)
        except asyncio.CancelledError:
            stream.end(WorkerFailed("the instance cancelled this call"))
            raise
        except Exception:
            log.exception("handler failed", extra={"fields": {"endpoint": self._name}})
            message = f"the handler of endpoint {self._name!r} failed"
            stream.end(InternalError(message, hint="see the log of the process that serves it"))
        else:
            stream.end()
