"""The connection of one HTTP client: answers its requests in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import cast

from dynamo.communication.http.request import Request, RequestQueue, RequestReader
from dynamo.communication.http.response import CONTINUE, Response
from dynamo.communication.http.server_state import HttpServerState
from dynamo.core.errors import DynamoError, InternalError, Overloaded, RequestTooSlow

log = logging.getLogger(__name__)


class HttpConnection(asyncio.Protocol):
    """Answers one request at a time. Requests read ahead wait in `_queue`.

    `deadline` is the time at which the server must call `check_timeouts`. `paused_at` is the time
    since which the kernel takes no more bytes, or None.
    """

    def __init__(self, state: HttpServerState) -> None:
        self._server_state = state
        self._reader = RequestReader(
            state.limits, self._enqueue, self._send_continue, state.check_headers, state.budget
        )
        self._queue = RequestQueue(state.limits, state.budget)
        self._rejection: DynamoError | None = None  # of the last request in the queue
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None  # the last one that was passed to the handler
        self._response: Response | None = None
        self.output: list[bytes] = []
        self.pending_events: list[bytes] = []
        self.chunked = False
        self._flush_scheduled = False
        self._flush_queue = state.flusher.queue
        self._input_closed = False  # True: received bytes are dropped
        self._reading_paused = False
        self._disconnected = False
        self.closing = False  # True: close once everything is sent
        self._messages_seen = 0
        self._message_started_at = 0.0
        self._body_bytes_seen: int | None = None
        self._written_bytes = 0
        self._last_progress = (0, 0.0)
        self.paused_at: float | None = None
        limits = state.limits  # a connection without a request gets the shorter timeout
        self.deadline = state.clock.now() + min(limits.header_timeout_s, limits.idle_timeout_s)

    # input

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.write: Callable[[bytes], None] = self._transport.write
        self._transport.set_write_buffer_limits(self._server_state.limits.high_water_bytes)
        state = self._server_state
        state.connections.add(self)
        room = state.descriptors.make_room(transport, state.connections, state.clock.now())
        if room == "full":
            hint = "`ulimit -n` sets the limit"
            self._reject(Overloaded("too many connections are open", hint=hint))
        elif room == "exhausted":
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self._input_closed:
            return
        try:
            if not self._reader.feed(data):
                self._input_closed = True
        except DynamoError as error:
            self._reject(error)
            return
        if self._input_closed:
            self._reader.drop_body()
        elif self._reader.stage != "idle":
            self._update_deadline()

    def eof_received(self) -> bool:
        return False  # a half-close is treated as a disconnect: they look the same

    def connection_lost(self, error: Exception | None) -> None:
        del error
        state = self._server_state
        state.connections.discard(self)
        if state.leave_s < inf and not state.connections:
            state.left.set()
        self._input_closed = self._disconnected = True
        self._queue.clear()
        request, self._request = self._request, None
        if request is not None:
            request.release_body()
        self.deadline = inf
        self.paused_at = None
        self._reader.close()
        response, self._response = self._response, None
        if response is not None and not response.ended:
            response.open = False
            if self._task is not None:
                self._server_state.tasks.cancel(self._task)

    def _enqueue(self, request: Request) -> None:
        self.deadline = inf
        if self._task is None:
            self._start_handler(request)
            return
        if self._rejection is not None:
            return  # the request follows a rejected one in the same bytes
        self._queue.append(request)
        try:
            self._server_state.budget.check(len(request.body))
        except DynamoError as error:
            request.release_body()
            self._rejection, self._input_closed = error, True
        if not self._reading_paused and self._queue.is_full():
            self._reading_paused = True
            self._transport.pause_reading()

    def _send_continue(self) -> None:
        if self._task is None and not self._queue:
            self.output.append(CONTINUE)
            self.schedule_flush()

    def _update_deadline(self) -> None:
        """Set the deadline for the next bytes of a request that has arrived in part.

        The bytes of a body earn time by `min_body_rate`, and at most the header timeout in advance.
        """
        if self._reading_paused:
            self.deadline = inf
            return
        now = self._server_state.clock.now()
        reader, limits = self._reader, self._server_state.limits
        if reader.messages_started != self._messages_seen:
            self._messages_seen = reader.messages_started
            self._message_started_at = now
            self._body_bytes_seen = None
        if reader.stage == "headers":
            self.deadline = self._message_started_at + limits.header_timeout_s
            return
        latest, seen = now + limits.header_timeout_s, self._body_bytes_seen
        if seen is None or self.deadline == inf:
            self.deadline = latest
        else:
            earned_s = (reader.body_bytes - seen) / limits.min_body_rate
            self.deadline = min(latest, self.deadline + earned_s)
        self._body_bytes_seen = reader.body_bytes

    # requests, one at a time

    def _reject(self, error: DynamoError) -> None:
        """Answer `error` after the earlier requests, then close."""
        self._reader.drop_body()
        if self._input_closed:
            return
        self._input_closed = True
        self.deadline = inf
        self._rejection = error
        self._queue.append(self._reader.failed_request())
        if self._task is None:
            self._answer_next()

    def _answer_next(self) -> None:
        request = self._queue.popleft()
        if self._rejection is None or self._queue:
            self._start_handler(request)
            return
        response = self._new_response(request.method, "1.1", keep_alive=False)
        self._server_state.on_error(self._rejection, request, response)
        self._linger()

    def _start_handler(self, request: Request) -> None:
        self._request = request
        stays = self._server_state.leave_s == inf or bool(self._queue)
        response = self._new_response(
            request.method, request.version, keep_alive=request.keep_alive and stays
        )
        self._task = self._server_state.tasks.start_self_removing(
            self._run_handler(request, response)
        )

    def _new_response(self, method: str, version: str, *, keep_alive: bool) -> Response:
        limit = self._server_state.limits.stream_backlog_bytes
        self._response = Response(self, method, version, keep_alive=keep_alive, backlog_limit=limit)
        return self._response

    async def _run_handler(self, request: Request, response: Response) -> None:
        try:
            await self._server_state.handler(request, response)
            if not response.ended:
                raise InternalError("the handler did not finish its response")  # noqa: TRY301
        except DynamoError as error:
            self._send_error(error, request, response)
        except Exception:
            log.exception("request handler failed", extra={"fields": {"path": request.path}})
            self._send_error(InternalError("an internal error occurred"), request, response)
        finally:
            self._request = None
            if request.hold is not None:
                request.hold.release()
            self._on_response_finished(response)

    def _send_error(self, error: DynamoError, request: Request, response: Response) -> None:
        if response.started:
            self.abort()
        else:
            self._server_state.on_error(error, request, response)

    def _on_response_finished(self, response: Response) -> None:
        task, self._task = self._task, None
        if task is not None:
            self._server_state.tasks.discard(task)
        if not response.ended:
            self.abort()
        elif not response.keep_alive:
            self._queue.clear()
            self.close()
        elif self._queue:
            self._answer_next()
            self._resume_reading()
        elif self._reader.stage == "idle":
            state = self._server_state
            idle_s = state.limits.idle_timeout_s if state.leave_s == inf else state.leave_s
            self.deadline = state.clock.now() + idle_s

    def _resume_reading(self) -> None:
        if self._reading_paused and not self._queue.is_full():
            self._reading_paused = False
            self._transport.resume_reading()
            if self._reader.stage != "idle" and not self._input_closed:
                self._update_deadline()

    # output

    def schedule_flush(self) -> None:
        if self._flush_scheduled:
            return
        self._flush_scheduled = True
        queue = self._flush_queue
        if not queue:
            self._server_state.flusher.schedule()
        queue.append(self)

    def pop_output(self) -> bytes:
        self._flush_scheduled = False
        output, events = self.output, self.pending_events
        if len(events) == 1 and self.chunked and not output:
            event = events.pop()
            data = b"%x\r\n%b\r\n" % (len(event), event)
        else:
            self.merge_events()
            data = output[0] if len(output) == 1 else b"".join(output)
            output.clear()
        if self._disconnected:
            return b""
        self._written_bytes += len(data)
        return data

    def merge_events(self) -> None:
        events = self.pending_events
        if events:
            data = b"".join(events)
            events.clear()
            self.output.append(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def on_written(self) -> None:
        if self.paused_at is not None:
            self._check_backlog(self._server_state.clock.now())
        if self.closing and not self._disconnected:
            self._transport.close()

    def unsent_bytes(self) -> int:
        return int(self._transport.get_write_buffer_size())

    def pause_writing(self) -> None:
        self.paused_at = now = self._server_state.clock.now()
        self._last_progress = (self._written_bytes - self.unsent_bytes(), now)
        if self._response is not None:
            self._response.paused_at = now

    def resume_writing(self) -> None:
        self.paused_at, response = None, self._response
        if response is not None:
            response.resume(self._server_state.clock.now())
        if response is not None and response.congested:
            response.congested = False
            if response.on_writable is not None:
                response.on_writable()

    def _check_backlog(self, now: float) -> None:
        response, limits = self._response, self._server_state.limits
        if response is None or not response.open or self.paused_at is None:
            return
        backlog = self.unsent_bytes()
        if backlog > limits.stream_backlog_bytes:
            response.overrun, response.open = True, False
        elif backlog * 2 > limits.stream_backlog_bytes or (
            now - self.paused_at > limits.congested_after_s
        ):
            response.congested = True

    # timeouts and closing

    @property
    def idle_since(self) -> float:
        """Time since which no complete request is here; inf while one is received or answered."""
        reader, limits = self._reader, self._server_state.limits
        if self._task is not None or self._queue or self.closing or self._disconnected:
            return inf
        if self._input_closed:
            return self.deadline - limits.linger_s
        if reader.stage != "idle":
            return self._message_started_at if reader.stage == "headers" else inf
        if reader.messages_started:
            return self.deadline - limits.idle_timeout_s
        return self.deadline - min(limits.header_timeout_s, limits.idle_timeout_s)

    def check_timeouts(self, now: float) -> None:
        """Handle a passed deadline, a full backlog and a stalled client."""
        if self.paused_at is not None:
            self._check_backlog(now)
            self._check_stall(now)
        if self.deadline > now:
            return
        self.deadline = inf
        if self._input_closed:
            self.abort()
        elif self._reader.stage != "idle":
            self._reject(RequestTooSlow("the request did not arrive in time"))
        else:
            self.close()

    def check_silence(self, now: float) -> None:
        """Let a stream break its silence. Bytes that a slow client has not taken are no silence."""
        response = self._response
        if response is None or response.on_silence is None or self.paused_at is not None:
            return
        try:
            response.check_silence(now, self._written_bytes)
        except Exception:
            log.exception("a silent stream failed")
            self.abort()

    def _check_stall(self, now: float) -> None:
        sent_bytes = self._written_bytes - self.unsent_bytes()
        if sent_bytes != self._last_progress[0]:
            self._last_progress = (sent_bytes, now)
        elif now - self._last_progress[1] > self._server_state.limits.stall_timeout_s:
            response = self._response
            if response is None or not response.open:
                self.abort()
                return
            response.overrun, response.open = True, False
            self._last_progress = (sent_bytes, now)

    def _linger(self) -> None:
        """Close the sending side only.

        Closing with unread input would reset the connection before the client reads the answer.
        """
        if data := self.pop_output():
            self.write(data)
        self.deadline = self._server_state.clock.now() + self._server_state.limits.linger_s
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def leave(self) -> None:
        """Close after the next answer that can say so, or without a request for `leave_s`."""
        response, state = self._response, self._server_state
        if self._task is None:
            self.deadline = min(self.deadline, state.clock.now() + state.leave_s)
        elif response is not None and not (response.started or self._queue):
            response.keep_alive = False

    def drain(self) -> None:
        """Accept no further request and close after the current answer."""
        self._queue.clear()
        if self._task is None:
            self.close()
        else:
            self._input_closed = True
            if self._response is not None:
                self._response.keep_alive = False

    def close(self) -> None:
        """Close after everything is sent."""
        self._input_closed = self.closing = True
        if not self._flush_scheduled:
            self._transport.close()

    def abort(self) -> None:
        """Close now and drop unsent bytes, so that the reader of a stream sees it is truncated."""
        self._input_closed = True
        self._transport.abort()
