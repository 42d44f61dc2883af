"""A NATS client that reconnects for ever. No other module imports the NATS library."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, Self

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.outage_log import OutageLog
from dynamo.communication.tls import client_tls_context
from dynamo.core.errors import ConfigError
from dynamo.core.redaction import redact_urls
from dynamo.core.tasks import BackgroundTasks, wait_at_most

log = logging.getLogger(__name__)
logging.getLogger("nats.aio.client").setLevel(logging.CRITICAL)  # `NatsClient` reports its errors

SLOW_RETRY_FACTOR: Final = 3.0
"""Factor by which the wait between attempts grows after `max_reconnect` attempts."""
PING_INTERVAL_S: Final = 0.4
"""Pause between an answer to a ping and the next ping."""
PING_TIMEOUT_S: Final = 0.8
"""A server that leaves a ping unanswered for this long is frozen or behind a silent network."""
MAX_PENDING_BYTES: Final = 64 << 20
CLOSE_TIMEOUT_S: Final = 1.0
MAX_STREAM_BYTES: Final = 1 << 30
"""Size limit of the JetStream stream. The oldest messages are dropped first."""
_NO_RESPONDERS: Final = "503"
_ERRORS: Final = (nats.errors.Error, OSError, TimeoutError, RuntimeError)
"""Errors of calls to the library. uvloop raises `RuntimeError` for a transport that has closed."""

_Operation = tuple[str, bytes, str] | tuple[str, bool] | tuple[()] | asyncio.Future[None]
"""Publish (subject, payload, reply), subscribe (subject, True), unsubscribe (subject, False),
flush and disconnect (), or flush and resolve a future."""
NatsMessageHandler = Callable[[str, bytes, str, bool], None]
"""Called with subject, payload, reply subject, and True for a "no responders" status message."""


class NatsClient:
    """Publishes and subscribes; both calls return at once.

    Messages published while NATS is unreachable are dropped. Subscriptions are renewed after a
    reconnect. `connection_error` says why there is no connection. Planes opened with the same
    `options.shared_clients` share one client per URL, until the last `close`.
    """

    def __init__(
        self, servers: Sequence[str], options: PlaneOptions, context: ssl.SSLContext | None
    ) -> None:
        self._servers = servers
        self._options = options
        self._context = context
        self._rng = Random()
        self._tasks = BackgroundTasks()
        self._client: Client | None = None
        self._handlers: dict[str, list[NatsMessageHandler]] = {}
        self._subscriptions: dict[str, Any] = {}
        self._outgoing: deque[_Operation] = deque()
        self._outgoing_ready = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._connected = asyncio.Event()
        self._state_callbacks: list[Callable[[bool], None]] = []
        self._closing = asyncio.Event()
        self._outage_log = OutageLog("nats", redact_urls(",".join(servers)))
        self._last_error = ""
        self._disconnect_reason = ""
        self._references = 1
        self.pending_bytes = 0
        self.connection_error = "not connected yet"
        self.first_attempt_done = asyncio.Event()

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Open `nats://HOST:PORT[,HOST:PORT]`, or `nats:tls://HOST:PORT` for TLS.

        The client connects in the background. Raises `ConfigError`.
        """
        shared_clients = options.shared_clients
        shared = None if shared_clients is None else shared_clients.get(url)
        if isinstance(shared, cls):
            shared._references += 1  # noqa: SLF001 - an object of this class
            return shared
        locations = url if url.startswith("nats://") else url.removeprefix("nats:")
        servers = [server.strip() for server in locations.split(",") if server.strip()]
        servers = [server if "://" in server else f"nats://{server}" for server in servers]
        if not servers or any(not server.partition("://")[2] for server in servers):
            raise ConfigError(f"{url!r} contains no server", hint="write nats://HOST:4222")
        context = None
        if options.server_tls or any(server.startswith("tls:") for server in servers):
            context = await asyncio.to_thread(client_tls_context, options.server_tls)
        client = cls(servers, options, context)
        client._tasks.start(client._run(), "nats client")
        if shared_clients is not None:
            shared_clients[url] = client
        return client

    @property
    def connected(self) -> bool:
        """True while the connection to NATS is up."""
        return self._connected.is_set()

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit for the payload of one message."""
        return 1 << 20 if self._client is None else int(self._client.max_payload)

    async def wait_connected(self) -> None:
        """Return once the connection to NATS is up."""
        await self._connected.wait()

    def on_connection_change(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(up)` whenever the connection is made (True) or lost (False)."""
        self._state_callbacks.append(callback)

    def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Send a message in order. Without subscribers, `reply` gets "no responders" from NATS."""
        if self.connected and self.pending_bytes < MAX_PENDING_BYTES:
            self.pending_bytes += len(payload)
            self._enqueue((subject, payload, reply))

    def subscribe(self, subject: str, handler: NatsMessageHandler) -> Callable[[], None]:
        """Call `handler` for every message. Returns a function that unsubscribes."""
        handlers = self._handlers.setdefault(subject, [])
        if not handlers:
            self._enqueue((subject, True))
        handlers.append(handler)

        def unsubscribe() -> None:
            if handler in handlers:
                handlers.remove(handler)
            if not handlers and self._handlers.get(subject) is handlers:
                del self._handlers[subject]
                self._enqueue((subject, False))

        return unsubscribe

    async def ensure_stream(self, stream: str, subjects: str, age_s: float) -> None:
        """Create or update a JetStream stream that stores `subjects`. A failure is logged."""
        if self._client is None:
            return
        config: dict[str, Any] = {"name": stream, "subjects": [subjects], "max_age": age_s}
        config |= {"max_bytes": MAX_STREAM_BYTES, "discard": "old"}
        jetstream = self._client.jetstream()
        try:
            try:
                await jetstream.update_stream(**config)
            except nats.js.errors.NotFoundError:
                await jetstream.add_stream(**config)
        except _ERRORS as error:
            fields = {"stream": stream, "error": str(error) or "no answer"}
            log.warning("jetstream stream could not be set up", extra={"fields": fields})

    async def flush(self) -> None:
        """Return when NATS has processed all earlier operations; at once while disconnected."""
        if self.connected:
            done = asyncio.get_running_loop().create_future()
            self._enqueue(done)
            await done

    async def close(self) -> None:
        """Send queued messages and disconnect, unless another plane still uses this client."""
        self._references -= 1
        if self._references:
            return
        self._closing.set()
        if self.connected and not self._disconnected.is_set():
            self._outgoing.append(())
            self._outgoing_ready.set()
            await wait_at_most(self._disconnected.wait(), CLOSE_TIMEOUT_S)
        self._state_callbacks.clear()
        self._disconnected.set()
        # the library leaks sockets if cancelled while it connects
        await wait_at_most(self._tasks.join(), CLOSE_TIMEOUT_S)
        await self._tasks.close()

    def _enqueue(self, operation: _Operation) -> None:
        if self.connected:
            self._outgoing.append(operation)
            self._outgoing_ready.set()

    async def _run(self) -> None:
        failures = 0
        for server in itertools.cycle(self._servers):
            if self._closing.is_set():
                return
            try:
                client = await self._connect(server)
            except _ERRORS as error:
                failures += 1
                reason = self._last_error or str(error) or "no answer"
                self._on_connect_failed(redact_urls(f"NATS at {server}: {reason}"))
                await self._sleep_unless_closing(self._retry_delay_s(failures))
                continue
            failures = 0
            try:
                await self._run_connection(client, server)
            except _ERRORS as error:
                self._disconnect_reason = f"closed the connection: {error}"
            finally:
                self._on_disconnected(redact_urls(f"NATS at {server} {self._disconnect_reason}"))
                await _close_client(client)
            await self._sleep_unless_closing(self._retry_delay_s(1) * self._rng.random())

    async def _sleep_unless_closing(self, seconds: float) -> None:
        await wait_at_most(self._closing.wait(), seconds)

    def _retry_delay_s(self, failures: int) -> float:
        wait_s = self._options.reconnect_wait_s
        return wait_s if failures <= self._options.max_reconnect else wait_s * SLOW_RETRY_FACTOR

    async def _connect(self, server: str) -> Client:
        client = Client()
        self._last_error = ""
        options = self._options

        async def on_closed() -> None:
            self._disconnected.set()

        credentials: dict[str, Any] = {"tls": self._context} if self._context else {}
        if options.user:
            credentials |= {"user": options.user, "password": options.password}
        try:
            async with asyncio.timeout(options.dial_timeout_s):
                await client.connect(
                    [server],
                    name="dynamo",
                    error_cb=self._on_library_error,
                    closed_cb=on_closed,
                    disconnected_cb=on_closed,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=max(1, round(options.dial_timeout_s)),
                    **credentials,
                )
        except BaseException:
            await _close_client(client)
            raise
        return client

    async def _run_connection(self, client: Client, server: str) -> None:
        if self._closing.is_set():
            return
        self._disconnected.clear()
        if not client.is_connected:
            return
        self._client = client
        for subject in list(self._handlers):
            await self._subscribe_on_server(client, subject)
        log.info("connected to nats", extra={"fields": {"server": redact_urls(server)}})
        self._outage_log.end()
        self.connection_error = ""
        self._connected.set()
        self.first_attempt_done.set()
        self._notify_state(up=True)
        self._disconnect_reason = "closed the connection"
        loop_tasks = [
            self._tasks.start(self._write_loop(client), "nats writer"),
            self._tasks.start(self._ping_loop(client), "nats pings"),
        ]
        try:
            await self._disconnected.wait()
        finally:
            for task in loop_tasks:
                task.cancel()

    async def _ping_loop(self, client: Client) -> None:
        """Ping until an answer is missing or the library has closed, perhaps without calling back.

        Each answer is awaited in two steps: if this process was suspended, the first step may time
        out with the answer unread.
        """
        while True:
            ping = self._tasks.start(_ping(client), "nats ping")
            try:
                for _ in range(2):
                    await asyncio.wait({ping}, timeout=PING_TIMEOUT_S / 2)
            finally:
                ping.cancel()
            if ping.done() and ping.result() and not client.is_closed:
                await asyncio.sleep(PING_INTERVAL_S)
                continue
            if not ping.done():
                self._disconnect_reason = "does not answer"
            self._disconnected.set()
            return

    async def _write_loop(self, client: Client) -> None:
        while True:
            while self._outgoing:
                operation = self._outgoing.popleft()
                try:
                    await self._execute(client, operation)
                except _ERRORS as error:
                    log.debug("nats message dropped", extra={"fields": {"error": str(error)}})
            self._outgoing_ready.clear()
            await self._outgoing_ready.wait()

    async def _execute(self, client: Client, operation: _Operation) -> None:
        if isinstance(operation, asyncio.Future):
            try:
                for _ in range(2):  # the library's first ping may overtake unwritten messages
                    await client.flush(round(CLOSE_TIMEOUT_S))
            finally:
                _resolve(operation)
        elif len(operation) == 3:
            subject, payload, reply = operation
            self.pending_bytes -= len(payload)
            await client.publish(subject, payload, reply)
        elif not operation:
            await client.flush(round(CLOSE_TIMEOUT_S))
            self._disconnected.set()
        elif operation[1]:
            await self._subscribe_on_server(client, operation[0])
        elif (subscription := self._subscriptions.pop(operation[0], None)) is not None:
            await subscription.unsubscribe()

    async def _subscribe_on_server(self, client: Client, subject: str) -> None:
        if subject in self._subscriptions or subject not in self._handlers:
            return

        async def on_message(message: Msg) -> None:
            headers = message.headers
            no_responders = headers is not None and headers.get("Status") == _NO_RESPONDERS
            for handler in tuple(self._handlers.get(subject, ())):
                handler(message.subject, message.data, message.reply, no_responders)

        self._subscriptions[subject] = await client.subscribe(subject, cb=on_message)

    def _on_connect_failed(self, reason: str) -> None:
        self._outage_log.report(reason)
        self.connection_error = reason
        self.first_attempt_done.set()

    def _on_disconnected(self, reason: str) -> None:
        self._client = None
        self._subscriptions.clear()
        for operation in self._outgoing:
            if isinstance(operation, asyncio.Future):
                _resolve(operation)
        self._outgoing.clear()
        self.pending_bytes = 0
        if self._connected.is_set():
            self._connected.clear()
            if not self._closing.is_set():
                log.warning("connection to nats lost", extra={"fields": {"error": reason}})
            self._outage_log.begin()
            self.connection_error = reason
            self._notify_state(up=False)

    async def _on_library_error(self, error: Exception) -> None:
        """Log an error outside of a call, for example a subscription that drops messages."""
        self._last_error = str(error) or type(error).__name__
        if self.connected:
            log.info("nats client error", extra={"fields": {"error": self._last_error}})

    def _notify_state(self, *, up: bool) -> None:
        for callback in tuple(self._state_callbacks):
            callback(up)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _ping(client: Client) -> bool:
    """Return True when the server has answered a ping, False when the connection has ended."""
    with suppress(*_ERRORS):
        await client.flush(round(PING_TIMEOUT_S * 10))
        return True
    return False


async def _close_client(client: Client) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await client.close()
    except _ERRORS as error:
        log.debug("closing the nats connection failed", extra={"fields": {"error": str(error)}})
