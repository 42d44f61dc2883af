"""One client's connection: requests in, responses out, in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from typing import cast

from dynamo.communication.http.flusher import Flusher
from dynamo.communication.http.heads import CONTINUE
from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.request import Request, RequestReader
from dynamo.communication.http.response import Response
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, InternalError, RequestTooSlow
from dynamo.core.tasks import Tasks

log = logging.getLogger(__name__)

Handler = Callable[[Request, Response], Awaitable[None]]
OnError = Callable[[DynamoError, str], tuple[int, bytes]]
JSON = (("content-type", "application/json"),)


class Shared:
    """What all connections of one server have in common."""

    __slots__ = ("clock", "connections", "flusher", "handler", "limits", "on_error", "tasks")

    def __init__(
        self, handler: Handler, limits: HttpLimits, clock: Clock, on_error: OnError
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.clock = clock
        self.on_error = on_error
        self.tasks = Tasks()
        self.connections: set[Connection] = set()
        self.flusher = Flusher(asyncio.get_running_loop())


class Connection(asyncio.Protocol):
    """Requests that were read ahead wait in `_queue`; at most one is being answered.

    `deadline`: when the sweep must look at this connection; `paused_at`: since when the kernel
    takes no more bytes.
    """

    __slots__ = (
        "_armed",
        "_deaf",
        "_due",
        "_lost",
        "_progress",
        "_queue",
        "_reader",
        "_reading_since",
        "_response",
        "_seen",
        "_shared",
        "_task",
        "_transport",
        "_written",
        "closing",
        "deadline",
        "events",
        "framed",
        "out",
        "paused_at",
        "write",
    )

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._reader = RequestReader(shared.limits, self._enqueue, self._continue)
        self._queue: deque[Request | DynamoError] = deque()
        self._task: asyncio.Task[None] | None = None
        self._response: Response | None = None
        self.out: list[bytes] = []
        self.events: list[bytes] = []
        self.framed = False
        self._armed = False
        self._due = shared.flusher.due
        self._deaf = False  # input is thrown away
        self._lost = False
        self.closing = False  # close once everything is sent
        self._seen = 0
        self._reading_since = 0.0
        self._written = 0
        self._progress = (0, 0.0)
        self.paused_at: float | None = None
        limits = shared.limits  # who has asked for nothing yet has no claim to wait for long
        self.deadline = shared.clock.now() + min(limits.header_timeout_s, limits.idle_timeout_s)

    # input

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.write: Callable[[bytes], None] = self._transport.write
        self._transport.set_write_buffer_limits(self._shared.limits.high_water_bytes)
        self._shared.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            if not self._reader.feed(data):
                self._deaf = True
        except DynamoError as error:
            self._refuse(error)
            return
        if self._reader.stage != "idle":
            self._watch()

    def eof_received(self) -> bool:
        return False  # a client that stops sending has gone: nothing tells a half-close apart

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._shared.connections.discard(self)
        self._deaf = self._lost = True
        self._queue.clear()
        self.deadline = inf
        self.paused_at = None
        self._reader.close()
        response, self._response = self._response, None
        if response is not None and not response.ended:
            response.open = False
            if self._task is not None:
                self._shared.tasks.drop(self._task)

    def _enqueue(self, request: Request) -> None:
        self.deadline = inf
        if self._task is None:
            self._answer(request)
            return
        self._queue.append(request)
        if len(self._queue) == self._shared.limits.pipelined:
            self._transport.pause_reading()

    def _continue(self) -> None:
        if self._task is None and not self._queue:
            self.out.append(CONTINUE)
            self.arm()

    def _watch(self) -> None:
        """A request has come in part: it must go on."""
        now = self._shared.clock.now()
        reader, limits = self._reader, self._shared.limits
        if reader.started != self._seen:
            self._seen = reader.started
            self._reading_since = now
        if reader.stage == "headers":
            self.deadline = self._reading_since + limits.header_timeout_s
        else:
            earned = self._reading_since + reader.body_bytes / limits.body_rate
            self.deadline = min(now, earned) + limits.header_timeout_s

    # one request after the other

    def _refuse(self, error: DynamoError) -> None:
        """Answer with `error` when its turn comes, then close."""
        if self._deaf:
            return
        self._deaf = True
        self.deadline = inf
        self._queue.append(error)
        if self._task is None:
            self._next()

    def _next(self) -> None:
        item = self._queue.popleft()
        if isinstance(item, DynamoError):
            response = self._begin("GET", "1.1", keep_alive=False)
            status, body = self._shared.on_error(item, "")
            response.send(status, JSON, body)
            self._linger()
            return
        self._answer(item)

    def _answer(self, request: Request) -> None:
        response = self._begin(request.method, request.version, keep_alive=request.keep_alive)
        self._task = self._shared.tasks.run(self._serve(request, response))

    def _begin(self, method: str, version: str, *, keep_alive: bool) -> Response:
        limit = self._shared.limits.stream_backlog_bytes
        self._response = Response(self, method, version, keep_alive=keep_alive, backlog_limit=limit)
        return self._response

    async def _serve(self, request: Request, response: Response) -> None:
        try:
            await self._shared.handler(request, response)
            if not response.ended:
                raise InternalError("the handler left its response unfinished")  # noqa: TRY301
        except DynamoError as error:
            self._fail(response, error)
        except Exception:
            log.exception("request handler failed", extra={"fields": {"path": request.path}})
            self._fail(response, InternalError("internal error"))
        finally:
            self._finished(response)

    def _fail(self, response: Response, error: DynamoError) -> None:
        if response.started:
            self.abort()
        else:
            status, body = self._shared.on_error(error, "")
            response.send(status, JSON, body)

    def _finished(self, response: Response) -> None:
        task, self._task = self._task, None
        if task is not None:
            self._shared.tasks.over(task)
        if not response.ended:
            self.abort()
        elif not response.keep_alive:
            self._queue.clear()
            self.close()
        elif self._queue:
            if len(self._queue) == self._shared.limits.pipelined:
                self._transport.resume_reading()
            self._next()
        elif self._reader.stage == "idle":
            self.deadline = self._shared.clock.now() + self._shared.limits.idle_timeout_s

    # output

    def arm(self) -> None:
        if self._armed:
            return
        self._armed = True
        due = self._due
        if not due:
            self._shared.flusher.wake()
        due.append(self)

    def take(self) -> bytes:
        self._armed = False
        out, events = self.out, self.events
        if len(events) == 1 and self.framed and not out:
            event = events.pop()
            data = b"%x\r\n%b\r\n" % (len(event), event)
        else:
            self.join()
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
        if self._lost:
            return b""
        self._written += len(data)
        return data

    def join(self) -> None:
        events = self.events
        if events:
            data = b"".join(events)
            events.clear()
            self.out.append(b"%x\r\n%b\r\n" % (len(data), data) if self.framed else data)

    def written(self) -> None:
        if self.paused_at is not None:
            self._measure(self._shared.clock.now())
        if self.closing and not self._lost:
            self._transport.close()

    def backlog(self) -> int:
        return int(self._transport.get_write_buffer_size())

    def pause_writing(self) -> None:
        self.paused_at = now = self._shared.clock.now()
        self._progress = (self._written - self.backlog(), now)

    def resume_writing(self) -> None:
        self.paused_at = None
        response = self._response
        if response is not None and response.congested:
            response.congested = False
            if response.on_relief is not None:
                response.on_relief()

    def _measure(self, now: float) -> None:
        response, limits = self._response, self._shared.limits
        if response is None or not response.open or self.paused_at is None:
            return
        backlog = self.backlog()
        if backlog > limits.stream_backlog_bytes:
            response.overrun, response.open = True, False
        elif backlog * 2 > limits.stream_backlog_bytes or (
            now - self.paused_at > limits.congested_s
        ):
            response.congested = True

    # time and end

    def sweep(self, now: float) -> None:
        """Look at what is overdue."""
        if self.paused_at is not None:
            self._measure(now)
            self._check_stall(now)
        if self.deadline > now:
            return
        self.deadline = inf
        if self._deaf:
            self.abort()
        elif self._reader.stage != "idle":
            self._refuse(RequestTooSlow("the request did not arrive in time"))
        else:
            self.close()

    def _check_stall(self, now: float) -> None:
        taken = self._written - self.backlog()
        if taken != self._progress[0]:
            self._progress = (taken, now)
        elif now - self._progress[1] > self._shared.limits.stall_s:
            response = self._response
            if response is None or not response.open:
                self.abort()
                return
            response.overrun, response.open = True, False
            self._progress = (taken, now)

    def _linger(self) -> None:
        """Closing with unread input would reset the connection before the answer is read."""
        if data := self.take():
            self.write(data)
        self.deadline = self._shared.clock.now() + self._shared.limits.linger_s
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def drain(self) -> None:
        """Take no further request; close once the present one is answered."""
        self._queue.clear()
        if self._task is None:
            self.close()
        else:
            self._deaf = True
            if self._response is not None:
                self._response.keep_alive = False

    def close(self) -> None:
        """Close once everything is sent."""
        self._deaf = self.closing = True
        if not self._armed:
            self._transport.close()

    def abort(self) -> None:
        """Close now; what is unsent is lost, so a stream's reader sees that it is cut short."""
        self._deaf = True
        self._transport.abort()
